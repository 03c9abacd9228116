"""Framework-independent parts of the linen and nnx `OffloadModel`."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.offload.options import OffloadOptions
from ..ops.offload.placement import Space, space_of
from ..ops.offload.sequential import apply_sequence
from ..ops.offload.slices import check_microbatches
from ..ops.offload.stack import apply_stack
from ..ops.offload.trees import Tree, as_array_tree, is_float


def make_options(
    num_slices: int | None, checkpoint_activation: bool, num_microbatches: int, compute_dtype: Any,
    policy: Any,
) -> OffloadOptions:  # fmt: skip
    """Return the options of the operators from those of the modules."""
    return OffloadOptions(
        num_slices,
        num_microbatches,
        activations="host" if checkpoint_activation else "device",
        compute_dtype=compute_dtype,
        has_aux=True,
        policy=policy,
    )


def apply_list(
    calls: Sequence[Callable], params: Sequence[Tree], x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, list]:
    """Apply different layers ``call(params, x, None, microbatch, key) -> (x, aux)``.

    The microbatch is None if there is only one. Returns x and aux [num_microbatches, ...] of each
    layer.
    """
    if options.num_microbatches == 1:
        layers = [lambda w, x, key, call=call: call(w, x, None, None, key) for call in calls]
        return apply_sequence(layers, params, x, key, options)

    # The number of the microbatch travels with x, once for each row. A layer may change the number
    # of rows.
    def with_number(call: Callable) -> Callable:
        def layer(w, x_and_number, key):
            x, m = x_and_number[0], x_and_number[1][0]
            x, aux = call(w, x, None, m, key)
            return (x, jnp.full(_num_rows(x), m)), aux

        return layer

    x = _add_microbatch_numbers(x, options.num_microbatches)
    layers = [with_number(call) for call in calls]
    (x, _), aux = apply_sequence(layers, params, x, key, options)
    return x, aux


def apply_identical_layers(
    call: Callable, params: Tree, x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, Tree]:
    """Apply a stack of layers ``call(params, x, i, microbatch, key) -> (x, aux)``.

    The microbatch is None if there is only one. Returns x and aux [L, num_microbatches, ...].
    """
    count = options.num_microbatches

    # The number i * num_microbatches + microbatch travels with x.
    def layer(w, x_and_number, key):
        x, number = x_and_number
        i, m = number.reshape(-1)[0], None
        if count > 1:
            i, m = i // count, i % count
        x, aux = call(w, x, i, m, key)
        return (x, number + count), aux

    x = _add_microbatch_numbers(x, count)
    (x, _), aux = apply_stack(layer, params, x, key, options)
    return x, aux


def _add_microbatch_numbers(x: Tree, num_microbatches: int) -> tuple[Tree, jax.Array]:
    x = jax.tree.map(jnp.asarray, x)
    if num_microbatches == 1:
        return x, jnp.int32(0)
    check_microbatches(x, num_microbatches)
    (rows,) = _num_rows(x)
    numbers = jnp.arange(num_microbatches, dtype=jnp.int32)
    return x, jnp.repeat(numbers, rows // num_microbatches)


def _num_rows(x: Tree) -> tuple[int, ...]:
    return jax.tree.leaves(x)[0].shape[:1]


def combine_statistics(new: Tree, axis: int = 0) -> Tree:
    """Combine the running statistics after each microbatch, stacked along `axis`, into one update.

    An update is affine, ``new[m] = momentum·old + (1 − momentum)·batch[m]``, so the mean of the
    updates is the update with the mean of the batches' statistics. Counts are equal in all of them.
    """

    def combine(a: jax.Array) -> jax.Array:
        if a.shape[axis] > 1 and is_float(a):
            return jnp.mean(a, axis)
        return jax.lax.index_in_dim(a, 0, axis, keepdims=False)

    return jax.tree.map(combine, new)


def call_layer(layer: Callable, x: Tree, keywords: Mapping[str, Any]) -> Tree:
    """Call a layer as Flax's Sequential does: a tuple is arguments, a dict keyword arguments."""
    if isinstance(x, tuple):
        return layer(*x, **keywords)
    if isinstance(x, dict):
        return layer(**x, **keywords)
    return layer(x, **keywords)


def get_input(args: tuple) -> Tree:
    """Return x from the arguments of a call."""
    if not args:
        raise TypeError("OffloadModel needs an input.")
    return as_array_tree("x", args[0] if len(args) == 1 else args, allow_scalars=True)


def check_layers(layers: Any) -> list[Callable]:
    """Return a sequence of layers as a list; raise ValueError if it is empty."""
    layers = list(layers)
    if not layers:
        raise ValueError("`layers` must have at least one layer.")
    return layers


def select_keywords(call: Callable, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are in the signature of `call`."""
    if not keywords:
        return {}
    try:
        names = inspect.signature(call).parameters
    except ValueError:  # some C functions have no signature
        names = {}
    return {name: value for name, value in keywords.items() if name in names}


def check_flags(calls: Iterable[Callable], flags: Mapping[str, Any]) -> None:
    """Raise TypeError unless each flag is static and some layer accepts it."""
    calls = list(calls)
    for name, value in flags.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"`{name}` must be a static flag such as True, not an array. Pass arrays with the "
                "input."
            )
        if not any(select_keywords(call, {name: value}) for call in calls):
            raise TypeError(f"No layer of OffloadModel accepts `{name}` (={value!r:.80}).")


def check_on_host(params: Tree, remedy: str) -> None:
    """Raise ValueError, with a remedy, if a parameter is not in host memory."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    elsewhere = [
        f"layers{jax.tree_util.keystr(path)}" for path, a in leaves if space_of(a) != Space.Host
    ]
    if elsewhere:
        more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
        raise ValueError(
            "The parameters of OffloadModel must be in host memory, but "
            f"{', '.join(elsewhere[:3])}{more} are not. {remedy}"
        )
