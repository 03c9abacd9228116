"""Argument validation.

Each function takes the name and the value of an argument and returns the value in one form, or
raises an error that names the argument. Arrays may be JAX's or NumPy's. As in jax.numpy, lists are
not arrays. Python and NumPy scalars are interchangeable.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

_FLOAT_DTYPES = ("float32", "float64", "bfloat16", "float16")
_KINDS = {
    jnp.floating: "floating point",
    jnp.inexact: "floating point or complex",
    jnp.number: "numeric",
    jnp.bool_: "boolean",
}


def describe(value: Any) -> str:
    """Return a short description of a value for error messages."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)[:80]
    kind = type(value).__name__
    if isinstance(value, (list, tuple, dict)):
        return f"a {kind} of {len(value)}"
    if isinstance(value, (jax.Array, np.ndarray)):
        article = "a traced" if isinstance(value, Tracer) else "an"
        return f"{article} array {value.dtype}{list(value.shape)}"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def as_array(name: str, value: Any, kind: Any = jnp.floating) -> jax.Array:
    """Return `value` as a JAX array; its dtype must be a subtype of `kind`."""
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if not is_array and not hasattr(value, "__jax_array__"):
        raise TypeError(f"`{name}` must be an array, not {describe(value)}; see jnp.asarray.")
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError):  # NumPy arrays of strings, objects or dates
        dtype = getattr(value, "dtype", None)
        raise TypeError(f"`{name}` must be numeric, but its dtype is {dtype}.") from None
    if not jnp.issubdtype(value.dtype, kind):
        expected = _KINDS.get(kind, kind.__name__)
        raise TypeError(f"`{name}` must be {expected}, but its dtype is {value.dtype}; cast it.")
    return value


def as_real_array(name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array of real numbers; layers promote integers, as Flax's do."""
    x = as_array(name, value, jnp.number)
    if jnp.iscomplexobj(x):  # a cast to a real dtype would drop the imaginary part
        raise TypeError(f"`{name}` must be real, but its dtype is {x.dtype}; pass its real part.")
    return x


def as_float_array(name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array whose dtype the native kernels support."""
    x = as_array(name, value, jnp.number)
    if str(x.dtype) not in _FLOAT_DTYPES:
        raise TypeError(
            f"`{name}` must be one of {', '.join(_FLOAT_DTYPES)}, but its dtype is {x.dtype}; cast "
            "it first."
        )
    return x


def as_mask(name: str, value: Any, other: str, shape: tuple[int, ...]) -> jax.Array:
    """Return a boolean array of rank `len(shape)` that broadcasts to the argument `other`."""
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
    # vmap inside jit passes NumPy arrays through, and the rules of custom_vjp fail on them. A copy
    # is a JAX array.
    if isinstance(mask, Tracer):
        mask = jnp.array(mask, copy=True)
    return mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)


def as_key(name: str, value: Any) -> jax.Array:
    """Return a single PRNG key, typed (a scalar) or raw (uint32 of rank 1)."""
    if isinstance(value, (jax.Array, np.ndarray)):
        is_typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if value.ndim == 0 if is_typed else value.dtype == jnp.uint32 and value.ndim == 1:
            return jnp.asarray(value)
    raise TypeError(
        f"`{name}` must be a single PRNG key such as jax.random.key(0), not {describe(value)}."
    )


def as_integer(name: str, value: Any, minimum: int) -> int:
    """Return a Python integer of at least `minimum`. Booleans and traced arrays are errors."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, not {describe(value)}.") from None
    if number < minimum:
        raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {minimum}.")
    return number


def as_number(name: str, value: Any, accepts: Callable[[float], bool], expected: str) -> float:
    """Return a Python float for which `accepts` is true.

    Args:
        name: the argument's name.
        value: a Python, NumPy or JAX scalar. Traced arrays are errors.
        accepts: the requirement.
        expected: the requirement in words, such as "positive".
    """
    try:
        if isinstance(value, (str, bytes)):  # float() would parse it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number, not {describe(value)}.") from None
    if not accepts(number):
        raise ValueError(f"`{name}` (={value!r}) must be {expected}.")
    return number


def check_choice(name: str, value: Any, *choices: str | None, hint: str = "") -> Any:
    """Return `value` if it is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = " or ".join("None" if c is None else f'"{c}"' for c in choices)
        raise ValueError(f"`{name}` (={value!r:.80}) must be {listed}{hint}.")
    return value


def as_dtype(name: str, value: Any, kind: Any = jnp.floating) -> jnp.dtype:
    """Return `value` as a dtype that is a subtype of `kind`."""
    dtype = None
    # jnp.dtype takes None for float64, and an array for its dtype.
    if value is not None and not isinstance(value, (jax.Array, np.ndarray)):
        with contextlib.suppress(TypeError, ValueError):
            dtype = jnp.dtype(value)
    if dtype is None:
        raise TypeError(f"`{name}` must be a dtype, not {describe(value)}.")
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"`{name}` (={dtype}) must be {_KINDS.get(kind, kind.__name__)}.")
    return dtype


def as_precision(precision: Any, dtype: Any) -> Any:
    """Return a hashable `precision` that jax.lax accepts for arrays of this dtype."""
    precision = tuple(precision) if isinstance(precision, list) else precision
    if precision is None:
        return None
    matrix = jax.ShapeDtypeStruct((1, 1), dtype)
    try:
        jax.eval_shape(functools.partial(lax.dot, precision=precision), matrix, matrix)
    except (TypeError, ValueError):
        raise ValueError(
            f"`precision` (={precision!r:.80}) must be None or a precision of jax.lax, such as "
            '"highest".'
        ) from None
    return precision


def as_pair(name: str, value: Any, minimum: int) -> tuple[int, int]:
    """Return two integers for the spatial axes; a single integer stands for both."""
    try:
        both = tuple(as_integer(name, v, minimum) for v in _for_both_axes(value))
    except (TypeError, ValueError):
        both = ()
    if len(both) != 2:
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be one or two integers of at least {minimum}."
        )
    if max(both) >= 2**31:  # the native kernels use 32-bit attributes
        raise ValueError(f"`{name}` (={value!r:.80}) must be below 2**31.")
    return both


def as_padding(padding: Any) -> Any:
    """Return `padding` as "SAME", "SAME_LOWER", "VALID" or ((top, bottom), (left, right))."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(f'`padding` (={padding!r:.80}) must be "SAME", "VALID" or numbers.')
        return padding.upper()
    sides = _for_both_axes(padding)
    if len(sides) != 2:
        raise ValueError(f"`padding` (={padding!r:.80}) must have two entries, height and width.")
    return tuple(as_pair("padding", side, 0) for side in sides)


def _for_both_axes(value: Any) -> Any:
    is_sequence = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return value if is_sequence else (value, value)


def resolve_padding(padding: Any, size: Any, kernel_size: Any, strides: Any, dilation: Any) -> Any:
    """Return the result of `as_padding` as numbers, given an image of this size."""
    if not isinstance(padding, str):
        return padding
    extent = [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    return tuple(map(tuple, lax.padtype_to_pads(size, extent, strides, padding)))


def conv_output_size(
    size: Sequence[int],
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Return the spatial size of a convolution's output; below 1 if the output is empty."""
    return tuple(
        (n + sum(pads) - (k - 1) * d - 1) // s + 1
        for n, k, s, pads, d in zip(size, kernel_size, strides, padding, dilation, strict=True)
    )
