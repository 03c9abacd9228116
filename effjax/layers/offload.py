"""What the linen and the nnx `OffloadModel` have in common, as functions of arrays."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.arguments import as_flag, describe
from ..ops.offload.checks import as_arrays
from ..ops.offload.options import OffloadOptions
from ..ops.offload.placement import Space, space_of
from ..ops.offload.sequential import apply_sequence
from ..ops.offload.slices import check_microbatches
from ..ops.offload.stack import apply_stack
from ..ops.offload.trees import Tree, is_float


def options_of(
    num_slices: int | None, checkpoint_activation: bool, num_microbatches: int, compute_dtype: Any,
    policy: Any,
) -> OffloadOptions:  # fmt: skip
    """What both modules take, see there, as options of the operators."""
    on_host = as_flag("checkpoint_activation", checkpoint_activation)
    return OffloadOptions(
        num_slices,
        num_microbatches,
        activations="host" if on_host else "device",
        compute_dtype=compute_dtype,
        has_aux=True,
        policy=policy,
    )


def apply_list(
    calls: Sequence[Callable], params: Sequence[Tree], x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, list]:
    """(x, aux) of unlike layers ``call(params, x, None, microbatch, key) -> (x, aux)``.

    The number of the microbatch travels with x; it is None where there is but one. aux is
    [num_microbatches, ...] for each layer.
    """
    if options.num_microbatches == 1:
        layers = [lambda w, x, key, call=call: call(w, x, None, None, key) for call in calls]
        return apply_sequence(layers, params, x, key, options)

    def numbered(call: Callable) -> Callable:
        def layer(w, at, key):
            x, m = at[0], at[1][0]
            x, aux = call(w, x, None, m, key)
            return (x, jnp.full(_rows(x), m)), aux  # its rows need not be as many as before

        return layer

    at = _numbered(x, options.num_microbatches)
    (x, _), aux = apply_sequence([numbered(call) for call in calls], params, at, key, options)
    return x, aux


def apply_like_layers(
    call: Callable, params: Tree, x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, Tree]:
    """(x, aux) of like layers ``call(params, x, i, microbatch, key) -> (x, aux)``, stacked.

    The numbers travel with x, as i · num_microbatches + microbatch; the latter is None where there
    is but one. aux is [L, num_microbatches, ...].
    """
    count = options.num_microbatches

    def layer(w, at, key):
        x, number = at
        i, m = number.reshape(-1)[0], None
        if count > 1:
            i, m = i // count, i % count
        x, aux = call(w, x, i, m, key)
        return (x, number + count), aux

    at = _numbered(x, count)
    (x, _), aux = apply_stack(layer, params, at, key, options)
    return x, aux


def _numbered(x: Tree, num_microbatches: int) -> tuple[Tree, jax.Array]:
    """x, and for each of its rows the number of its microbatch."""
    x = jax.tree.map(jnp.asarray, x)
    if num_microbatches == 1:
        return x, jnp.int32(0)
    check_microbatches(x, num_microbatches)
    (rows,) = _rows(x)
    numbers = jnp.arange(num_microbatches, dtype=jnp.int32)
    return x, jnp.repeat(numbers, rows // num_microbatches)


def _rows(x: Tree) -> tuple[int, ...]:
    return jax.tree.leaves(x)[0].shape[:1]


def once(new: Tree, axis: int = 0) -> Tree:
    """One update of running statistics from those after each microbatch, which lie along `axis`.

    An update is affine, ``new[m] = momentum·old + (1 − momentum)·batch[m]``, so the mean of them
    is the update with the mean of the batches' statistics. Counts are the same in all of them.
    """

    def combine(a: jax.Array) -> jax.Array:
        if a.shape[axis] > 1 and is_float(a):
            return jnp.mean(a, axis)
        return jax.lax.index_in_dim(a, 0, axis, keepdims=False)

    return jax.tree.map(combine, new)


def call_with(layer: Callable, x: Tree, keywords: Mapping[str, Any]) -> Tree:
    """As Flax's Sequential: a tuple is the arguments, and a dict those with names."""
    if isinstance(x, tuple):
        return layer(*x, **keywords)
    if isinstance(x, dict):
        return layer(**x, **keywords)
    return layer(x, **keywords)


def first_input(args: tuple) -> Tree:
    """x, from the arguments of a call."""
    if not args:
        raise TypeError("OffloadModel needs an input.")
    return as_arrays("x", args[0] if len(args) == 1 else args, numbers=True)


def check_layers(layers: Any) -> list[Callable]:
    """A sequence of layers as a list; raises TypeError or ValueError for what is none."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(
            f"`layers` must be a sequence of modules and functions, not {describe(layers)}."
        )
    found = list(layers)
    for layer in found:
        if not callable(layer):
            raise TypeError(f"`layers` must be modules and functions, not {describe(layer)}.")
    if not found:
        raise ValueError("`layers` must not be empty: give at least one.")
    return found


def taken(call: Callable, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those keywords that the signature of `call` names."""
    if not keywords:
        return {}
    try:
        names = inspect.signature(call).parameters
    except ValueError:  # some functions from C
        names = {}
    return {name: value for name, value in keywords.items() if name in names}


def check_flags(calls: Iterable[Callable], flags: Mapping[str, Any]) -> None:
    """Raises TypeError unless each flag is no array and some layer takes it."""
    calls = list(calls)
    for name, value in flags.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"`{name}` must be no array but a flag, such as True: what goes with the batch "
                "belongs into the input."
            )
        if not any(taken(call, {name: value}) for call in calls):
            raise TypeError(f"no layer of OffloadModel takes `{name}` (={value!r:.80}).")


def check_on_host(params: Tree, hint: str) -> None:
    """Raises ValueError, with the hint, if a parameter is not in host memory."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    elsewhere = [f"layers{jax.tree_util.keystr(p)}" for p, a in leaves if _is_elsewhere(a)]
    if elsewhere:
        more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
        raise ValueError(
            "the parameters of OffloadModel must be in host memory, but "
            f"{', '.join(elsewhere[:3])}{more} are not. {hint}"
        )


def _is_elsewhere(a: Any) -> bool:
    return space_of(a) != Space.Host
