"""What offloading is given: checks, and layers as the loops want them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._parallel import as_varying, explicit_axes
from .placement import SPACES, Space, space_of
from .slices import Tree, is_float, varying_axes


def check_layer(layer: Callable, has_aux: bool, keeps: bool = True) -> Callable:
    """``layer(params, x, key) -> (x, aux)`` that says what is wrong with what it returns."""

    def checked(params, x, key):
        result = layer(params, x, key)
        if not has_aux:
            result = result, ()
        elif not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"`layer` must return (x, aux) with has_aux=True, not {result!r}.")
        y, aux = jax.tree.map(strong, result)
        if keeps:
            _check_kept(x, y)
        return y, aux

    return checked


def _check_kept(x: Tree, y: Tree) -> None:
    before, after = jax.tree.structure(x), jax.tree.structure(y)
    if before != after:
        raise ValueError(f"`layer` must keep the structure of x: {before} became {after}.")
    leaves = jax.tree_util.tree_leaves_with_path(x)
    for (path, a), b in zip(leaves, jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"`layer` must keep the shapes and dtypes of x, but x{jax.tree_util.keystr(path)} "
                f"of {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}."
            )


def close_over(layer: Callable, w: Tree, x: Tree, key) -> tuple[Callable, list]:
    """(layer, shared): ``layer(params, shared, x, key)``, and what `layer` closes over.

    w and x show the types of the parameters and of a microbatch.
    """
    closed, result = jax.make_jaxpr(layer, return_shape=True)(w, x, key)
    hoisted = [isinstance(c, Tracer) for c in closed.consts]
    shared = [c for c, is_hoisted in zip(closed.consts, hoisted, strict=True) if is_hoisted]
    if any(space_of(c) == Space.Host for c in closed.consts):
        raise ValueError(
            "`layer` closes over an array in host memory; pass it in the parameters, or close over "
            "effjax.to_device of it."
        )
    axes = varying_axes(x)

    def converted(params, shared, x, key):
        rest = iter(shared)
        pairs = zip(closed.consts, hoisted, strict=True)
        consts = [next(rest) if is_hoisted else c for c, is_hoisted in pairs]
        run = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))
        return jax.tree.unflatten(
            jax.tree.structure(result), run(*jax.tree.leaves((params, x, key)))
        )

    return converted, [as_varying(a, axes) for a in shared]


def microbatch(x: Tree, num_microbatches: int) -> Tree:
    """The first one."""
    if num_microbatches == 1:
        return x
    return jax.tree.map(lambda a: a[: a.shape[0] // num_microbatches], x)


def check_floats(name: str, params: Tree) -> None:
    """Raises TypeError unless all parameters have gradients."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_float(leaf):
            raise TypeError(
                f"`{name}` must be floating-point to be differentiated, but {leaf.dtype} is the "
                f"dtype of {jax.tree_util.keystr(path) or 'it'}: let the layer close over what is "
                "no parameter, or pass it in `x`."
            )


def strong(x: Any) -> jax.Array:
    """An array whose dtype does not depend on what it meets."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype)


def num_layers_of(params: Tree) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path): a.shape[:1] for path, a in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values() or (0,) in sizes.values():
        raise ValueError(
            "`stacked_params` must be arrays [L, ...] with the same number of layers L, but their "
            f"first axes are {sizes or 'none'}."
        )
    return next(iter(sizes.values()))[0]


def num_slices_of(num_slices: int | None, num_layers: int, resident_slices: int) -> int:
    found = num_layers if num_slices is None else num_slices
    if not isinstance(found, int) or found < 1 or found > num_layers or num_layers % found:
        raise ValueError(
            f"`num_slices` (={num_slices}) must divide the number of layers (={num_layers})."
        )
    if resident_slices > found:
        raise ValueError(
            f"`resident_slices` (={resident_slices}) must be at most the number of slices "
            f"(={found})."
        )
    return found


def check_options(num_microbatches, prefetch, resident_slices, activations, grads) -> None:
    numbers = ("num_microbatches", num_microbatches, 1), ("prefetch", prefetch, 0)
    for name, value, least in (*numbers, ("resident_slices", resident_slices, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {least}.")
    for name, value in (("activations", activations), ("grads", grads or "host")):
        if value not in SPACES:
            raise ValueError(f'`{name}` (={value!r}) must be "host" or "device".')


def check_microbatches(x: Tree, num_microbatches: int) -> None:
    if num_microbatches == 1:
        return
    if any(map(explicit_axes, jax.tree.leaves(x))):
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) over a mesh with Explicit axes: every "
            "device must split its own rows; use it inside jax.shard_map."
        )
    shapes = [a.shape for a in jax.tree.leaves(x)]
    if len({s[:1] for s in shapes}) != 1 or not shapes[0] or shapes[0][0] % num_microbatches:
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must divide the batch, the first axis of "
            f"all arrays of x, but their shapes are {shapes}."
        )
