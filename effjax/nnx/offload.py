"""Models that live in host memory, for Flax NNX."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import lax

from ..layers.offload import (
    apply_like_layers,
    apply_list,
    call_with,
    check_flags,
    check_layers,
    check_on_host,
    first_input,
    once,
    options_of,
    taken,
)
from ..ops._common.arguments import describe
from ..ops.offload.checks import as_key
from ..ops.offload.placement import Space, moved

# What a layer may change in its call.
COUNTED = (nnx.BatchStat, nnx.RngCount)


class OffloadModel(nnx.Module):
    """Layers one after the other; their parameters stream from host memory through the device.

    ``OffloadModel([a, b, c])`` computes what ``nnx.Sequential(a, b, c)`` does and has its Variables
    under the same paths (`layers/0/…`), so that checkpoints load both ways. `to_host` moves the
    parameters to where they are expected; gradients arrive there too::

        model = OffloadModel([Block(rngs=rngs) for _ in range(48)]).to_host()
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, x)

    How the layers stream:

    - A sequence of layers, alike or not, is unrolled: see `effjax.offload_sequential`, and compile
      with `effjax.offload_jit` on a GPU.
    - One module whose Variables all have a leading axis, as `nnx.vmap` makes it or as
      `TransformerLM.blocks`, is a stack of like layers: a loop that loads the next slice while one
      is computed, see `effjax.offload_scan`, `host_init` and `stream_update`. Better for many like
      layers: what is compiled does not grow with their number.

    The device holds the parameters of one slice (of two, in a stack) and the intermediates of one
    slice and one microbatch. In the backward pass each slice is computed again from its input, but
    for what `policy` keeps.

    Args:
        layers: the modules and functions of a sequence, an `nnx.Sequential`, or a stack.
        num_slices: into how many slices of about the same bytes of parameters a sequence is cut,
            or into how many equal ones a stack. None: every layer is one, which needs the least
            memory; a slice should then be worth a copy, so make blocks of convolution, norm and
            activation.
        checkpoint_activation: whether the inputs of the slices, which are kept for the backward
            pass, are kept on the host, with what `policy` keeps; else on the device.
        num_microbatches: how many parts of the batch go through a slice before the next is loaded.
        compute_dtype: the floating-point dtype that real floating parameters are cast to on the
            device. None: they are not.
        policy: what else is kept, and not recomputed: one of ``jax.checkpoint_policies``, see
            `effjax.offload_scan`; everything_saveable is fairscale's checkpoint_activation=False.

    Dropout: layers with streams of their own (`nnx.Dropout(rngs=…)`) draw from them, and their
    counts advance once a call; with several microbatches, microbatch m draws from ``fold_in(key,
    m)`` in place of each stream's key. `rngs` in the call are for layers that take `rngs` or `key`.

    Batch norm normalizes each microbatch on its own. The running statistics are updated once a
    call, by the mean of the statistics of the microbatches: with one microbatch as they are in the
    unwrapped model, with several the running variance is that within a microbatch.

    Optimizers of optax work on the device only: see `OffloadOptimizer`, and `offload_jit` of this
    package, which compiles a step of both.

    Other Variables than Params stay on the device, and other than BatchStats and RngCounts must not
    be changed by a layer. Two layers may share Params, whose gradients are added on the device, and
    nothing else that is a Variable.

    Reverse mode only.

    Raises:
        ValueError, TypeError: in the constructor and in the call, for what does not fit.

    References:
        fairscale `OffloadModel`, whose defaults are 3 slices, activations on the device.
    """

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]] | nnx.Module,
        *,
        num_slices: int | None = None,
        checkpoint_activation: bool = True,
        num_microbatches: int = 1,
        compute_dtype: Dtype | None = None,
        policy: Callable[..., Any] | None = None,
    ):
        if isinstance(layers, nnx.Sequential):
            layers = layers.layers
        self.stacked = isinstance(layers, nnx.Module) and not isinstance(layers, nnx.List)
        sequence = check_layers([layers] if self.stacked else layers)
        self.layers: Any = layers if self.stacked else nnx.List(sequence)
        self.options = options_of(
            num_slices, checkpoint_activation, num_microbatches, compute_dtype, policy
        )

    def __call__(self, *args: Any, rngs: Any = None, **flags: Any) -> Any:
        """Applies the layers.

        Args:
            *args: the input. Between layers a tuple is several arguments and a dict those with
                names, as in `nnx.Sequential`.
            rngs: an `nnx.Rngs`, whose stream `dropout` is drawn from once, an `nnx.RngStream` or a
                key. Of this key k, layer i and microbatch m get ``fold_in(fold_in(k, i), m)``, as
                `key` or as ``nnx.Rngs(…)`` for `rngs`, if their call takes that.
            **flags: such as `deterministic` and `use_running_average`, for each layer whose call
                takes them; `train()`, `eval()` and `nnx.view` work as well.

        Returns:
            What the last layer returns.

        Raises:
            ValueError: if the parameters are not in host memory, or a layer changes what it must
                not.
            TypeError: for a flag that no layer takes, and an input or `rngs` that is none.
        """
        layers = self._sequence()
        check_flags(layers, flags)
        split = [_split(layer) for layer in layers]
        params = [params for _, params, _ in split]
        calls = [
            functools.partial(_call, layer, graphdef, moved(others, Space.Device), flags)
            for layer, (graphdef, _, others) in zip(layers, split, strict=True)
        ]
        if hasattr(self, "_nnx_tabulate_id"):  # nnx.tabulate: Flax stays broken after an error
            params = moved(params, Space.Host)
        check_on_host(params[0] if self.stacked else params, "Call its to_host() first.")
        x, key = first_input(args), _key(rngs)
        if self.stacked:
            _check_stacked(split[0][1:])
            x, changed = apply_like_layers(calls[0], params[0], x, key, self.options)
            changed = [once(changed, axis=1)]
        else:
            _check_shared(layers)
            x, changed = apply_list(calls, params, x, key, self.options)
            changed = once(changed)
        for layer, (_, _, others), new in zip(layers, split, changed, strict=True):
            if new:
                nnx.update(layer, _at_paths(others.counted, new))
        return x

    def to_host(self) -> "OffloadModel":
        """Moves the Params to pinned host memory, in place; returns the model.

        Afterwards `nnx.Optimizer` fails inside of optax ("Memory kind mismatch"), and
        `OffloadOptimizer` takes its place.
        """
        nnx.update(self, moved(nnx.state(self, nnx.Param), Space.Host))
        return self

    def _sequence(self) -> list[Callable[..., Any]]:
        return [self.layers] if self.stacked else list(self.layers)


class _Others(NamedTuple):
    """The Variables of a layer that are no Params, as nested dicts."""

    keys: Any  # RngKeys
    counted: Any
    rest: Any


def _split(layer: Callable[..., Any]) -> tuple[Any, Any, _Others]:
    """(graphdef, Params, others); a function has none."""
    if not isinstance(layer, nnx.Pytree):
        return None, {}, _Others({}, {}, {})
    graphdef, *states = nnx.split(layer, nnx.Param, nnx.RngKey, COUNTED, ...)
    params, *others = map(nnx.to_pure_dict, states)
    return graphdef, params, _Others(*others)


def _call(
    layer: Callable[..., Any], graphdef: Any, others: _Others, flags: Mapping[str, Any],
    w: Any, x: Any, i: jax.Array | None, m: jax.Array | None, key: jax.Array | None,
) -> tuple[Any, dict[int, jax.Array]]:  # fmt: skip
    """What a layer returns for microbatch m, and those leaves of `counted` that it has changed."""
    drawn = {} if key is None else {"key": key, "rngs": nnx.Rngs(key)}
    keywords = {**taken(layer, flags), **taken(layer, drawn)}
    if graphdef is None:
        return call_with(layer, x, keywords), {}
    if i is not None:
        at = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        others = jax.tree.map(at, others)
    if m is not None:
        fold = functools.partial(jax.random.fold_in, data=m)
        others = others._replace(keys=jax.tree.map(fold, others.keys))
    module: Any = nnx.merge(graphdef, w, *others)
    y = call_with(module, x, keywords)
    _, params, after = _split(module)
    _check_unchanged(layer, (w, others._replace(counted=())), (params, after._replace(counted=())))
    leaves = jax.tree.leaves(others.counted), jax.tree.leaves(after.counted)
    pairs = zip(*leaves, strict=True)
    return y, {j: lax.stop_gradient(b) for j, (a, b) in enumerate(pairs) if b is not a}


def _at_paths(tree: Any, leaves: dict[int, jax.Array]) -> dict:
    """A nested dict with only these of the leaves of `tree`, replaced."""
    paths = [tuple(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return nnx.traversals.unflatten_mapping({paths[j]: a for j, a in leaves.items()})


def _key(rngs: Any) -> jax.Array | None:
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    if rngs is None or isinstance(rngs, jax.Array):
        return as_key("rngs", rngs)
    raise TypeError(f"`rngs` must be an nnx.Rngs, an nnx.RngStream or a key, not {describe(rngs)}.")


def _check_unchanged(layer: Any, before: Any, after: Any) -> None:
    a, b = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (before, after))
    changed = [path for path in {**a, **b} if a.get(path) is not b.get(path)]
    if changed:
        names = ", ".join(
            sorted(".".join(str(k.key) for k in p if hasattr(k, "key")) for p in changed)
        )
        raise ValueError(
            f"a {type(layer).__name__} changes {names} in its call, but in OffloadModel layers may "
            "change BatchStats and RngCounts only."
        )


def _check_stacked(tree: Any) -> None:
    shapes = {
        jax.tree_util.keystr(path): jnp.shape(a)
        for path, a in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len({shape[:1] for shape in shapes.values()} | {()}) != 2:
        raise ValueError(
            "the Variables of a stack of layers must all have the same leading axis, the layers, "
            f"but their shapes are {shapes or 'none'}. Pass a list for a single module."
        )


def _check_shared(layers: Sequence[Callable[..., Any]]) -> None:
    owners: dict[int, int] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, nnx.Pytree):
            continue
        for path, variable in nnx.iter_graph(layer, graph=True):
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.Param):
                continue
            first = owners.setdefault(id(variable), i)
            if first != i:
                raise ValueError(
                    f"layers {first} and {i} share the {type(variable).__name__} "
                    f"{'.'.join(map(str, path))}: in OffloadModel they may share Params only."
                )
