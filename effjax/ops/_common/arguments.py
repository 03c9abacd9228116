"""Argument validation.

Each function takes the name and the value of an argument and returns the value in one form, or
raises an error that names the argument. Arrays may be JAX's or NumPy's. As in jax.numpy, lists are
not arrays. For integers and numbers, Python, NumPy and JAX scalars are interchangeable.
"""

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

# Arguments of PyTorch, and what they may be called here.
_TORCH_ARGUMENTS = {
    "weight": ("kernel", "scale"), "eps": ("epsilon",), "stride": ("strides",),
    "dilation": ("kernel_dilation",), "groups": ("feature_group_count",),
    "deformable_groups": ("offset_groups",), "deform_groups": ("offset_groups",),
    "process_group": ("axis_name",), "in_channels": ("in_features",),
    "out_channels": ("out_features", "features"),
}  # fmt: skip
_F = TypeVar("_F", bound=Callable[..., Any])

_KINDS = {
    jnp.floating: "floating point",
    jnp.integer: "integer",
    jnp.number: "numeric",
    jnp.bool_: "boolean",
}


def with_torch_hints(function: _F) -> _F:
    """Explain arguments in PyTorch's way: by its name, as in `f(stride=2)`, or by position."""
    if isinstance(function, type):  # a class without an own `__init__`, such as a linen module
        function.__init__ = with_torch_hints(function.__init__)
        return function  # type: ignore[return-value]
    spec = inspect.getfullargspec(inspect.unwrap(function))
    accepted = {*spec.args, *spec.kwonlyargs}
    by_position = [name for name in spec.args if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")
    ours = {
        theirs: name
        for theirs, names in _TORCH_ARGUMENTS.items()
        for name in names
        if name in accepted and theirs not in accepted
    }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for theirs in kwargs.keys() & ours.keys():
            raise TypeError(f"{name}() has no argument `{theirs}`; it is `{ours[theirs]}` here.")
        if len(args) > len(spec.args) and spec.kwonlyargs:
            raise TypeError(
                f"{name}() takes {', '.join(by_position)} by position; `{spec.kwonlyargs[0]}` is "
                f"a keyword, as in {name}(..., {spec.kwonlyargs[0]}=...)."
            )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


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


def as_array(name: str, value: Any, *kinds: Any) -> jax.Array:
    """Return `value` as a JAX array.

    Its dtype must be a subtype of one of `kinds`, by default floating point.
    """
    arrays = jax.Array, np.ndarray, np.generic
    if not isinstance(value, arrays) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()
    if not isinstance(value, arrays):
        raise TypeError(f"`{name}` must be an array, not {describe(value)}; see jnp.asarray.")
    kinds = kinds or (jnp.floating,)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        expected = " or ".join(str(_KINDS.get(kind, kind.__name__)) for kind in kinds)
        raise TypeError(f"`{name}` must be {expected}, but its dtype is {value.dtype}; cast it.")
    return jnp.asarray(value)


def as_real_array(name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array of real numbers; layers promote integers, as Flax's do."""
    return as_array(name, value, jnp.integer, jnp.floating)


def as_float_array(name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array whose dtype the native kernels support."""
    return as_array(name, value, jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)


def as_mask(name: str, value: Any, other: str, shape: tuple[int, ...]) -> jax.Array:
    """Return a boolean array of rank `len(shape)` that broadcasts to the argument `other`."""
    mask = as_array(name, value, jnp.bool_)
    try:
        fits = jnp.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` of shape {mask.shape} must broadcast to `{other}` of shape {shape}."
        )
    # Under vmap inside jit a tracer may hold a NumPy array, on which custom_vjp rules fail. Copying
    # makes it a JAX array.
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


def check_instance(name: str, value: Any, expected: Any, description: str) -> None:
    """Raise TypeError unless `value` is an instance of a class, or of one of several.

    `description` is their name in the error, such as "a DecoderConfig".
    """
    if not isinstance(value, expected):
        raise TypeError(f"`{name}` must be {description}, not {describe(value)}.")


def check_optimizer(tx: Any) -> None:
    """Raise TypeError unless `tx` has the functions of an optimizer of optax."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(f"`tx` must be an optax.GradientTransformation, not {describe(tx)}.")


def check_layers(layers: Any) -> None:
    """Raise TypeError unless `layers` is a sequence of modules or functions."""
    check_instance("layers", layers, Sequence, "a sequence of layers")
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"`layers[{i}]` must be a module or a function, not {describe(layer)}.")


def check_named_arrays(name: str, value: Any, needed: Collection[str] = ()) -> None:
    """Raise an error unless `value` is a dict of arrays or shapes that has the `needed` names."""
    check_instance(name, value, Mapping, "a dict of arrays")
    for key, a in value.items():
        if not (hasattr(a, "shape") and hasattr(a, "dtype")):
            raise TypeError(f"`{name}[{key!r:.80}]` must be an array, not {describe(a)}.")
    if missing := [key for key in needed if key not in value]:
        raise ValueError(f"`{name}` lacks {missing[0]!r}, one of {len(missing)} missing arrays.")


def as_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return a Python integer between `minimum` and `maximum`. Traced arrays are errors."""
    try:
        if isinstance(value, bool):  # index() would take it for 0 or 1
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, not {describe(value)}.") from None
    if number < minimum:
        raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {minimum}.")
    if maximum is not None and number > maximum:
        raise ValueError(f"`{name}` (={value!r:.80}) must be an integer of at most {maximum}.")
    return number


def check_sizes(sizes: Mapping[str, Any], **divisors: str) -> None:
    """Check sizes of a layer: at least 1, and each divisor divides the size that it names."""
    for name, size in sizes.items():
        as_integer(name, size, 1)
    for name, size in divisors.items():
        check_divides(name, sizes[name], sizes[size], size)


def as_number(name: str, value: Any, accepts: Callable[[float], bool], expected: str) -> float:
    """Return a Python float for which `accepts` is true.

    `expected` is that requirement in words, such as "positive". Traced arrays are errors.
    """
    try:
        if isinstance(value, (str, bytes, bool)):  # float() would parse them
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number, not {describe(value)}.") from None
    if not accepts(number):
        raise ValueError(f"`{name}` (={value!r:.80}) must be {expected}.")
    return number


def check_choice(name: str, value: Any, *choices: str | None, hint: str = "") -> Any:
    """Return `value` if it is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = " or ".join("None" if c is None else f'"{c}"' for c in choices)
        raise ValueError(f"`{name}` (={value!r:.80}) must be {listed}{hint}.")
    return value


def as_dtype(name: str, value: Any) -> jnp.dtype:
    """Return `value` as a floating-point dtype."""
    # jnp.dtype takes None for float64, and an array for its dtype.
    is_array = isinstance(value, (jax.Array, np.ndarray))
    dtype = None
    if value is not None and not is_array:
        with contextlib.suppress(TypeError):  # NumPy's error does not name the argument
            dtype = jnp.dtype(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` (={value!r:.80}) must be a floating-point dtype.")
    return dtype


def as_pair(name: str, value: Any, minimum: int) -> tuple[int, int]:
    """Return two integers for the spatial axes; a single integer stands for both."""
    try:
        both = tuple(as_integer(name, v, minimum) for v in _for_both_axes(value))
    except (TypeError, ValueError):
        both = ()
    if len(both) != 2 or max(both) >= 2**31:  # the native kernels have 32-bit attributes
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be one or two integers of at least {minimum} and "
            "below 2**31."
        )
    return both


def as_padding(padding: Any) -> Any:
    """Return `padding` as "SAME", "SAME_LOWER", "VALID" or ((top, bottom), (left, right))."""
    if isinstance(padding, str):
        return check_choice(
            "padding", padding.upper(), "SAME", "SAME_LOWER", "VALID", hint=" or numbers"
        )
    both = _for_both_axes(padding)
    if len(both) != 2:
        raise ValueError(
            f"`padding` (={padding!r:.80}) must be one number, or an entry for each of the two "
            "spatial axes."
        )
    height, width = both
    return as_pair("padding", height, 0), as_pair("padding", width, 0)


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
    name: str = "x",
) -> tuple[int, ...]:
    """Return the spatial size of a convolution's output, which must not be empty."""
    result = tuple(
        (n + sum(pads) - (k - 1) * d - 1) // s + 1
        for n, k, s, pads, d in zip(size, kernel_size, strides, padding, dilation, strict=True)
    )
    if min(*kernel_size, *result) < 1:
        raise ValueError(
            f"The output would be empty, {result}: `{name}` of size {tuple(size)} with "
            f"padding={padding} is smaller than a kernel of size {tuple(kernel_size)} with "
            f"dilation {dilation}."
        )
    return result


def check_shape(name: str, value: Any, shape: Sequence[int | str], meaning: str = "") -> None:
    """Check the shape of an array.

    `shape` has the size of each axis, or the name of an axis of any size: ("N", 4). `meaning`
    explains it in the error, without a full stop.
    """
    sizes = zip(value.shape, shape, strict=False)
    if value.ndim != len(shape) or any(not isinstance(n, str) and n != have for have, n in sizes):
        expected = str(tuple(shape)).replace("'", "") + (f", {meaning}" if meaning else "")
        raise ValueError(f"`{name}` of shape {value.shape} must be {expected}.")


def check_features(x: Any, expected: int, axes: Sequence[int] = (-1,)) -> None:
    """Raise ValueError unless `x` has this many features, by default at its last axis."""
    if any(not -x.ndim <= axis < x.ndim for axis in axes):
        found = "too few axes"
    elif (found := math.prod(x.shape[axis] for axis in axes)) == expected:
        return
    places = "the last axis" if tuple(axes) in ((-1,), (x.ndim - 1,)) else f"axes {tuple(axes)}"
    raise ValueError(
        f"`x` of shape {x.shape} must have {expected} features at {places}, not {found}. Features "
        "are last by default: images are [N, H, W, C], unlike PyTorch's."
    )


def check_size(name: str, size: int, what: str) -> None:
    """Check that an image is not empty, and that 32 bits can count its pixels or values."""
    if not 0 < size < 2**31:
        raise ValueError(f"`{name}` must have 1 to 2**31 - 1 {what}, not {size}.")


def check_divides(name: str, divisor: int, size: int, what: str) -> None:
    """Check that the argument `name` divides a number of channels."""
    if size % divisor:
        raise ValueError(f"`{name}` (={divisor}) must divide the {size} {what}.")
