"""OffloadModel for Flax NNX."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from flax import nnx
from flax.typing import Dtype
from jax import lax

from ..layers.offload import (
    apply_identical_layers,
    apply_list,
    call_layer,
    check_flags,
    check_on_host,
    combine_statistics,
    get_input,
    make_options,
    select_keywords,
)
from ..ops._common.arguments import as_key, check_instance, check_layers
from ..ops.offload.placement import MemoryName, Space, move
from ..ops.offload.trees import count_layers

_MUTABLE = (nnx.BatchStat, nnx.RngCount)  # Variables that a layer may change in its call


class OffloadModel(nnx.Module):
    """Sequence or stack of layers whose parameters stream from host memory through the device.

    ``OffloadModel([a, b, c])`` computes the same as ``nnx.Sequential(a, b, c)``, and its Variables
    have the same paths (`layers/0/…`), so that checkpoints load both ways. `to_host` moves the
    parameters to host memory, where the gradients arrive too::

        model = OffloadModel([Block(rngs=rngs) for _ in range(48)]).to_host()
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, x)

    There are two forms:

    - A sequence of layers is unrolled, see `effjax.offload_sequential`. Compile with
      `effjax.offload_jit` on a GPU.
    - One module whose Variables all have a leading axis, as from `nnx.vmap`, is a stack of
      identical layers. It runs as a loop that loads the next slice during the computation, see
      `effjax.offload_scan`, `host_init` and `stream_update`. Prefer it for many identical layers:
      the size of the compiled program does not depend on their number.

    The device holds the parameters of one slice (of two, in a stack), and the intermediates of one
    slice and one microbatch. The backward pass recomputes each slice from its input, except for the
    values that `policy` keeps.

    Dropout: layers with their own streams (`nnx.Dropout(rngs=…)`) draw from them, and their counts
    advance once per call. With several microbatches, microbatch m draws from ``fold_in(key, m)`` of
    each stream's key. `rngs` in the call are for layers that accept `rngs` or `key`.

    Batch norm normalizes each microbatch separately. The running statistics are updated once per
    call, by the mean of the statistics of the microbatches. With one microbatch they are those of
    the unwrapped model; with several, the running variance is that within a microbatch.

    Optimizers of optax work on the device only. Use `OffloadOptimizer`, and compile a step of both
    with `effjax.nnx.offload_jit`.

    Variables other than Params stay on the device. A layer may change its BatchStats and RngCounts
    only. Two layers may share Params, whose gradients are added on the device, but no other
    Variables. Reverse mode only.

    Args:
        layers: a sequence of modules and functions, an `nnx.Sequential`, or a stack.
        num_slices: the number of slices, with about the same bytes of parameters in a sequence,
            or the same number of layers in a stack. By default each layer is a slice, which needs
            the least memory. A slice should be large enough to be worth a copy, such as a block of
            convolution, norm and activation.
        activations_in: the memory of the residuals (the inputs of the slices, and the values that
            `policy` keeps), "host" or "device".
        num_microbatches: the number of microbatches that go through a slice before the next one is
            loaded.
        compute_dtype: the floating-point dtype to which real floating-point parameters are cast on
            the device. If None, no cast.
        policy: the values that are not recomputed, one of ``jax.checkpoint_policies``, see
            `effjax.offload_scan`. everything_saveable is fairscale's checkpoint_activation=False.

    Raises:
        TypeError: if `layers` is neither a sequence nor a module.
        ValueError: if an option does not fit.

    References:
        fairscale `OffloadModel`, whose defaults are 3 slices and activations on the device.
    """

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]] | nnx.Module,
        *,
        num_slices: int | None = None,
        activations_in: MemoryName = "host",
        num_microbatches: int = 1,
        compute_dtype: Dtype | None = None,
        policy: Callable[..., Any] | None = None,
    ):
        if isinstance(layers, nnx.Sequential):
            layers = layers.layers
        kinds = Sequence, nnx.Module
        check_instance("layers", layers, kinds, "a sequence of layers or a module")
        self.stacked = isinstance(layers, nnx.Module) and not isinstance(layers, nnx.List)
        if not self.stacked:
            check_layers(layers)
        self.layers: Any = layers if self.stacked else nnx.List(cast(Sequence, layers))
        self.options = make_options(
            num_slices, activations_in, num_microbatches, compute_dtype, policy
        )

    def __call__(self, *args: Any, rngs: Any = None, **flags: Any) -> Any:
        """Apply the layers.

        Args:
            *args: the input. Between layers a tuple is passed as arguments and a dict as keyword
                arguments, as in `nnx.Sequential`.
            rngs: an `nnx.Rngs`, whose stream `dropout` is used once, an `nnx.RngStream` or a key
                k. Layer i and microbatch m get ``fold_in(fold_in(k, i), m)``, as `key` or as
                ``nnx.Rngs(…)`` for `rngs`, if their call accepts one of them.
            **flags: static flags such as `deterministic` and `use_running_average`, for each layer
                whose call accepts them. `train()`, `eval()` and `nnx.view` work as well.

        Returns:
            The result of the last layer.

        Raises:
            ValueError: if the parameters are not in host memory, or a layer changes a Variable that
                it may not change.
            TypeError: if no layer accepts a flag, or if `rngs` has another type.
        """
        layers = [self.layers] if self.stacked else list(self.layers)
        check_flags(layers, flags)
        split = [_split(layer) for layer in layers]
        params = [params for _, params, _ in split]
        calls = [
            functools.partial(_call, layer, graphdef, move(others, Space.Device), flags)
            for layer, (graphdef, _, others) in zip(layers, split, strict=True)
        ]
        if hasattr(self, "_nnx_tabulate_id"):
            # nnx.tabulate moves nothing to the host, and an error would leave Flax in a bad state.
            params = move(params, Space.Host)
        check_on_host(params[0] if self.stacked else params, "Call its to_host() first.")
        x, key = get_input(args), _get_key(rngs)
        if self.stacked:
            count_layers({"params": params[0], "others": split[0][2]}, "layers")
            x, changed = apply_identical_layers(calls[0], params[0], x, key, self.options)
            changed = [combine_statistics(changed, axis=1)]
        else:
            _check_shared(layers)
            x, changed = apply_list(calls, params, x, key, self.options)
            changed = combine_statistics(changed)
        for layer, (_, _, others), new in zip(layers, split, changed, strict=True):
            if new:
                nnx.update(layer, _replaced_leaves(others.mutable, new))
        return x

    def to_host(self) -> "OffloadModel":
        """Move the Params to pinned host memory, in place, and return the model.

        A Param that is also used outside of the model moves too: load it there with
        `effjax.to_device`. Errors under `effjax.nnx.offload_jit` name it.

        Use `OffloadOptimizer` afterwards. `nnx.Optimizer` fails in optax ("Memory kind mismatch").
        """
        nnx.update(self, move(nnx.state(self, nnx.Param), Space.Host))
        return self


class _OtherVariables(NamedTuple):
    """The Variables of a layer other than Params, as nested dicts."""

    keys: Any  # RngKeys
    mutable: Any  # BatchStats and RngCounts
    rest: Any


def _split(layer: Callable[..., Any]) -> tuple[Any, Any, _OtherVariables]:
    """Return (graphdef, Params, others), which are empty for a function."""
    if not isinstance(layer, nnx.Pytree):
        return None, {}, _OtherVariables({}, {}, {})
    graphdef, *states = nnx.split(layer, nnx.Param, nnx.RngKey, _MUTABLE, ...)
    params, *others = map(nnx.to_pure_dict, states)
    return graphdef, params, _OtherVariables(*others)


def _call(
    layer: Callable[..., Any], graphdef: Any, others: _OtherVariables, flags: Mapping[str, Any],
    w: Any, x: Any, i: jax.Array | None, m: jax.Array | None, key: jax.Array | None,
) -> tuple[Any, dict[int, jax.Array]]:  # fmt: skip
    """Call a layer: (y, the leaves of `others.mutable` that changed, by their index).

    i is the number of the layer in a stack, m that of the microbatch.
    """
    rng_keywords = {} if key is None else {"key": key, "rngs": nnx.Rngs(key)}
    keywords = {**select_keywords(layer, flags), **select_keywords(layer, rng_keywords)}
    if graphdef is None:
        return call_layer(layer, x, keywords), {}
    if i is not None:
        select = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        others = jax.tree.map(select, others)
    if m is not None:
        fold = functools.partial(jax.random.fold_in, data=m)
        others = others._replace(keys=jax.tree.map(fold, others.keys))
    module: Any = nnx.merge(graphdef, w, *others)
    y = call_layer(module, x, keywords)
    _, params, after = _split(module)
    _check_unchanged(layer, (w, others._replace(mutable=())), (params, after._replace(mutable=())))
    leaves = jax.tree.leaves(others.mutable), jax.tree.leaves(after.mutable)
    pairs = zip(*leaves, strict=True)
    return y, {j: lax.stop_gradient(b) for j, (a, b) in enumerate(pairs) if b is not a}


def _replaced_leaves(tree: Any, leaves: dict[int, jax.Array]) -> dict:
    """Return a nested dict with the given leaves of `tree` only, by their index."""
    paths = [tuple(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return nnx.traversals.unflatten_mapping({paths[j]: a for j, a in leaves.items()})


def _get_key(rngs: Any) -> jax.Array | None:
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    return None if rngs is None else as_key("rngs", rngs)


def _check_unchanged(layer: Any, before: Any, after: Any) -> None:
    a, b = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (before, after))
    changed = [path for path in {**a, **b} if a.get(path) is not b.get(path)]
    if changed:
        names = ", ".join(
            sorted(".".join(str(k.key) for k in p if hasattr(k, "key")) for p in changed)
        )
        raise ValueError(
            f"A {type(layer).__name__} changes {names} in its call. In OffloadModel layers may "
            "change BatchStats and RngCounts only."
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
                    f"Layers {first} and {i} share the {type(variable).__name__} "
                    f"{'.'.join(map(str, path))}. In OffloadModel they may share Params only."
                )
