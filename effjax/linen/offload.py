"""OffloadModel for Flax linen."""

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
from ..ops._common.arguments import as_integer, check_layers
from ..ops.offload.placement import MemoryName, Space, move
from ..ops.offload.slices import OffloadOptions


class OffloadModel(nn.Module):
    """Sequence or stack of layers whose parameters stream from host memory through the device.

    ``OffloadModel([a, b, c])`` computes the same as ``nn.Sequential([a, b, c])``, and has the same
    variables (`layers_0`, …) with the same values from the same key, so that checkpoints load both
    ways. `init` creates the parameters on the device. Move them to host memory, where the gradients
    arrive too::

        model = OffloadModel([Block() for _ in range(48)])
        variables = model.init(key, x)
        variables["params"] = effjax.to_host(variables["params"])

    There are two forms:

    - A sequence of layers is unrolled, see `effjax.offload_sequential`. Compile with
      `effjax.offload_jit` on a GPU.
    - One module with `num_layers` is a stack of identical layers, with the variables of
      ``nn.scan(Block, {"params": 0, …}, split_rngs={"params": True, …})(name="layers")``. It runs
      as a loop that loads the next slice during the computation, see `effjax.offload_scan`,
      `host_init` and `stream_update`. Prefer it for many identical layers: the size of the compiled
      program does not depend on their number. In the ``@nn.compact`` method of another module, its
      name is the one that Flax gives to submodules there: ``Block_0``, or that of
      ``Block(name="blocks")``.

    Reverse mode only.

    `effjax.nnx.OffloadModel` describes what is on the device at a time.

    Dropout: layers draw the same numbers as in the unwrapped model. With several microbatches,
    microbatch m uses ``fold_in(key, m)`` of each key in `rngs`. In a stack, layer i uses
    ``fold_in(fold_in(key, i), m)``. A module that occurs twice in the list draws different numbers.

    Batch norm normalizes each microbatch separately. The running statistics (`batch_stats`, which
    must be `mutable`) are updated once per call, by the mean of the statistics of the microbatches.
    With one microbatch they are those of the unwrapped model; with several, the running variance is
    that within a microbatch. Layers can change no other collection, and `sow` has no effect.

    A module that occurs twice in the list gets the sum of both gradients. A module that is part of
    two layers (a tied embedding) is not supported; use `effjax.nnx.OffloadModel`. Only reverse-mode
    derivatives are supported.

    Args:
        layers: a sequence of modules and functions, an `nn.Sequential`, or the module of a stack.
        num_slices, activations_in, num_microbatches, compute_dtype, policy: as in
            `effjax.nnx.OffloadModel`.
        num_layers: the number of layers of a stack.

    Raises:
        ValueError: if `num_layers` does not fit `layers`, or if an option does not fit.

    References:
        fairscale `OffloadModel`, whose defaults are 3 slices and activations on the device.
    """

    layers: Sequence[Callable[..., Any]] | nn.Module
    num_slices: int | None = None
    activations_in: MemoryName = "host"
    num_microbatches: int = 1
    compute_dtype: Dtype | None = None
    policy: Callable[..., Any] | None = None
    num_layers: int | None = None

    def __post_init__(self):
        if isinstance(self.layers, nn.Sequential) and self.num_layers is None:
            self.layers = self.layers.layers
        _make_options(self)
        _list_layers(self)
        super().__post_init__()

    def __call__(self, *args: Any, **flags: Any) -> Any:
        """Apply the layers.

        Args:
            *args: the input. Between layers a tuple is passed as arguments and a dict as keyword
                arguments, as in `nn.Sequential`.
            **flags: static flags such as `deterministic` and `use_running_average`, for each layer
                whose call accepts them.

        Returns:
            The result of the last layer.

        Raises:
            ValueError: if the parameters are not in host memory.
            TypeError: if no layer accepts a flag.
        """
        options, layers = _make_options(self), _list_layers(self)
        check_flags(layers, flags)
        _check_submodules(layers)
        x = get_input(args)
        if self.is_initializing():
            return _initialize(layers, self.num_layers, x, flags)
        _check_shared(layers)
        split = [_split(layer, _count(layer, layers[:i])) for i, layer in enumerate(layers)]
        params = [module.params for module in split]
        check_on_host(
            params[0] if self.num_layers else params,
            'Pass {**variables, "params": effjax.to_host(variables["params"])}. To count FLOPs '
            "(tabulate), use the model without OffloadModel.",
        )
        calls = [functools.partial(_call, module, flags) for module in split]
        if self.num_layers:
            x, new = apply_identical_layers(calls[0], params[0], x, None, options)
            new = [combine_statistics(new, axis=1)]
        else:
            x, new = apply_list(calls, params, x, None, options)
            new = combine_statistics(new)
        for layer, stats in zip(layers, new, strict=True):
            for name, value in stats.items():
                layer.put_variable("batch_stats", name, value)
        return x


# Functions instead of methods, because Flax records the calls of all methods.


def _make_options(model: OffloadModel) -> OffloadOptions:
    return make_options(
        model.num_slices, model.activations_in, model.num_microbatches, model.compute_dtype,
        model.policy,
    )  # fmt: skip


def _list_layers(model: OffloadModel) -> list[Callable[..., Any]]:
    stacked = isinstance(model.layers, nn.Module)
    if stacked != (model.num_layers is not None):
        raise ValueError(
            f"`num_layers` (={model.num_layers!r}) must be set if `layers` is one module, a stack, "
            "and only then."
        )
    if isinstance(model.layers, nn.Module):
        as_integer("num_layers", model.num_layers, 1)
        return [model.layers]
    check_layers(model.layers)
    return list(model.layers)


def _initialize(
    layers: Sequence[Callable[..., Any]], num_layers: int | None, x: Any, flags: Mapping[str, Any]
) -> Any:
    """Apply the layers without offloading, which creates the variables."""
    if num_layers is None:
        for layer in layers:
            x = call_layer(layer, x, select_keywords(layer, flags))
        return x

    def body(layer, x, _):
        return call_layer(layer, x, select_keywords(layer, flags)), None

    scan = nn.scan(body, variable_axes={True: 0}, split_rngs={True: True}, length=num_layers)
    return scan(layers[0], x, None)[0]


class _Layer(NamedTuple):
    """An unbound layer with its variables."""

    module: Callable[..., Any]
    params: Any
    others: Any  # other collections
    rngs: Mapping[str, LazyRng]
    mutable: Any = False


def _split(layer: Callable[..., Any], num_before: int) -> _Layer:
    if not isinstance(layer, nn.Module):
        return _Layer(layer, {}, {}, {})
    module, variables = layer.unbind()
    variables = dict(variables)
    params = variables.pop("params", {})
    assert layer.scope is not None
    # A layer that occurs again in the list draws other numbers.
    suffix = (num_before,) if num_before else ()
    rngs = {name: LazyRng.create(rng, *suffix) for name, rng in layer.scope.rngs.items()}
    mutable = ["batch_stats"] if layer.is_mutable_collection("batch_stats") else False
    return _Layer(module, params, move(variables, Space.Device), rngs, mutable)


def _call(
    layer: _Layer, flags: Mapping[str, Any],
    w: Any, x: Any, i: jax.Array | None, m: jax.Array | None, key: None,
) -> tuple[Any, Any]:  # fmt: skip
    """Call a layer: (y, its new `batch_stats`).

    i is the number of the layer in a stack, m that of the microbatch.
    """
    keywords = select_keywords(layer.module, flags)
    if not isinstance(layer.module, nn.Module):
        return call_layer(layer.module, x, keywords), {}
    others, rngs, numbers = layer.others, dict(layer.rngs), [m]
    if i is not None:
        select = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        others, numbers = jax.tree.map(select, others), [i, 0 if m is None else m]
    for number in numbers:
        if number is not None:
            rngs = {
                name: LazyRng(jax.random.fold_in(rng.rng, number), rng.suffix)
                for name, rng in rngs.items()
            }
    options: dict[str, Any] = dict(rngs=rngs, mutable=layer.mutable)
    apply: Any = functools.partial(layer.module.apply, {"params": w, **others}, **options)
    if not layer.mutable:
        return call_layer(apply, x, keywords), {}
    y, new = call_layer(apply, x, keywords)
    return y, lax.stop_gradient(dict(new.get("batch_stats", {})))


def _check_shared(layers: Sequence[Callable[..., Any]]) -> None:
    for i, layer in enumerate(layers):
        if _count(layer, layers[:i]) and "batch_stats" in getattr(layer, "variables", {}):
            raise ValueError(
                f"Layer {i} occurs twice, a {type(layer).__name__} with running statistics. In "
                "OffloadModel layers may share parameters only."
            )


def _check_submodules(layers: Sequence[Any]) -> None:
    """Raise ValueError if a submodule of a layer has its variables in another layer."""
    for i, layer in enumerate(layers):
        for part in _submodules(layer):
            if part.scope.path[: len(layer.scope.path)] != layer.scope.path:
                raise ValueError(
                    f"Layer {i}, a {type(layer).__name__}, shares the {type(part).__name__} of "
                    f"{'/'.join(part.scope.path)}. In effjax.linen.OffloadModel two layers share "
                    "parameters only if they are the same module. Use effjax.nnx.OffloadModel."
                )


def _submodules(module: Any) -> Iterator[Any]:
    """Yield the modules that are attributes of a module, recursively."""
    if not isinstance(module, nn.Module):
        return
    names = [field.name for field in dataclasses.fields(module) if field.name != "parent"]
    attributes = [getattr(module, name) for name in names]
    for part in jax.tree.leaves(attributes, is_leaf=lambda a: isinstance(a, nn.Module)):
        if isinstance(part, nn.Module) and part.scope is not None:
            yield part
            yield from _submodules(part)


def _count(layer: Callable[..., Any], layers: Sequence[Callable[..., Any]]) -> int:
    return sum(other is layer for other in layers)
