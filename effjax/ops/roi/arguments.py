"""What the operators on boxes take, checked."""

from typing import Any

import jax
import jax.numpy as jnp

from .._common.arguments import as_float_array, as_integer, as_number, as_pair, check_choice
from .bins import MOST_SAMPLES

_LARGE = 1e30  # what float32 has no more is near


def as_images(name: str, value: Any, axes: str = "[N, H, W, C]") -> jax.Array:
    """Four axes of a dtype that can be computed with; only the batch may be empty."""
    a = as_float_array(name, value)
    if a.ndim != 4:
        raise ValueError(f"`{name}` of shape {a.shape} must be {axes}.")
    if 0 in a.shape[1:]:
        raise ValueError(f"`{name}` of shape {a.shape} is empty.")
    if a.size // max(a.shape[0], 1) >= 2**31:
        raise ValueError(
            f"`{name}` of shape {a.shape} must have fewer than 2**31 numbers an image."
        )
    return a


def as_boxes(value: Any, images: int) -> jax.Array:
    """[N, R, 4] for this many images."""
    boxes = as_float_array("boxes", value)
    if boxes.ndim != 3 or boxes.shape[0] != images or boxes.shape[2] != 4:
        hint = ""
        if boxes.ndim == 2:
            hint = " For a list of boxes with their images' numbers see effjax.compat."
        raise ValueError(
            f"`boxes` of shape {boxes.shape} must be [N, R, 4], (x1, y1, x2, y2), for the {images} "
            f"images of `x`.{hint}"
        )
    return boxes


def as_offset(value: Any, wanted: tuple[int, ...], axes: str) -> jax.Array:
    """Of this shape; -1 is any multiple of two."""
    offset = as_float_array("offset", value)
    fits = offset.ndim == len(wanted) and all(
        have == want or (want == -1 and have > 0 and have % 2 == 0)
        for have, want in zip(offset.shape, wanted, strict=True)
    )
    if not fits:
        shown = ", ".join("2 * G" if want == -1 else str(want) for want in wanted)
        raise ValueError(f"`offset` of shape {offset.shape} must be [{shown}]: {axes}.")
    return offset


def in_one_dtype(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """The others in float32, or in float64 where any is or x is."""
    dtypes = {str(a.dtype) for a in (x, *others)}
    dtype = jnp.dtype("float64" if "float64" in dtypes else "float32")
    return tuple(a.astype(dtype) for a in others)


def bins_of(output_size: Any) -> tuple[int, int]:
    return as_pair("output_size", output_size, 1)


def scale_of(spatial_scale: Any, name: str = "spatial_scale") -> float:
    return as_number(name, spatial_scale, lambda s: 0 < s < _LARGE, "positive, and below 1e30")


def factor_of(name: str, value: Any) -> float:
    return as_number(name, value, lambda s: abs(s) < _LARGE, "between -1e30 and 1e30")


def samples_of(name: str, value: Any, least: int) -> int:
    """Samples along each axis of a bin."""
    count = as_integer(name, value, least)
    if count > MOST_SAMPLES:
        raise ValueError(f"`{name}` (={value}) must be at most {MOST_SAMPLES}.")
    return count


def ratio_of(sampling_ratio: Any) -> int:
    """Samples along each axis of a bin; 0 for as many as it has pixels."""
    return max(samples_of("sampling_ratio", sampling_ratio, -1), 0)


def check_implementation(implementation: Any) -> None:
    check_choice("implementation", implementation, None, "native", "xla")
