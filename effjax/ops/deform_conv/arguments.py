"""What deform_conv2d takes, checked, and the geometry that follows from it."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import (
    as_float_array,
    as_integer,
    as_padding,
    as_pair,
    check_choice,
    resolve_padding,
)
from .reference import Geometry

_AXES = {
    "x": "[N, H, W, C]",
    "offset": "[N, Ho, Wo, G * K * 2]",
    "kernel": "[kh, kw, C / feature_group_count, O]",
    "mask": "[N, Ho, Wo, G * K]",
    "bias": "[O]",
}


def as_arrays(**arrays: Any) -> tuple[Any, ...]:
    """x, offset, kernel, mask and bias as JAX arrays; the last two may be None."""
    found: dict[str, Any] = {
        name: None if a is None and name in ("mask", "bias") else as_float_array(name, a)
        for name, a in arrays.items()
    }
    for name, a in found.items():
        if a is not None and a.ndim != _AXES[name].count(",") + 1:
            raise ValueError(f"`{name}` of shape {a.shape} must be {_AXES[name]}.")
    for name, sizes in (("x", found["x"].shape[1:]), ("kernel", found["kernel"].shape)):
        if 0 in sizes:
            raise ValueError(f"`{name}` of shape {found[name].shape} is empty.")
    return tuple(found.values())


def geometry_of(
    x, offset, kernel, strides: Any, padding: Any, dilation: Any, groups: int, offset_groups: Any
) -> Geometry:
    """The geometry, for channels that fit."""
    size = kernel.shape[:2]
    strides, dilation = as_pair("strides", strides, 1), as_pair("kernel_dilation", dilation, 1)
    pads = resolve_padding(as_padding(padding), x.shape[1:3], size, strides, dilation)
    if offset_groups is not None:
        offset_groups = as_integer("offset_groups", offset_groups, 1)
    channels, taps = offset.shape[-1], size[0] * size[1]
    found = channels // (2 * taps) if offset_groups is None else offset_groups
    if channels != found * 2 * taps or not channels:
        given = "" if offset_groups is None else f" and offset_groups={offset_groups}"
        wanted = f"a multiple of {2 * taps}" if offset_groups is None else 2 * taps * offset_groups
        raise ValueError(
            f"`offset` of shape {offset.shape} must have {wanted} channels (G * K * 2), for the "
            f"{taps} taps of `kernel` {kernel.shape}{given}.{_layout(x, offset, kernel, groups)}"
        )
    if kernel.shape[2] * groups != x.shape[-1] or kernel.shape[3] % groups:
        raise ValueError(
            f"`kernel` of shape {kernel.shape} must be [kh, kw, C / feature_group_count, O], O a "
            f"multiple of feature_group_count, for the {x.shape[-1]} channels of `x` "
            f"{x.shape} and feature_group_count={groups}.{_layout(x, offset, kernel, groups)}"
        )
    if x.shape[-1] % found:
        raise ValueError(
            f"The {x.shape[-1]} channels of `x` must be divisible by offset_groups (={found})."
        )
    return Geometry(size, strides, pads, dilation, found)


def _layout(x, offset, kernel, groups: int) -> str:
    """A hint at PyTorch's layouts, where the channels of these arrays would fit in them."""
    shapes = {"x": x.shape, "offset": offset.shape, "kernel": kernel.shape}
    for turned in itertools.product((False, True), repeat=3):
        names = [f"`{name}`" for name, turn in zip(shapes, turned, strict=True) if turn]
        orders = (0, 2, 3, 1), (0, 2, 3, 1), (2, 3, 1, 0)
        pixels, moves, weights = (
            [shape[i] for i in order] if turn else shape
            for shape, order, turn in zip(shapes.values(), orders, turned, strict=True)
        )
        kh, kw, channels, features = weights
        fits = channels * groups == pixels[-1] and features % groups == 0
        if names and fits and moves[-1] and moves[-1] % (2 * kh * kw) == 0:
            return (
                f" In PyTorch's layouts {' and '.join(names)} would fit: here images and offsets "
                "are NHWC and kernels HWIO. Transpose, or see effjax.compat."
            )
    return ""


def check_shapes(x, offset, kernel, mask, bias, geometry: Geometry) -> None:
    """That the output is not empty, and that offset, mask and bias have its size."""
    kh, kw, _, features = kernel.shape
    spatial = output_size(
        x.shape[1:3], (kh, kw), geometry.strides, geometry.padding, geometry.kernel_dilation
    )
    if x.shape[1] * x.shape[2] >= 2**31:
        raise ValueError(f"`x` of shape {x.shape} must have fewer than 2**31 pixels an image.")
    if min(spatial) < 1:
        raise ValueError(
            f"The output would be empty, {spatial}: `x` of shape {x.shape} with "
            f"padding={geometry.padding} is smaller than `kernel` of shape {kernel.shape} with "
            f"kernel_dilation={geometry.kernel_dilation}."
        )
    want = (x.shape[0], *spatial)
    taps = geometry.offset_groups * geometry.taps
    if offset.shape[:3] != want:
        raise ValueError(
            f"`offset` of shape {offset.shape} must be {(*want, taps * 2)}: [N, Ho, Wo, G * K * 2]."
        )
    if mask is not None and mask.shape != (*want, taps):
        raise ValueError(
            f"`mask` of shape {mask.shape} must be {(*want, taps)}, [N, Ho, Wo, G * K]."
        )
    if bias is not None and bias.shape != (features,):
        raise ValueError(
            f"`bias` of shape {bias.shape} must be ({features},), the outputs of `kernel`."
        )


def output_size(size, kernel_size, strides, padding, dilation) -> tuple[int, ...]:
    """The pixels of a convolution's output along each axis; less than 1 for none."""
    return tuple(
        (n + sum(pads) - (k - 1) * d - 1) // s + 1
        for n, k, s, pads, d in zip(size, kernel_size, strides, padding, dilation, strict=True)
    )


def check_options(implementation: Any, deterministic: Any, precision: Any, groups: int) -> None:
    """Options that are not of the geometry; modules check them when they are made."""
    check_choice("implementation", implementation, None, "native", "xla", "fused")
    if implementation == "fused" and groups != 1:
        raise ValueError(
            f"`feature_group_count` (={groups}) must be 1 with `implementation='fused'`; the "
            "others have groups."
        )
    if not isinstance(deterministic, bool):
        raise ValueError(f"`deterministic` (={deterministic!r:.80}) must be True or False.")
    if precision is not None:
        try:
            _multiply_with(tuple(precision) if isinstance(precision, list) else precision)
        except (TypeError, ValueError, KeyError):
            raise ValueError(
                f"`precision` (={precision!r:.80}) must be one that jax.lax.dot_general takes."
            ) from None


@functools.cache
def _multiply_with(precision: Any) -> None:
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda a: lax.dot(a, a, precision=precision), one)
