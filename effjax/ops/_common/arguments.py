"""The door of every public function: an argument is what it must be, or an error names it.

Arrays are JAX's or NumPy's; lists are not taken, as in jax.numpy.
"""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

_OPERANDS = ("float32", "float64", "bfloat16", "float16")
_KINDS = {
    jnp.floating: "floating point",
    jnp.inexact: "floating point or complex",
    jnp.number: "numeric",
    jnp.bool_: "boolean",
}


def as_array(name: str, value: Any, kind: Any = jnp.floating) -> jax.Array:
    """`value` as a JAX array whose dtype is of this kind."""
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if not is_array and not hasattr(value, "__jax_array__"):
        raise TypeError(f"`{name}` must be an array, not {describe(value)}; see jnp.asarray.")
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError):  # NumPy's arrays of strings, objects, dates
        dtype = getattr(value, "dtype", None)
        raise TypeError(f"`{name}` must be of numbers, but its dtype is {dtype}.") from None
    if not jnp.issubdtype(value.dtype, kind):
        wanted = _KINDS.get(kind, kind.__name__)
        raise TypeError(f"`{name}` must be {wanted}, but its dtype is {value.dtype}; cast it.")
    return value


def as_float_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array of a dtype that the kernels compute with."""
    a = as_array(name, value, jnp.number)
    if str(a.dtype) not in _OPERANDS:
        raise TypeError(
            f"`{name}` must be one of {', '.join(_OPERANDS)}, but its dtype is {a.dtype}; cast it "
            "first."
        )
    return a


def as_mask(name: str, value: Any, other: str, shape: tuple[int, ...]) -> jax.Array:
    """A boolean array that broadcasts to the argument `other` of this shape, with its rank."""
    mask = as_array(name, value, jnp.generic)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"`{name}` must be boolean, but its dtype is {mask.dtype}; pass {name}.astype(bool)."
        )
    try:
        fits = jnp.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` of shape {mask.shape} must broadcast to `{other}` of shape {shape}."
        )
    if isinstance(mask, Tracer):  # JAX has no custom rules for a NumPy array that vmap maps in jit
        mask = jnp.array(mask, copy=True)
    return mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)


def as_integer(name: str, value: Any, least: int) -> int:
    """A Python integer of at least `least`: no float, no bool, no traced array."""
    try:
        number = least - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, not {describe(value)}.") from None
    if number < least:
        raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {least}.")
    return number


def as_number(name: str, value: Any, accepts: Callable[[float], bool], wanted: str) -> float:
    """A Python float that `accepts` takes; `wanted` says which those are ("positive")."""
    try:
        if isinstance(value, (str, bytes)):  # float() would read it
            raise TypeError
        number = float(value)  # a traced array raises a TypeError of JAX's
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number, not {describe(value)}.") from None
    if not accepts(number):
        raise ValueError(f"`{name}` (={value!r}) must be {wanted}.")
    return number


def check_choice(name: str, value: Any, *choices: str | None, hint: str = "") -> Any:
    """`value`, which is one of a few."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = " or ".join("None" if c is None else f'"{c}"' for c in choices)
        raise ValueError(f"`{name}` (={value!r:.80}) must be {listed}{hint}.")
    return value


def as_callable(name: str, value: Any) -> Callable:
    """A function, which is called later and must not fail there."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, not {describe(value)}.")
    return value


def describe(value: Any) -> str:
    """A value in few words: type, and itself where that is short."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)[:80]
    if isinstance(value, (list, tuple, dict)):
        return f"a {kind} of {len(value)}"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def as_flag(name: str, value: Any) -> bool:
    """True or False, and nothing else that has a truth value."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False, not {describe(value)}.")
    return bool(value)


def as_dtype(name: str, value: Any, kind: Any = jnp.floating) -> jnp.dtype:
    """A dtype of this kind, from what NumPy takes for one, but for None and arrays."""
    dtype = None
    if value is not None and not isinstance(value, (jax.Array, np.ndarray)):
        with contextlib.suppress(TypeError, ValueError):
            dtype = jnp.dtype(value)
    if dtype is None:
        raise TypeError(f"`{name}` must be a dtype, not {describe(value)}.")
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"`{name}` (={dtype}) must be {_KINDS.get(kind, kind.__name__)}.")
    return dtype


def as_precision(precision: Any, dtype: Any) -> Any:
    """What `jax.lax` takes for arrays of this dtype, and what can be hashed."""
    precision = tuple(precision) if isinstance(precision, list) else precision
    one = jax.ShapeDtypeStruct((1, 1), dtype)
    if precision is not None:
        try:
            jax.eval_shape(functools.partial(lax.dot, precision=precision), one, one)
        except (TypeError, ValueError):
            raise ValueError(
                f"`precision` (={precision!r:.80}) must be None, or what jax.lax takes for it, "
                'like "highest".'
            ) from None
    return precision
