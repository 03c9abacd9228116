"""The kernels with the calls that validate them: effjax's, cuDNN's attention and 8-bit products."""

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ops.attention import dot_product_attention
from ..ops.fp8 import E4M3, E5M2, fp8_linear
from ..ops.samplers.deform_attention.api import ms_deform_attn
from ..ops.samplers.deform_conv.api import deform_conv2d
from ..ops.samplers.roi.api import deform_roi_pool, roi_align

TABLE = "effjax.validation.kernels:KERNELS"
DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGE = "64-bit indices"  # the case that may exceed the memory


class Call(NamedTuple):
    """A call of an operator."""

    apply: Callable[..., jax.Array]  # apply(*args, implementation=...)
    args: tuple[jax.Array, ...]  # images come first
    names: tuple[str, ...]  # of the leading arguments, which have gradients
    # Only the last image counts: the others are zero, and the reference is computed without them.
    tail: bool = False
    shared: tuple[int, ...] = ()  # positions of the arguments without images, such as a kernel


# Returns a call for a dtype, or the reason why this machine cannot run it.
MakeCall = Callable[[str], Call | str]


class Kernel(NamedTuple):
    """A kernel with its calls."""

    name: str  # in verdicts
    cases: Mapping[str, MakeCall]
    timed: Callable[[str], Call]  # a call of a usual size
    is_deterministic: bool = False  # of gradients. The bits of results never vary
    # Returns the function to validate, given the `apply` of a call.
    candidate: Callable[[Callable], Callable] = lambda apply: functools.partial(
        apply, implementation="native"
    )
    dtypes: tuple[str, ...] = DTYPES
    is_sanitized: bool = True  # False for a kernel of another library


def between(rng: np.random.Generator, low: int, high: int, shape: tuple) -> np.ndarray:
    """Return positions that are far from the pixels, where gradients jump, and exact."""
    return rng.integers(low, high, shape) + rng.integers(1, 8, shape) / 8


def replace_some(rng: np.random.Generator, positions: np.ndarray, values: list[float]) -> None:
    """Replace a quarter of the positions."""
    chosen = rng.choice(positions.size, positions.size // 4, replace=False)
    positions.flat[chosen] = rng.choice(values, chosen.size)


def as_arrays(dtype: str, images: list, positions: Sequence = ()) -> list[jax.Array]:
    """Return arrays in this dtype, and positions in float32 or wider."""
    wide = "float64" if dtype == "float64" else "float32"
    return [jnp.asarray(a, dtype) for a in images] + [jnp.asarray(a, wide) for a in positions]


# Values at which the sample and its gradients are zero, or at the border of that.
SPECIAL = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9]


def make_deform_conv(
    dtype: str, *, batch: int = 2, size: tuple[int, int] = (9, 7), c: int = 8, o: int = 4,
    kernel: tuple[int, int] = (3, 3), groups: int = 1, offset_groups: int = 1,
    strides: tuple[int, int] = (1, 1), padding: tuple = ((1, 1), (1, 1)),
    dilation: tuple[int, int] = (1, 1), masked: bool = True, special: bool = False,
    spread: int = 2, deterministic: bool = False, **options: Any,
) -> Call:  # fmt: skip
    """Return a deformable convolution of random arrays."""
    rng = np.random.default_rng(0)
    h, w = (
        (s + sum(p) - (k - 1) * d - 1) // t + 1
        for s, p, k, d, t in zip(size, padding, kernel, dilation, strides, strict=True)
    )
    taps = math.prod(kernel) * offset_groups
    offset = between(rng, -spread, spread, (batch, h, w, 2 * taps))
    if special:
        replace_some(rng, offset, SPECIAL)
    x = rng.normal(size=(batch, *size, c))
    weights = rng.normal(size=(*kernel, c // groups, o))
    mask = [rng.normal(size=(batch, h, w, taps))] * masked
    x, weights, offset, *mask = as_arrays(dtype, [x, weights], [offset, *mask])

    def apply(x, offset, weights, *mask, implementation):
        return deform_conv2d(
            x, offset, weights, *mask, strides=strides, padding=padding, kernel_dilation=dilation,
            feature_group_count=groups, offset_groups=offset_groups, precision="highest",
            deterministic=deterministic, implementation=implementation, **options,
        )  # fmt: skip

    names = ("x", "offset", "kernel", "mask")[: 3 + masked]
    return Call(apply, (x, offset, weights, *mask), names)


def make_roi(
    dtype: str, *, batch: int = 2, size: tuple[int, int] = (9, 7), c: int = 8, boxes: int = 5,
    output_size: tuple[int, int] = (3, 2), ratio: int = 2, special: bool = False,
    deformed: bool = False, deterministic: bool = False,
) -> Call:  # fmt: skip
    """Return a RoIAlign of random boxes, or a deformable RoI pooling."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *size, c))
    corners = _random_boxes(rng, batch, boxes, size, special and not deformed)
    offset = rng.normal(size=(batch, boxes, *output_size, 2))
    if special:
        replace_some(rng, offset, SPECIAL[:3])
    x, offset, corners = as_arrays(dtype, [x], [offset, corners])
    options: Any = dict(output_size=output_size, sampling_ratio=ratio, deterministic=deterministic)

    def align(x, corners, **chosen):
        return roi_align(x, corners, **options, **chosen)

    def pool(x, offset, corners, **chosen):
        return deform_roi_pool(x, corners, offset, **options, **chosen)

    if deformed:
        return Call(pool, (x, offset, corners), ("x", "offset"))
    return Call(align, (x, corners), ("x",))


def _random_boxes(rng, batch: int, boxes: int, size: tuple[int, int], special: bool) -> np.ndarray:
    extent = np.array([size[1], size[0]])
    start = rng.uniform(-1, 0.7, (batch, boxes, 2)) * extent
    corners = np.concatenate([start, start + rng.uniform(0.2, 0.8, start.shape) * extent], -1)
    if special:
        corners[:, 1] = np.nan
        corners[:, 2, 2] = np.inf
        corners[:, 3] = 1e9  # outside
    return corners


def make_attention(
    dtype: str, *, batch: int = 2, shapes: tuple = ((8, 4), (4, 2)), queries: int = 7,
    heads: int = 3, c: int = 8, points: int = 4, special: bool = False, deterministic: bool = False,
    chunk_bytes: int = 256 * 2**20,
) -> Call:  # fmt: skip
    """Return a multi-scale deformable attention of random arrays."""
    rng = np.random.default_rng(0)
    value = rng.normal(size=(batch, sum(h * w for h, w in shapes), heads, c))
    sizes = np.array(shapes)[:, None, ::-1]  # (w, h) of each level
    pixels = between(rng, -2, 9, (batch, queries, heads, len(shapes), points, 2))
    if special:
        replace_some(rng, pixels, SPECIAL)
    locations, weights = (pixels + 0.5) / sizes, rng.normal(size=pixels.shape[:-1])
    value, locations, weights = as_arrays(dtype, [value], [locations, weights])

    def apply(value, locations, weights, *, implementation):
        return ms_deform_attn(
            value, shapes, locations, weights, deterministic=deterministic,
            chunk_bytes=chunk_bytes, implementation=implementation,
        )  # fmt: skip

    return Call(apply, (value, locations, weights), ("value", "locations", "weights"))


# Cases made of those above. `shared` are the positions of the arguments without images.


def map_examples(dtype: str, *, make: Callable[..., Call], shared: tuple[int, ...] = ()) -> Call:
    """Return a call under vmap, of three examples."""
    call = make(dtype)
    axes = tuple(None if i in shared else 0 for i in range(len(call.args)))
    args = (
        a if i in shared else jnp.stack([a, a * 0.75, a * 0.5]) for i, a in enumerate(call.args)
    )

    def apply(*args, implementation):
        function = functools.partial(call.apply, implementation=implementation)
        return jax.vmap(function, axes)(*args)

    return call._replace(apply=apply, args=tuple(args))


def shard_images(
    dtype: str, *, make: Callable[..., Call], shared: tuple[int, ...] = ()
) -> Call | str:
    """Return a call whose images are sharded over all devices."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return "one device"
    mesh = jax.sharding.Mesh(np.array(devices), ("images",))  # Auto axes
    call = make(dtype, batch=2 * len(devices))
    shardings = (
        NamedSharding(mesh, PartitionSpec(None if i in shared else "images"))
        for i in range(len(call.args))
    )
    return call._replace(args=tuple(map(jax.device_put, call.args, shardings)))


def make_large(
    dtype: str, *, make: Callable[..., Call], images: int, shared: tuple[int, ...] = ()
) -> Call | str:
    """Return a call with so many images that their elements need 64-bit indices."""
    one = jax.eval_shape(lambda: make(dtype, batch=1).args[0])
    elements, size = images * one.size, one.dtype.itemsize
    # x, its gradient, and the gradient in float32 or wider.
    needed = elements * (2 * size + max(4, size)) * 5 // 4
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if elements >= 2**31 and limit < needed:
        return f"needs {needed / 1e9:.0f} GB of device memory"
    call = make(dtype, batch=1)

    @jax.jit
    def extend(*args):
        return tuple(
            a if i in shared else jnp.zeros((images, *a.shape[1:]), a.dtype).at[-1:].set(a)
            for i, a in enumerate(args)
        )

    return call._replace(args=extend(*call.args), tail=True, shared=shared)


def make_dot_product_attention(
    dtype: str, *, batch: int = 2, length: int = 64, heads: int = 4, kv_heads: int = 2,
    size: int = 64, segments: tuple[int, ...] | None = None, **options: Any,
) -> Call:  # fmt: skip
    """Return attention of random rows; "native" is cuDNN on a GPU.

    `segments` are the lengths of the sequences of each row, behind which is padding.
    """
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = as_arrays(dtype, [rng.normal(size=shape) for shape in shapes])
    if segments is not None:
        row = np.repeat(np.arange(1, len(segments) + 1), segments)
        row = np.pad(row, (0, length - len(row)))
        options["segment_ids"] = np.tile(row.astype(np.int32), (batch, 1))

    def apply(q, k, v, *, implementation):
        if implementation == "native":
            implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return dot_product_attention(q, k, v, implementation=implementation, **options)

    return Call(apply, (q, k, v), ("q", "k", "v"))


def make_fp8_linear(
    dtype: str, *, batch: int = 2, length: int = 48, width: int = 64, outputs: int = 80,
    infinite: bool = False, spread: float = 0, transposed: bool = False,
) -> Call:  # fmt: skip
    """Return a linear layer of random rows, whose magnitudes `spread` over so many octaves."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, length, width)) * 2.0 ** rng.uniform(-spread, 0, (length, 1))
    kernel = rng.normal(size=(outputs, width) if transposed else (width, outputs))
    x, kernel = as_arrays(dtype, [x, kernel])

    def apply(x, kernel, *, implementation):
        function = fp8_linear if implementation == "native" else define_fp8_linear
        if not infinite:
            return function(x, kernel, transposed=transposed)
        y = function(x.at[..., 1, 2].set(np.inf), kernel, transposed=transposed)
        return jnp.where(jnp.isnan(y), 1, y)  # NaN would differ from NaN

    return Call(apply, (x, kernel), ("x", "kernel")[: 2 - infinite])


def define_fp8_linear(x: jax.Array, kernel: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Compute `fp8_linear` without 8-bit arrays, by arithmetic in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    @jax.custom_vjp
    def multiply(x, kernel):
        return forward(x, kernel)[0]

    def forward(x, kernel):
        rounded = define_rounding(x, E4M3), define_rounding(kernel, E4M3)
        return jnp.einsum("...d,dv->...v", *rounded, precision="highest"), rounded

    def backward(rounded, dy):
        (x, kernel), dy = rounded, define_rounding(dy.astype(wide), E5M2)
        return (
            jnp.einsum("...v,dv->...d", dy, kernel, precision="highest"),
            jnp.einsum("...d,...v->dv", x, dy, precision="highest"),
        )

    multiply.defvjp(forward, backward)
    y = multiply(x.astype(wide), (kernel.T if transposed else kernel).astype(wide))
    return y.astype(x.dtype)


def define_rounding(x: jax.Array, dtype: Any) -> jax.Array:
    """Return the rounded numbers, divided by their power of two."""
    info, is_finite = jnp.finfo(dtype), jnp.isfinite(x)
    largest, most = float(info.max), jnp.max(jnp.abs(x), where=is_finite, initial=0)
    octaves = jnp.frexp(largest)[1] - jnp.frexp(most)[1]
    octaves -= jnp.ldexp(most, octaves) > largest
    x = jnp.ldexp(x, octaves)
    # The distance of neighbors: that of subnormal numbers below the normal ones.
    distance = jnp.maximum(jnp.frexp(x)[1] - 1, int(info.minexp)) - info.nmant
    rounded = jnp.ldexp(jnp.round(jnp.ldexp(x, -distance)), distance - octaves)
    return jnp.where(is_finite, rounded, jnp.nan)


def _both_modes(
    name: str, make: Callable[..., Call], options: dict[str, dict[str, Any]], *,
    timed: dict[str, Any], many_pixels: dict[str, Any], shared: tuple[int, ...] = (),
) -> dict[str, Kernel]:  # fmt: skip
    """Return a kernel, and the one that sums gradients in a fixed order, by name.

    `options` are those of the cases that other kernels do not have.
    """
    kernels, of = {}, functools.partial
    for suffix, is_deterministic in (("", False), ("_deterministic", True)):
        call = of(make, deterministic=is_deterministic)
        cases: dict[str, MakeCall] = {
            "plain": call,
            **{case: of(call, **chosen) for case, chosen in options.items()},
            "NaN and infinity": of(call, special=True),
            "no images": of(call, batch=0),
            "vmap": of(map_examples, make=call, shared=shared),
            "several devices": of(shard_images, make=call, shared=shared),
            LARGE: of(make_large, make=of(call, **many_pixels), images=65, shared=shared),
        }
        kernel = Kernel(name + suffix, cases, of(call, **timed), is_deterministic)
        kernels[kernel.name] = kernel
    return kernels


_DEFORM_CONV = {
    "odd channels": dict(c=5, o=3),
    "one pixel": dict(size=(1, 1), kernel=(1, 1), padding=((0, 0), (0, 0)), spread=1),
    "groups": dict(c=12, o=6, groups=2, offset_groups=3),
    "no mask": dict(masked=False),
    "one-sided": dict(
        kernel=(1, 3), padding=((0, 2), (2, 1)), strides=(2, 1), dilation=(1, 2)
    ),
    "chunks": dict(size=(17, 16), chunk_bytes=8192),
    "many channels": dict(c=1040, size=(4, 5), o=8),
    "many pixels": dict(batch=3, size=(48, 40), c=32, o=16),
}  # fmt: skip
_ROI = {
    "odd channels": dict(c=5),
    "one pixel": dict(size=(1, 1), output_size=(1, 1)),
    "samples by size": dict(ratio=0),
    "no boxes": dict(boxes=0),
    "many channels": dict(c=1040),
    "many boxes": dict(size=(32, 40), c=32, boxes=100, output_size=(7, 7)),
    "offsets": dict(deformed=True),
    "NaN and infinite offsets": dict(deformed=True, special=True),
}
_DEFORM_ATTENTION = {
    "odd channels": dict(c=5),
    "one pixel": dict(shapes=((1, 1),)),
    "one level": dict(shapes=((8, 8),), heads=1),
    "four levels": dict(shapes=((16, 16), (8, 8), (4, 4), (2, 2)), heads=8, c=32),
    "no queries": dict(queries=0),
    "chunks": dict(queries=17, chunk_bytes=8192),
    "many channels": dict(c=1040),
    "many queries": dict(queries=700, c=32),
}
_ATTENTION: dict[str, MakeCall] = {
    case: functools.partial(make_dot_product_attention, **options)
    for case, options in {
        "plain": dict(),
        "packed rows": dict(segments=(20, 9, 30)),
        "window": dict(window=10),
        "packed rows, window": dict(segments=(20, 40), window=10),
        "not causal": dict(causal=False),
        "one head": dict(heads=1, kv_heads=1),
        "many heads": dict(length=256, heads=32, kv_heads=8, size=128, segments=(100, 156)),
        "long rows": dict(batch=1, length=2048, heads=2, kv_heads=1, segments=(1500, 500)),
    }.items()
}
_ATTENTION["several devices"] = functools.partial(shard_images, make=make_dot_product_attention)
_FP8_LINEAR: dict[str, MakeCall] = {
    case: functools.partial(make_fp8_linear, **options)
    for case, options in {
        "plain": dict(),
        "odd sizes": dict(length=7, width=13, outputs=5),
        "transposed": dict(transposed=True),
        "many octaves": dict(spread=24),
        "long sums": dict(batch=1, length=64, width=4096, outputs=128),
        "infinity": dict(infinite=True),
        "no rows": dict(batch=0),
    }.items()
}
_FP8_LINEAR["vmap"] = functools.partial(map_examples, make=make_fp8_linear, shared=(1,))
_FP8_LINEAR["several devices"] = functools.partial(shard_images, make=make_fp8_linear, shared=(1,))
LEVELS = (64, 64), (32, 32), (16, 16), (8, 8)

KERNELS = {
    **_both_modes(
        "deform_conv2d", make_deform_conv, _DEFORM_CONV, timed=dict(size=(50, 84), c=128, o=128),
        many_pixels=dict(size=(1024, 1024), c=32, strides=(128, 128)), shared=(2,),
    ),
    **_both_modes(
        "roi_pool", make_roi, _ROI,
        timed=dict(size=(50, 84), c=256, boxes=256, output_size=(7, 7)),
        many_pixels=dict(size=(1024, 1024), c=32),
    ),
    **_both_modes(
        "ms_deform_attn", make_attention, _DEFORM_ATTENTION,
        timed=dict(shapes=LEVELS, queries=900, heads=8, c=32),
        many_pixels=dict(shapes=((1024, 1024),), heads=1, c=32),
    ),
    "dot_product_attention": Kernel(
        "dot_product_attention",
        _ATTENTION,
        functools.partial(
            make_dot_product_attention, batch=1, length=2048, heads=32, kv_heads=8, size=128,
            segments=(1200, 800),
        ),
        dtypes=("bfloat16", "float16"),
        is_sanitized=False,
    ),
    "fp8_linear": Kernel(
        "fp8_linear",
        _FP8_LINEAR,
        functools.partial(make_fp8_linear, length=2048, width=2048, outputs=2048),
        dtypes=("float32", "bfloat16", "float16"),
        is_sanitized=False,
    ),
}  # fmt: skip


def load_kernels(table: str) -> Mapping[str, Kernel]:
    """Return a table of kernels by its name, "module:NAME"."""
    module, _, name = table.partition(":")
    return getattr(importlib.import_module(module), name)
