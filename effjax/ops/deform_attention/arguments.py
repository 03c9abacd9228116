"""What ms_deform_attn and dcn_aggregate take, checked."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._common.arguments import (
    as_flag,
    as_float_array,
    as_integer,
    as_number,
    as_padding,
    as_pair,
    describe,
    resolve_padding,
)
from ..deform_conv.arguments import output_size
from .window import Window

_LOCATIONS, _WEIGHTS = "[N, Q, M, L, P, 2]", "[N, Q, M, L, P]"


def as_attention(value: Any, spatial_shapes: Any, locations: Any, weights: Any) -> tuple[Any, ...]:
    """The arrays of ms_deform_attn, and its (H, W) of each level."""
    value, locations, weights = (
        as_float_array(name, a)
        for name, a in (
            ("value", value), ("sampling_locations", locations), ("attention_weights", weights)
        )
    )  # fmt: skip
    shapes = as_shapes(spatial_shapes)
    if value.ndim != 4 or 0 in value.shape[2:]:
        raise ValueError(f"`value` of shape {value.shape} must be [N, S, M, D], M and D positive.")
    check_pixels(value.shape[1], shapes)
    n, _, heads, _ = value.shape
    found = locations.shape
    if len(found) != 6 or found[0] != n or found[2:4] != (heads, len(shapes)) or found[5] != 2:
        raise ValueError(
            f"`sampling_locations` of shape {found} must be ({n}, Q, {heads}, {len(shapes)}, P, 2):"
            f" {_LOCATIONS} for the M heads of `value` {value.shape} and L levels."
        )
    if not found[4]:
        raise ValueError(f"`sampling_locations` of shape {found} has no points (P).")
    if weights.shape != found[:5]:
        raise ValueError(
            f"`attention_weights` of shape {weights.shape} must be {found[:5]}, {_WEIGHTS}."
        )
    return value, shapes, locations, weights


def as_shapes(spatial_shapes: Any) -> tuple[tuple[int, int], ...]:
    """(H, W) of each level, of numbers that are known when a program is traced."""
    is_array = isinstance(spatial_shapes, (np.ndarray, jax.Array))
    rows = None
    if isinstance(spatial_shapes, Tracer):
        raise TypeError(
            "`spatial_shapes` must be of Python's integers, not a traced array: slices of `value` "
            "have sizes that are known when the program is compiled."
        )
    if isinstance(spatial_shapes, Sequence) and not isinstance(spatial_shapes, str):
        rows = list(spatial_shapes)
    elif is_array and spatial_shapes.ndim == 2:
        rows = list(np.asarray(spatial_shapes))
    if not rows:
        raise TypeError(
            "`spatial_shapes` must be a sequence of (height, width), one for each level, not "
            f"{describe(spatial_shapes)}."
        )
    shapes = []
    for row in rows:
        row = tuple(row) if isinstance(row, Iterable) and not isinstance(row, str) else (row,)
        if len(row) != 2:
            raise ValueError(f"`spatial_shapes` has {row!r:.80}, but a level is (height, width).")
        shapes.append(tuple(as_integer("spatial_shapes", size, 1) for size in row))
    return tuple(shapes)


def check_pixels(pixels: int, shapes: tuple[tuple[int, int], ...]) -> None:
    wanted = sum(h * w for h, w in shapes)
    if pixels != wanted:
        raise ValueError(
            f"`value` has {pixels} pixels (S), but `spatial_shapes` {shapes} have {wanted}."
        )
    _check_fewer("value", pixels)


def _check_fewer(name: str, pixels: int) -> None:
    if pixels >= 2**30:
        raise ValueError(f"`{name}` must have fewer than 2**30 pixels, not {pixels}.")


def as_aggregation(
    x: Any, offset: Any, mask: Any, kernel_size: Any, strides: Any, padding: Any, dilation: Any
) -> tuple[Any, ...]:
    """The arrays of dcn_aggregate, and its window but for what scales and leaves out."""
    x, offset, mask = (
        as_float_array(name, a) for name, a in (("x", x), ("offset", offset), ("mask", mask))
    )
    for name, a in (("x", x), ("offset", offset), ("mask", mask)):
        if a.ndim != 4:
            raise ValueError(f"`{name}` of shape {a.shape} must be of images, [N, H, W, channels].")
    if 0 in x.shape[1:]:
        raise ValueError(f"`x` of shape {x.shape} is empty.")
    _check_fewer("x", x.shape[1] * x.shape[2])
    size = as_pair("kernel_size", kernel_size, 1)
    strides, dilation = as_pair("strides", strides, 1), as_pair("kernel_dilation", dilation, 1)
    pads = resolve_padding(as_padding(padding), x.shape[1:3], size, strides, dilation)
    return x, offset, mask, Window(size, strides, pads, dilation)


def with_scale(window: Window, offset_scale: Any, remove_center: Any) -> Window:
    """The window, with what scales its points and whether one is left out."""
    offset_scale = as_number("offset_scale", offset_scale, math.isfinite, "finite")
    if as_flag("remove_center", remove_center) and not all(k % 2 for k in window.kernel_size):
        raise ValueError(
            f"`remove_center` needs a window with a middle: kernel_size={window.kernel_size} must "
            "be odd."
        )
    if remove_center and window.kernel_size == (1, 1):
        raise ValueError("`remove_center` leaves no point of kernel_size=(1, 1).")
    return window._replace(offset_scale=offset_scale, remove_center=bool(remove_center))


def check_channels(x: Any, offset: Any, mask: Any, window: Window, groups: Any) -> int:
    """That offset and mask have the output's size and as many channels as points; the groups."""
    size = output_size(
        x.shape[1:3], window.kernel_size, window.strides, window.padding, window.kernel_dilation
    )
    if min(size) < 1:
        raise ValueError(
            f"The output would be empty, {size}: `x` of shape {x.shape} with padding="
            f"{window.padding} is smaller than kernel_size={window.kernel_size} with "
            f"kernel_dilation={window.kernel_dilation}."
        )
    want, points = (x.shape[0], *size), window.points
    found = mask.shape[-1] // points if groups is None else as_integer("offset_groups", groups, 1)
    if mask.shape != (*want, found * points) or not found:
        raise ValueError(
            f"`mask` of shape {mask.shape} must be [N, Ho, Wo, G * K], {want} with "
            f"{'a multiple of ' if groups is None else ''}{(found or 1) * points} channels for "
            f"{points} points a group."
        )
    if offset.shape != (*want, found * points * 2):
        raise ValueError(
            f"`offset` of shape {offset.shape} must be {(*want, found * points * 2)}, "
            f"[N, Ho, Wo, G * K * 2], as `mask` {mask.shape} says."
        )
    if x.shape[-1] % found:
        raise ValueError(
            f"The {x.shape[-1]} channels of `x` must be divisible by offset_groups (={found})."
        )
    return found
