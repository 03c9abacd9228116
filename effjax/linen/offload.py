"""Models that live in host memory, for Flax linen."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core.scope import LazyRng
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
from ..ops._common.arguments import as_integer
from ..ops.offload.options import OffloadOptions
from ..ops.offload.placement import Space, moved


class OffloadModel(nn.Module):
    """Layers one after the other; their parameters stream from host memory through the device.

    ``OffloadModel([a, b, c])`` computes what ``nn.Sequential([a, b, c])`` does and has its
    variables (`layers_0`, …), the same ones from the same key, so that checkpoints load both ways.
    `init` makes parameters where any module does; move them, and gradients arrive there too::

        model = OffloadModel([Block() for _ in range(48)])
        variables = model.init(key, x)
        variables["params"] = effjax.to_host(variables["params"])

    How the layers stream:

    - A sequence of layers, alike or not, is unrolled: see `effjax.offload_sequential`, and compile
      with `effjax.offload_jit` on a GPU.
    - One module with `num_layers` is a stack of like layers, with the variables of
      ``nn.scan(Block, {"params": 0, …}, split_rngs={"params": True, …})(name="layers")``: a loop
      that loads the next slice while one is computed, see `effjax.offload_scan`, `host_init` and
      `stream_update`. Better for many like layers: what is compiled does not grow with them. A
      module that is made inside another one's ``@nn.compact`` is called as Flax calls that one's
      parts: ``Block_0``, or by ``Block(name="blocks")``.

    The device holds the parameters of one slice (of two, in a stack) and the intermediates of one
    slice and one microbatch. In the backward pass each slice is computed again from its input, but
    for what `policy` keeps.

    Args:
        layers: the modules and functions of a sequence, an `nn.Sequential`, or a stack's module.
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
        num_layers: that of a stack.

    Dropout: layers draw what they draw in the unwrapped model; with several microbatches,
    microbatch m has ``fold_in(key, m)`` in place of each key of `rngs`. In a stack layer i has
    ``fold_in(fold_in(key, i), m)``. A module that is in the list twice draws other numbers there.

    Batch norm normalizes each microbatch on its own. The running statistics (`batch_stats`, to be
    `mutable`) are updated once a call, by the mean of the statistics of the microbatches: with one
    microbatch as they are in the unwrapped model, with several the running variance is that within
    a microbatch. Layers can change no other collection; nothing is sown.

    A module that is in the list twice has the sum of both gradients. One that is part of two layers
    (a tied embedding) is refused here: `effjax.nnx.OffloadModel` takes it.

    Reverse mode only.

    Raises:
        ValueError, TypeError: in the constructor and in a call, for what does not fit.

    References:
        fairscale `OffloadModel`, whose defaults are 3 slices, activations on the device.
    """

    layers: Sequence[Callable[..., Any]] | nn.Module
    num_slices: int | None = None
    checkpoint_activation: bool = True
    num_microbatches: int = 1
    compute_dtype: Dtype | None = None
    policy: Callable[..., Any] | None = None
    num_layers: int | None = None

    def __post_init__(self):
        if isinstance(self.layers, nn.Sequential) and self.num_layers is None:
            self.layers = self.layers.layers
        _options(self)
        _sequence(self)
        super().__post_init__()

    def __call__(self, *args: Any, **flags: Any) -> Any:
        """Applies the layers.

        Args:
            *args: the input. Between layers a tuple is several arguments and a dict those with
                names, as in `nn.Sequential`.
            **flags: such as `deterministic` and `use_running_average`, for each layer whose call
                takes them.

        Returns:
            What the last layer returns.

        Raises:
            ValueError: if the parameters are not in host memory.
            TypeError: for a flag that no layer takes, and an input that is none.
        """
        options, layers = _options(self), _sequence(self)
        check_flags(layers, flags)
        _check_parts(layers)
        x = first_input(args)
        if self.is_initializing():
            return _plain(layers, self.num_layers, x, flags)
        _check_shared(layers)
        split = [_split(layer, _times(layer, layers[:i])) for i, layer in enumerate(layers)]
        params = [module.params for module in split]
        check_on_host(
            params[0] if self.num_layers else params,
            'Pass {**variables, "params": effjax.to_host(variables["params"])}; and count FLOPs '
            "(tabulate) without OffloadModel.",
        )
        calls = [functools.partial(_call, module, flags) for module in split]
        if self.num_layers:
            x, new = apply_like_layers(calls[0], params[0], x, None, options)
            new = [once(new, axis=1)]
        else:
            x, new = apply_list(calls, params, x, None, options)
            new = once(new)
        for layer, stats in zip(layers, new, strict=True):
            for name, value in stats.items():
                layer.put_variable("batch_stats", name, value)
        return x


# Functions and no methods, since Flax records the calls of all methods.


def _options(model: OffloadModel) -> OffloadOptions:
    return options_of(
        model.num_slices, model.checkpoint_activation, model.num_microbatches, model.compute_dtype,
        model.policy,
    )  # fmt: skip


def _sequence(model: OffloadModel) -> list[Callable[..., Any]]:
    stacked = isinstance(model.layers, nn.Module)
    if stacked != (model.num_layers is not None):
        raise ValueError(
            f"`num_layers` (={model.num_layers!r}) is for a stack: where `layers` is one module."
        )
    if stacked:
        as_integer("num_layers", model.num_layers, 1)
    return check_layers([model.layers] if stacked else model.layers)


def _plain(
    layers: Sequence[Callable[..., Any]], num_layers: int | None, x: Any, flags: Mapping[str, Any]
) -> Any:
    """What makes the variables: no offloading."""
    if num_layers is None:
        for layer in layers:
            x = call_with(layer, x, taken(layer, flags))
        return x

    def body(layer, x, _):
        return call_with(layer, x, taken(layer, flags)), None

    scan = nn.scan(body, variable_axes={True: 0}, split_rngs={True: True}, length=num_layers)
    return scan(layers[0], x, None)[0]


class _Layer(NamedTuple):
    """A layer on its own, with what it has of the model."""

    module: Callable[..., Any]
    params: Any = {}
    others: Any = {}  # its other collections
    rngs: Mapping[str, LazyRng] = {}
    mutable: Any = False


def _split(layer: Callable[..., Any], times_before: int) -> _Layer:
    if not isinstance(layer, nn.Module):
        return _Layer(layer)
    module, variables = layer.unbind()
    variables = dict(variables)
    params = variables.pop("params", {})
    assert layer.scope is not None
    again = (times_before,) if times_before else ()
    rngs = {name: LazyRng.create(rng, *again) for name, rng in layer.scope.rngs.items()}
    mutable = ["batch_stats"] if layer.is_mutable_collection("batch_stats") else False
    return _Layer(module, params, moved(variables, Space.Device), rngs, mutable)


def _call(
    layer: _Layer, flags: Mapping[str, Any],
    w: Any, x: Any, i: jax.Array | None, m: jax.Array | None, key: None,
) -> tuple[Any, Any]:  # fmt: skip
    """What a layer returns for microbatch m, and its new `batch_stats`."""
    keywords = taken(layer.module, flags)
    if not isinstance(layer.module, nn.Module):
        return call_with(layer.module, x, keywords), {}
    others, rngs, numbers = layer.others, dict(layer.rngs), [m]
    if i is not None:
        at = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        others, numbers = jax.tree.map(at, others), [i, 0 if m is None else m]
    for number in numbers:
        if number is not None:
            rngs = {
                name: LazyRng(jax.random.fold_in(rng.rng, number), rng.suffix)
                for name, rng in rngs.items()
            }
    options: dict[str, Any] = dict(rngs=rngs, mutable=layer.mutable)
    apply: Any = functools.partial(layer.module.apply, {"params": w, **others}, **options)
    if not layer.mutable:
        return call_with(apply, x, keywords), {}
    y, new = call_with(apply, x, keywords)
    return y, lax.stop_gradient(dict(new.get("batch_stats", {})))


def _check_shared(layers: Sequence[Callable[..., Any]]) -> None:
    for i, layer in enumerate(layers):
        if _times(layer, layers[:i]) and "batch_stats" in getattr(layer, "variables", {}):
            raise ValueError(
                f"layer {i} is in the list twice, a {type(layer).__name__} with running statistics:"
                " in OffloadModel layers may share parameters only."
            )


def _check_parts(layers: Sequence[Any]) -> None:
    """Raises ValueError if a module within a layer has its variables elsewhere."""
    for i, layer in enumerate(layers):
        for part in _parts(layer):
            if part.scope.path[: len(layer.scope.path)] != layer.scope.path:
                raise ValueError(
                    f"layer {i}, a {type(layer).__name__}, has the {type(part).__name__} of "
                    f"{'/'.join(part.scope.path)}: in OffloadModel of linen two layers share "
                    "parameters only if they are one module; effjax.nnx.OffloadModel takes others."
                )


def _parts(module: Any) -> Iterator[Any]:
    """The modules that are attributes of a module, and theirs."""
    if not isinstance(module, nn.Module):
        return
    names = [field.name for field in dataclasses.fields(module) if field.name != "parent"]
    attributes = [getattr(module, name) for name in names]
    for part in jax.tree.leaves(attributes, is_leaf=lambda a: isinstance(a, nn.Module)):
        if isinstance(part, nn.Module) and part.scope is not None:
            yield part
            yield from _parts(part)


def _times(layer: Callable[..., Any], layers: Sequence[Callable[..., Any]]) -> int:
    return sum(other is layer for other in layers)
