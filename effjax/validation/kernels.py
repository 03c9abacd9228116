"""The kernels with the calls that validate them: those of effjax, and cuDNN's attention."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ops.attention import dot_product_attention
from ..ops.samplers.deform_attention.api import ms_deform_attn
from ..ops.samplers.deform_conv.api import deform_conv2d
from ..ops.samplers.roi.api import deform_roi_pool, roi_align

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        apply: ``apply(*args, implementation=...)`` returns an array.
        args: arrays. Images come first.
        names: names of the leading arguments, which have gradients.
        tail: if true, only the last image counts: the others are zero, and the reference is
            computed without them.
        shared: positions of the arguments without images, such as a kernel.
    """

    apply: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    names: tuple[str, ...]
    tail: bool = False
    shared: tuple[int, ...] = ()


# Returns a call for a dtype, or the reason why this machine cannot run it.
MakeCall = Callable[[str], Call | str]


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
        name: its name in verdicts.
        cases: by name.
        timed: a call of a usual size.
        is_deterministic: True if gradients are bitwise reproducible. Results always are.
        candidate: returns the function to validate, given the `apply` of a call.
        dtypes: those that it supports.
    """

    name: str
    cases: Mapping[str, MakeCall]
    timed: Callable[[str], Call]
    is_deterministic: bool = False
    candidate: Callable[[Callable], Callable] = lambda apply: functools.partial(
        apply, implementation="native"
    )
    dtypes: tuple[str, ...] = DTYPES


def positions_dtype(dtype: str) -> str:
    """Return the dtype of offsets, locations and boxes."""
    return "float64" if dtype == "float64" else "float32"


def between(rng: np.random.Generator, low: int, high: int, shape: tuple) -> np.ndarray:
    """Return positions that are far from the pixels, where gradients jump, and exact."""
    return rng.integers(low, high, shape) + rng.integers(1, 8, shape) / 8


def as_arrays(dtype: str, *arrays: np.ndarray | None) -> tuple[jax.Array, ...]:
    """Return the arrays in this dtype."""
    return tuple(jnp.asarray(a, dtype) for a in arrays if a is not None)


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
        chosen = rng.choice(offset.size, offset.size // 4, replace=False)
        offset.flat[chosen] = rng.choice(SPECIAL, chosen.size)
    x = rng.normal(size=(batch, *size, c))
    weights = rng.normal(size=(*kernel, c // groups, o))
    mask = rng.normal(size=(batch, h, w, taps)) if masked else None
    x, weights = as_arrays(dtype, x, weights)
    offset, *rest = as_arrays(positions_dtype(dtype), offset, mask)

    def apply(x, offset, weights, *mask, implementation):
        return deform_conv2d(
            x, offset, weights, *mask, strides=strides, padding=padding, kernel_dilation=dilation,
            feature_group_count=groups, offset_groups=offset_groups, precision="highest",
            deterministic=deterministic, implementation=implementation, **options,
        )  # fmt: skip

    names = ("x", "offset", "kernel", "mask")[: 3 + masked]
    return Call(apply, (x, offset, weights, *rest), names)


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
        chosen = rng.choice(offset.size, offset.size // 4, replace=False)
        offset.flat[chosen] = rng.choice(SPECIAL[:3], chosen.size)
    (x,), (offset, corners) = (
        as_arrays(dtype, x),
        as_arrays(positions_dtype(dtype), offset, corners),
    )
    options: dict[str, Any] = dict(output_size=output_size, sampling_ratio=ratio)
    options["deterministic"] = deterministic

    def align(x, corners, *, implementation):
        return roi_align(x, corners, implementation=implementation, **options)

    def pool(x, offset, corners, *, implementation):
        return deform_roi_pool(x, corners, offset, implementation=implementation, **options)

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
    workspace_bytes: int = 256 * 2**20,
) -> Call:  # fmt: skip
    """Return a multi-scale deformable attention of random arrays."""
    rng = np.random.default_rng(0)
    value = rng.normal(size=(batch, sum(h * w for h, w in shapes), heads, c))
    sizes = np.array(shapes)[:, None, ::-1]  # (w, h) of each level
    pixels = between(rng, -2, 9, (batch, queries, heads, len(shapes), points, 2))
    if special:
        chosen = rng.choice(pixels.size, pixels.size // 4, replace=False)
        pixels.flat[chosen] = rng.choice(SPECIAL, chosen.size)
    locations, weights = (pixels + 0.5) / sizes, rng.normal(size=pixels.shape[:-1])
    (value,) = as_arrays(dtype, value)
    locations, weights = as_arrays(positions_dtype(dtype), locations, weights)

    def apply(value, locations, weights, *, implementation):
        return ms_deform_attn(
            value, shapes, locations, weights, deterministic=deterministic,
            workspace_bytes=workspace_bytes, implementation=implementation,
        )  # fmt: skip

    return Call(apply, (value, locations, weights), ("value", "locations", "weights"))


def map_examples(make: Callable[..., Call], shared: tuple[int, ...] = ()) -> MakeCall:
    """Return a case under vmap: three examples; `shared` are the arguments of all examples."""

    def make_mapped(dtype: str) -> Call:
        call = make(dtype)
        axes = tuple(None if i in shared else 0 for i in range(len(call.args)))
        args = tuple(
            a if i in shared else jnp.stack([a, a * 0.75, a * 0.5]) for i, a in enumerate(call.args)
        )

        def apply(*args, implementation):
            function = functools.partial(call.apply, implementation=implementation)
            return jax.vmap(function, axes)(*args)

        return call._replace(apply=apply, args=args)

    return make_mapped


def shard_images(make: Callable[..., Call], shared: tuple[int, ...] = ()) -> MakeCall:
    """Return a case whose images are sharded over all devices."""

    def make_sharded(dtype: str) -> Call | str:
        devices = jax.local_devices()
        if len(devices) == 1:
            return "one device"
        mesh = jax.make_mesh((len(devices),), ("images",), devices=devices)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)  # Auto axes
        call = make(dtype, batch=2 * len(devices))
        args = tuple(
            jax.device_put(
                a, NamedSharding(mesh, PartitionSpec(*() if i in shared else ("images",)))
            )
            for i, a in enumerate(call.args)
        )
        return call._replace(args=args)

    return make_sharded


def large(make: Callable[..., Call], images: int, shared: tuple[int, ...] = ()) -> MakeCall:
    """Return a case with so many images that their elements need 64-bit indices."""

    def make_large(dtype: str) -> Call | str:
        one = jax.eval_shape(lambda: make(dtype, batch=1).args[0])
        elements = images * one.size
        size = one.dtype.itemsize
        # x, its gradient, and the gradient in float32 or wider.
        needed = elements * (2 * size + max(4, size)) * 5 // 4
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        reason = f"needs {needed / 1e9:.0f} GB of device memory"
        if elements >= 2**31 and limit < needed:
            return reason
        call = make(dtype, batch=1)

        @jax.jit
        def extend(*args):
            return tuple(
                a if i in shared else jnp.zeros((images, *a.shape[1:]), a.dtype).at[-1:].set(a)
                for i, a in enumerate(args)
            )

        try:
            args = jax.block_until_ready(extend(*call.args))
        except jax.errors.JaxRuntimeError as error:  # other processes use the memory
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return reason
        return call._replace(args=args, tail=True, shared=shared)

    return make_large


def _deform_conv_cases(**fixed: Any) -> dict[str, MakeCall]:
    make = functools.partial(make_deform_conv, **fixed)
    of = functools.partial
    return {
        "plain": make,
        "odd channels": of(make, c=5, o=3),
        "one pixel": of(make, size=(1, 1), kernel=(1, 1), padding=((0, 0), (0, 0)), spread=1),
        "groups": of(make, c=12, o=6, groups=2, offset_groups=3),
        "no mask": of(make, masked=False),
        "one-sided": of(
            make, kernel=(1, 3), padding=((0, 2), (2, 1)), strides=(2, 1), dilation=(1, 2)
        ),
        "NaN and infinity": of(make, special=True),
        "no images": of(make, batch=0),
        "vmap": map_examples(make, shared=(2,)),
        "slices": of(make, size=(17, 16), workspace_bytes=8192),
        "many channels": of(make, c=1040, size=(4, 5), o=8),
        "many pixels": of(make, batch=3, size=(48, 40), c=32, o=16),
        "several devices": shard_images(make, shared=(2,)),
        "64-bit indices": large(
            of(make, size=(1024, 1024), c=32, strides=(128, 128)), images=65, shared=(2,)
        ),
    }


def _roi_cases(**fixed: Any) -> dict[str, MakeCall]:
    make = functools.partial(make_roi, **fixed)
    of = functools.partial
    return {
        "plain": make,
        "odd channels": of(make, c=5),
        "one pixel": of(make, size=(1, 1), output_size=(1, 1)),
        "samples by size": of(make, ratio=0),
        "NaN and infinity": of(make, special=True),
        "no images": of(make, batch=0),
        "no boxes": of(make, boxes=0),
        "vmap": map_examples(make),
        "many channels": of(make, c=1040),
        "many boxes": of(make, size=(32, 40), c=32, boxes=100, output_size=(7, 7)),
        "offsets": of(make, deformed=True),
        "NaN and infinite offsets": of(make, deformed=True, special=True),
        "several devices": shard_images(make),
        "64-bit indices": large(of(make, size=(1024, 1024), c=32), images=65),
    }


def _attention_cases(**fixed: Any) -> dict[str, MakeCall]:
    make = functools.partial(make_attention, **fixed)
    of = functools.partial
    return {
        "plain": make,
        "odd channels": of(make, c=5),
        "one pixel": of(make, shapes=((1, 1),)),
        "one level": of(make, shapes=((8, 8),), heads=1),
        "four levels": of(make, shapes=((16, 16), (8, 8), (4, 4), (2, 2)), heads=8, c=32),
        "NaN and infinity": of(make, special=True),
        "no images": of(make, batch=0),
        "no queries": of(make, queries=0),
        "slices": of(make, queries=17, workspace_bytes=8192),
        "vmap": map_examples(make),
        "many channels": of(make, c=1040),
        "many queries": of(make, queries=700, c=32),
        "several devices": shard_images(make),
        "64-bit indices": large(of(make, shapes=((1024, 1024),), heads=1, c=32), images=65),
    }


def make_dot_product_attention(
    dtype: str, *, batch: int = 2, length: int = 64, heads: int = 4, kv_heads: int = 2,
    size: int = 64, segments: tuple[int, ...] | None = None, **options: Any,
) -> Call:  # fmt: skip
    """Return attention of random arrays; "native" is cuDNN on a GPU.

    Args:
        dtype: of the arrays.
        batch: rows.
        length: tokens of a row.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        size: channels of a head.
        segments: lengths of the sequences of each row, behind which is padding.
        **options: of `effjax.dot_product_attention`.
    """
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = as_arrays(dtype, *(rng.normal(size=shape) for shape in shapes))
    if segments is not None:
        row = np.repeat(np.arange(1, len(segments) + 1), segments)
        row = np.pad(row, (0, length - len(row)))
        options["segment_ids"] = np.tile(row.astype(np.int32), (batch, 1))

    def apply(q, k, v, *, implementation):
        if implementation == "native":
            implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return dot_product_attention(q, k, v, implementation=implementation, **options)

    return Call(apply, (q, k, v), ("q", "k", "v"))


def _dot_product_attention_cases() -> dict[str, MakeCall]:
    make = make_dot_product_attention
    of = functools.partial
    return {
        "plain": make,
        "packed rows": of(make, segments=(20, 9, 30)),
        "window": of(make, window=10),
        "packed rows, window": of(make, segments=(20, 40), window=10),
        "not causal": of(make, causal=False),
        "one head": of(make, heads=1, kv_heads=1),
        "many heads": of(make, length=256, heads=32, kv_heads=8, size=128, segments=(100, 156)),
        "long rows": of(make, batch=1, length=2048, heads=2, kv_heads=1, segments=(1500, 500)),
        "several devices": shard_images(make),
    }


def _both_modes(
    name: str, cases: Callable[..., dict[str, MakeCall]], timed: Callable[..., Call]
) -> dict[str, Kernel]:
    """Return a kernel, and the one that sums gradients in a fixed order, by name."""
    in_order = f"{name}_deterministic"
    timed_in_order = functools.partial(timed, deterministic=True)
    return {
        name: Kernel(name, cases(), timed),
        in_order: Kernel(in_order, cases(deterministic=True), timed_in_order, True),
    }


KERNELS = {
    **_both_modes(
        "deform_conv2d",
        _deform_conv_cases,
        functools.partial(make_deform_conv, size=(50, 84), c=128, o=128),
    ),
    **_both_modes(
        "roi_pool",
        _roi_cases,
        functools.partial(make_roi, size=(50, 84), c=256, boxes=256, output_size=(7, 7)),
    ),
    **_both_modes(
        "ms_deform_attn",
        _attention_cases,
        functools.partial(
            make_attention, shapes=((64, 64), (32, 32), (16, 16), (8, 8)), queries=900, heads=8,
            c=32,
        ),
    ),
    "dot_product_attention": Kernel(
        "dot_product_attention",
        _dot_product_attention_cases(),
        functools.partial(
            make_dot_product_attention, batch=1, length=2048, heads=32, kv_heads=8, size=128,
            segments=(1200, 800),
        ),
        dtypes=("bfloat16", "float16"),
    ),
}  # fmt: skip
