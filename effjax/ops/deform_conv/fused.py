"""The forward pass on a GPU without columns: samples go straight into the matrix product.

A program of Pallas (Triton) has a tile of output pixels and output channels. For each tap it finds
the four pixels of its samples, interpolates some channels of them and multiplies these with their
part of the kernel. Nothing but the result is written.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .._common.dispatch import fail_at_compile_time, result_type, select_by_platform
from .._common.partitioning import merge_example_axis
from .._common.sharding import match_varying, zeros
from . import chunks, xla
from .chunks import Static
from .reference import Geometry

PIXELS = 64  # of a tile
OUTPUT_BYTES, CHANNEL_BYTES = (
    512,
    128,
)  # of a tile's rows at most: two tiles fit in shared memory


def on_a_gpu(static: Static, *args) -> jax.Array:
    """`forward`, in a program for an NVIDIA GPU; others cannot be compiled."""
    by_xla = functools.partial(chunks.forward, static._replace(sampler=xla.SAMPLER))
    elsewhere = fail_at_compile_time(by_xla, "deformable convolution", _only_there)
    return select_by_platform({"cuda": functools.partial(forward, static)}, elsewhere)(*args)


def _only_there(operator: str, platform: str) -> str:
    return (
        f"implementation='fused': this {operator} runs on NVIDIA GPUs alone, not on {platform!r}. "
        "Pass `implementation=None` for the best there is."
    )


def forward(static: Static, x, offset, mask, kernel, interpret: bool = False) -> jax.Array:
    """As `chunks.forward`, for one feature group: y [D, N, Ho, Wo, O] of x's dtype.

    Args:
        interpret: run it as plain JAX, on any platform.
    """
    examples, n = x.shape[:2]
    e, kh, kw, channels, outputs = kernel.shape
    height, width = offset.shape[2:4]
    shape = (examples, n * height * width, outputs)
    if n == 0 or examples == 0:
        return zeros((examples, n, height, width, outputs), x.dtype, x)
    if max(math.prod(x.shape[:4]), math.prod(shape[:2]) + PIXELS) >= 2**31:
        raise ValueError(
            f"`x` of shape {x.shape[1:]} with `offset` of shape {offset.shape[1:]} is too large "
            "for `implementation='fused'`, which counts pixels in 32 bits: pass fewer images."
        )
    # Rows of pixels, samples and taps: merged, for Triton's arrays have few axes.
    pixels = merge_example_axis(x).reshape(-1, channels)
    moves, factors = (
        merge_example_axis(a).reshape(math.prod(shape[:2]), a.shape[-1]) for a in (offset, mask)
    )
    weights = kernel.astype(x.dtype).reshape(e * kh * kw * channels, outputs)
    args = match_varying((pixels, moves, weights, *([factors] if mask.shape[-1] else [])))
    block = _tile_of(outputs, OUTPUT_BYTES, x.dtype)
    grid = pl.cdiv(shape[1], PIXELS), pl.cdiv(outputs, block), examples
    run = pl.pallas_call(
        functools.partial(
            _tile,
            geometry=static.geometry, size=x.shape[2:4], lines=(height, width), images=n,
            per_example=e > 1, precision=static.precision,
        ),
        out_shape=result_type(args[0], (math.prod(shape[:2]), outputs)),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=8 if block > 128 else 4, num_stages=2),
        interpret=interpret,
        name="effjax_deform_conv2d",
    )  # fmt: skip
    return run(*args).reshape(examples, n, height, width, outputs)


def _tile(
    x_ref, offset_ref, kernel_ref, *refs, geometry: Geometry, size: tuple[int, int],
    lines: tuple[int, int], images: int, per_example: bool, precision,
) -> None:  # fmt: skip
    """One tile of y: `PIXELS` of its pixels, and as many outputs as divide them well."""
    (*mask_ref, y_ref) = refs
    dtype, outputs = offset_ref.dtype, kernel_ref.shape[-1]
    block = _tile_of(outputs, OUTPUT_BYTES, x_ref.dtype)
    points = images * lines[0] * lines[1]  # of an example
    point = pl.program_id(0) * PIXELS + jnp.arange(PIXELS, dtype=jnp.int32)
    live, example = point < points, pl.program_id(2)
    to = example * points + point
    point = jnp.where(live, point, 0)
    image = example * images + lax.div(point, _like(point, lines[0] * lines[1]))
    at = example * points + point
    row = lax.rem(lax.div(point, _like(point, lines[1])), _like(point, lines[0]))
    column = lax.rem(point, _like(point, lines[1]))
    output = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    kept = output < outputs
    first = example * geometry.taps if per_example else jnp.int32(0)
    channels = x_ref.shape[-1] // geometry.offset_groups
    some = _tile_of(channels, CHANNEL_BYTES, x_ref.dtype)

    def tap(i, total):
        group, k = lax.div(i, jnp.int32(geometry.taps)), lax.rem(i, jnp.int32(geometry.taps))
        factor = triton.load(mask_ref[0].at[at, i], mask=live, other=0) if mask_ref else None
        corners = _corners(offset_ref, at, live, row, column, i, k, image, factor, geometry, size)

        def some_channels(j, total):
            channel = j * some + jnp.arange(some, dtype=jnp.int32)
            there = channel < channels
            channel = jnp.where(there, group * channels + channel, 0)
            samples = jnp.zeros((PIXELS, some), dtype)
            for index, inside, weight in corners:
                read = inside[:, None] & there[None]
                pixel = triton.load(x_ref.at[index[:, None], channel[None]], mask=read, other=0)
                samples += weight[:, None] * pixel.astype(dtype)
            part = (first + k) * x_ref.shape[-1] + channel
            wanted = there[:, None] & kept[None]
            weights = kernel_ref.at[part[:, None], jnp.where(kept, output, 0)[None]]
            weights = triton.load(weights, mask=wanted, other=0)
            return total + jnp.dot(
                samples.astype(x_ref.dtype), weights, precision=precision,
                preferred_element_type=dtype,
            )  # fmt: skip

        return _loop(pl.cdiv(channels, some), some_channels, total)

    total = jnp.zeros((PIXELS, block), dtype)
    total = _loop(geometry.offset_groups * geometry.taps, tap, total)
    here = y_ref.at[to[:, None], output[None]]
    triton.store(here, total.astype(y_ref.dtype), mask=live[:, None] & kept[None])


def _corners(
    offset_ref, at, live, row, column, i, k, image, factor, geometry: Geometry,
    size: tuple[int, int],
) -> list:  # fmt: skip
    """For each of a sample's four pixels: its row of x, whether it is one, and its weight."""
    dtype, positions = offset_ref.dtype, []
    taps_of_row = jnp.int32(geometry.kernel_size[1])
    steps = lax.div(k, taps_of_row), lax.rem(k, taps_of_row)
    for axis, of_output in enumerate((row, column)):
        start = of_output * geometry.strides[axis] - geometry.padding[axis][0]
        start += steps[axis] * geometry.kernel_dilation[axis]
        moved = triton.load(offset_ref.at[at, 2 * i + axis], mask=live, other=0)
        positions.append(start.astype(dtype) + moved)
    inside = live
    for position, most in zip(positions, size, strict=True):
        inside = inside & (position > -1) & (position < most)  # no for NaN
    positions = [jnp.where(inside, position, 0) for position in positions]
    floors = [jnp.floor(position) for position in positions]
    corners = []
    for down in (0, 1):
        for right in (0, 1):
            valid, weight, pixel = inside, jnp.ones_like(moved), image
            for position, floor, step, most in zip(
                positions, floors, (down, right), size, strict=True
            ):
                index = floor.astype(jnp.int32) + step
                valid = valid & (index >= 0) & (index < most)
                weight = weight * (position - floor if step else 1 - (position - floor))
                pixel = pixel * most + index
            weight = weight if factor is None else weight * factor
            corners.append((jnp.where(valid, pixel, 0), valid, jnp.where(valid, weight, 0)))
    return corners


def _tile_of(size: int, most_bytes: int, dtype) -> int:
    """A power of two that Triton multiplies, of at most so many bytes."""
    return min(max(pl.next_power_of_2(size), 16), most_bytes // dtype.itemsize)


def _loop(count: int, body, start):
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, start)


def _like(a: jax.Array, value: int) -> jax.Array:
    return jnp.full_like(a, value)
