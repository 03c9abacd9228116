"""OffloadModel: code shared by the linen and nnx modules.

The modules turn each layer into a function of its parameters, its input, and the numbers of the
layer and of the microbatch. This file calls the operators.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.offload.placement import MemoryName, Space, space_of
from ..ops.offload.sequential import apply_sequence
from ..ops.offload.slices import OffloadOptions
from ..ops.offload.stack import apply_stack
from ..ops.offload.trees import Tree, as_array_tree, is_inexact


def make_options(
    num_slices: int | None, activations_in: MemoryName, num_microbatches: int, compute_dtype: Any,
    policy: Any,
) -> OffloadOptions:  # fmt: skip
    """Convert the fields of the modules to the options of the operators."""
    return OffloadOptions(
        num_slices,
        num_microbatches,
        activations_in=activations_in,
        compute_dtype=compute_dtype,
        has_aux=True,  # the variables that a layer changes, such as running statistics
        policy=policy,
        pass_index=True,
    )


def apply_list(
    calls: Sequence[Callable], params: Sequence[Tree], x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, list]:
    """Apply a sequence of different layers.

    Args:
        calls: Functions ``(params, x, i, microbatch, key) -> (x, aux)``, one for each layer. i is
            always None here. microbatch is an int32 scalar, or None if there is only one.
        params: The parameters of each layer.
        x: The input, a pytree of arrays.
        key: A PRNG key, or None.
        options: Options of the operator.

    Returns:
        x after the last layer, and the aux of each layer, with arrays [num_microbatches, ...].
    """

    def without_layer_number(call: Callable) -> Callable:
        return lambda w, x, key, i, m: call(w, x, None, m if splits_batch else None, key)

    splits_batch = options.num_microbatches > 1
    return apply_sequence(list(map(without_layer_number, calls)), params, x, key, options)


def apply_identical_layers(
    call: Callable, params: Tree, x: Tree, key: Any, options: OffloadOptions
) -> tuple[Tree, Tree]:
    """Apply a stack of identical layers.

    Args:
        call: Function ``(params, x, i, microbatch, key) -> (x, aux)``. i, the number of the layer,
            is an int32 scalar, and so is microbatch, which is None if there is only one.
        params: The stacked parameters, with a leading axis of length L.
        x: The input, a pytree of arrays.
        key: A PRNG key, or None.
        options: Options of the operator.

    Returns:
        x after the last layer, and aux with arrays [L, num_microbatches, ...].
    """

    def layer(w: Tree, x: Tree, key: Any, i: jax.Array, m: jax.Array) -> tuple[Tree, Tree]:
        return call(w, x, i, m if options.num_microbatches > 1 else None, key)

    return apply_stack(layer, params, x, key, options)


def combine_statistics(new: Tree, axis: int = 0) -> Tree:
    """Combine the running statistics after each microbatch, stacked along `axis`, into one update.

    An update is affine, ``new[m] = momentum·old + (1 − momentum)·batch[m]``, so the mean of the
    updates is the update with the mean of the batches' statistics.
    """

    def combine(a: jax.Array) -> jax.Array:
        if a.shape[axis] > 1 and is_inexact(a):
            return jnp.mean(a, axis)
        # Integers are counters, which are equal after all microbatches.
        return jax.lax.index_in_dim(a, 0, axis, keepdims=False)

    return jax.tree.map(combine, new)


def call_layer(layer: Callable, x: Tree, keywords: Mapping[str, Any]) -> Tree:
    """Call a layer as Flax's Sequential does: unpack a tuple or a dict as its arguments."""
    if isinstance(x, tuple):
        return layer(*x, **keywords)
    if isinstance(x, dict):
        return layer(**x, **keywords)
    return layer(x, **keywords)


def get_input(args: tuple) -> Tree:
    """Return the input as a pytree of arrays: the only argument, or a tuple of several."""
    return as_array_tree("x", args[0] if len(args) == 1 else args, allow_scalars=True)


def select_keywords(call: Callable, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that `call` names in its signature; ``**kwargs`` accepts none."""
    if not keywords:
        return {}
    try:
        names = inspect.signature(call).parameters
    except ValueError:  # some C functions have no signature
        names = {}
    return {name: value for name, value in keywords.items() if name in names}


def check_flags(calls: Sequence[Callable], flags: Mapping[str, Any]) -> None:
    """Raise TypeError unless some layer accepts each flag."""
    for name, value in flags.items():
        if not any(select_keywords(call, {name: value}) for call in calls):
            raise TypeError(f"No layer of OffloadModel accepts `{name}` (={value!r:.80}).")


def check_on_host(params: Tree, remedy: str) -> None:
    """Raise ValueError if a parameter is not in host memory. The message ends with `remedy`."""
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
