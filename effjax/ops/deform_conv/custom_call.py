"""The custom calls, and which implementation runs where."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ...native import available as native_available
from ...native import status
from .._parallel import same_varying
from . import reference
from .chunks import Sampler, Static
from .reference import Geometry

# Where native code is used without being asked for. CUDA joins when its kernels have run on a GPU:
# so far they have been compiled, and emulated on a CPU.
BY_DEFAULT = ("cpu",)


def available() -> tuple[str, ...]:
    """The platforms that have native code here."""
    return tuple(p for p in ("cpu", "cuda") if native_available(p))


def platforms_of(implementation: str | None) -> tuple[str, ...]:
    """The platforms that run native code for this choice."""
    if implementation == "xla":
        return ()
    return tuple(p for p in available() if implementation == "native" or p in BY_DEFAULT)


def sampler_of(static: Static, dtype: Any) -> Sampler:
    """The custom calls where there are any; elsewhere XLA, or an error when asked for native."""
    geometry = static.geometry
    xla_backward = functools.partial(reference.columns_backward, geometry=geometry)
    xla = functools.partial(reference.columns, geometry=geometry)
    platforms, slice_bytes = static.platforms, on_a_cpu(static, 24 * 2**20)
    if not platforms:
        return Sampler(xla, xla_backward, xla_bytes(dtype)[:2], slice_bytes)
    if static.implementation == "native":
        xla, xla_backward = _refusing(xla), _refusing(xla_backward)

    def columns(*args):
        calls = {p: functools.partial(_columns, geometry) for p in platforms}
        return lax.platform_dependent(*args, **calls, default=xla)

    def columns_backward(*args):
        deterministic = {"cpu": False, "cuda": static.deterministic}  # on a CPU it always is
        calls = {
            p: functools.partial(_columns_backward, geometry, deterministic[p]) for p in platforms
        }
        return lax.platform_dependent(*args, **calls, default=xla_backward)

    if static.implementation != "native" and static.platform not in platforms:
        return Sampler(columns, columns_backward, xla_bytes(dtype)[:2], slice_bytes)
    size = dtype.itemsize
    sample_bytes = size, 2 * size + max(4, size)  # XLA transposes one on a CPU
    return Sampler(columns, columns_backward, sample_bytes, slice_bytes)


def on_a_cpu(static: Static, most: int) -> float:
    """A limit for slices: larger ones fall out of a CPU's caches, and cost a GPU nothing."""
    return most if static.platform == "cpu" else math.inf


def xla_bytes(dtype: Any) -> tuple[int, int, int]:
    """What XLA holds for each number of the columns, as measured: forward, backward, autodiff."""
    size = max(4, dtype.itemsize)
    return 2 * size, 12 * size, 16 * size


def unavailable(platform: str) -> str:
    """Why there is no native code for a platform, and what to do."""
    reasons = status()
    reason = reasons.get(platform, "there is none for this platform")
    return (
        f"implementation='native': no native deformable convolution for platform {platform!r} "
        f'({reason}). Pass `implementation=None` for the best there is, or "xla"; '
        "`effjax doctor` shows what is loaded."
    )


def _attributes(geometry: Geometry) -> dict[str, np.int64]:
    (top, _), (left, _) = geometry.padding
    names = (
        "kernel_h kernel_w stride_h stride_w padding_top padding_left dilation_h dilation_w "
        "offset_groups"
    )
    values = (*geometry.kernel_size, *geometry.strides, top, left, *geometry.kernel_dilation)
    values = (*values, geometry.offset_groups)
    return {n: np.int64(v) for n, v in zip(names.split(), values, strict=True)}


def _like(x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the devices as x does."""
    kind = jax.typeof(x)
    mesh = kind.sharding.mesh
    return jax.ShapeDtypeStruct(
        shape or x.shape,
        x.dtype,
        sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec()),
        manual_axis_type=kind.manual_axis_type,
    )


def _columns(geometry: Geometry, x, offset, mask, row) -> jax.Array:
    args = same_varying((x, offset, mask, row))
    shape = (*offset.shape[:3], geometry.taps * x.shape[-1])
    call = jax.ffi.ffi_call("effjax_deform_columns", _like(args[0], shape))
    return call(*args, **_attributes(geometry))


def _columns_backward(geometry: Geometry, deterministic: bool, *args) -> tuple:
    args = same_varying(args)
    x, offset, mask, row, dcolumns, dx = args
    call = jax.ffi.ffi_call(
        "effjax_deform_columns_backward",
        (_like(dx), _like(offset), _like(mask)),
        input_output_aliases={5: 0},
    )
    skip_dx = np.int64(deterministic)
    dx, doffset, dmask = call(*args, **_attributes(geometry), skip_dx=skip_dx)
    if deterministic:
        dx = _scatter_sorted(geometry, offset, mask, row, dcolumns, dx)
    return dx, doffset, dmask


def _scatter_sorted(geometry: Geometry, offset, mask, row, dcolumns, dx) -> jax.Array:
    """Adds dcolumns to dx, every pixel in one order: the corners are sorted by their pixel."""
    destination = destinations(offset, row, dx.shape[1:3], geometry)
    source = jnp.arange(destination.shape[-1], dtype=jnp.int32)
    source = jnp.broadcast_to(source, destination.shape)
    destination, source = same_varying((destination, source))
    destination, source = lax.sort((destination, source), num_keys=1, is_stable=True)
    call = jax.ffi.ffi_call("effjax_deform_scatter_sorted", _like(dx), input_output_aliases={6: 0})
    args = (offset, mask, row, dcolumns, destination, source, dx)
    return call(*args, **_attributes(geometry))


def destinations(
    offset: jax.Array, row: jax.Array, size: tuple[int, int], geometry: Geometry
) -> jax.Array:
    """The pixel of every corner, or H * W where there is none: int32 [N, G, R * Wo * K * 4]."""
    y, x, inside = reference.positions(offset, row, size, geometry)  # [N, R, Wo, G, K]
    y0, x0 = jnp.floor(y), jnp.floor(x)
    corners = []
    for corner in np.ndindex(2, 2):
        index, valid = reference.corner_index(y0, x0, corner, size)
        corners.append(jnp.where(inside & valid, index, size[0] * size[1]))
    by_group = jnp.moveaxis(jnp.stack(corners, -1), 3, 1)  # [N, G, R, Wo, K, 4]
    return by_group.reshape(*by_group.shape[:2], math.prod(by_group.shape[2:]))


def _refusing(fun: Callable) -> Callable:
    """`fun`, which cannot be compiled: for platforms without native code."""
    return lambda x, *args: fun(_refuse_p.bind(x), *args)


# Tells of a platform without native code when a program is compiled for it: not before, because
# only then is the platform known.
_refuse_p = Primitive("effjax_native_deform_conv")
_refuse_p.def_abstract_eval(lambda x: x)


def _refuse(ctx, _):
    raise RuntimeError(unavailable(" or ".join(ctx.module_context.platforms)))


mlir.register_lowering(_refuse_p, _refuse)
