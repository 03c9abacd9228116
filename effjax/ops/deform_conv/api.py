"""Deformable convolution that keeps only its inputs for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common import dispatch
from .._common.arguments import as_integer
from .._common.derivatives import reverse_mode_only
from .._common.dispatch import select_by_platform
from .._common.partitioning import add_example_axis
from .._common.platform import traced_platform
from .._common.sharding import match_varying, run_per_device
from . import arguments, custom_call, partition, xla
from .chunks import Sampler, Static


def deform_conv2d(
    x: jax.Array,
    offset: jax.Array,
    kernel: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Any = 0,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    offset_groups: int | None = None,
    implementation: Literal["native", "xla", "fused"] | None = None,
    precision: Any = None,
    deterministic: bool = False,
    workspace_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Convolves x, each tap of each output pixel at a position of its own.

    ``y[n, p] = bias + sum_k kernel[k] @ (mask[n, p, k] * x[n, strides * p - padding +
    kernel_dilation * k + offset[n, p, k]])``

    Between pixels x is interpolated bilinearly. A sample is zero, and so are its gradients, unless
    -1 < y < H and -1 < x < W; beyond the border x is zero. A position that is NaN or infinite gives
    zero.

    Args:
        x: [N, H, W, C]; float32, float64, bfloat16 or float16.
        offset: [N, Ho, Wo, G * K * 2] for K = kh * kw taps and G offset groups of channels; channel
            ``(g * K + i * kw + j) * 2`` moves tap (i, j) down, the next one moves it to the right,
            both in pixels of x. Positions are computed in float32, or float64 where x or offset is.
        kernel: [kh, kw, C / feature_group_count, O]; computed in x's dtype.
        mask: [N, Ho, Wo, G * K], a factor for each sample; None for 1 (the first version of the
            paper).
        bias: [O], or None.
        strides, kernel_dilation: one number, or one for each of the two axes.
        padding: one number, one for each axis, ((top, bottom), (left, right)), "SAME" or "VALID".
        feature_group_count: as in ``jax.lax.conv_general_dilated``.
        offset_groups: G; by default what the channels of offset say.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (everywhere),
            None for native on a CPU where there is any, else XLA: the CUDA kernels must be asked
            for until they have run on a GPU; "fused" for a forward pass on NVIDIA GPUs that writes
            no samples, one kernel of Pallas without workspace, which has not run on one either: for
            feature_group_count=1, with the gradient of "native", or of XLA without that. Forward
            mode and second derivatives need "xla"; the others have the gradient.
        precision: of the matrix products, as in ``jax.lax.dot_general``.
        deterministic: on a GPU, add up the gradient of x in one order. On a CPU it always is; "xla"
            on a GPU follows XLA's own ``--xla_gpu_deterministic_ops``.
        workspace_bytes: how much the samples, and the sort of `deterministic`, may take in either
            pass (for each example of a vmap with "xla"); the output is worked through in as many
            slices of rows as that needs, of one row at least. A CPU is quicker with slices of 24
            MiB ("xla": 64), and gets no larger ones. With "xla", jit over Auto mesh axes counts the
            whole batch, and reduces the gradient of the kernel once a slice.

    Returns:
        y [N, Ho, Wo, O] of x's dtype.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
        RuntimeError: "native" or "fused" where there is none, with the reason.
        NotImplementedError: forward mode or second derivatives without "xla".

    Kept for the backward pass: x, offset, mask and kernel. The samples are taken again.

    References:
        Dai et al., 2017 (arXiv:1703.06211); Zhu et al., 2018 (arXiv:1811.11168).
    """
    x, offset, kernel, mask, bias = arguments.as_arrays(
        x=x, offset=offset, kernel=kernel, mask=mask, bias=bias
    )
    groups = as_integer("feature_group_count", feature_group_count, 1)
    geometry = arguments.geometry_of(
        x, offset, kernel, strides, padding, kernel_dilation, groups, offset_groups
    )
    arguments.check_shapes(x, offset, kernel, mask, bias, geometry)
    arguments.check_options(implementation, deterministic, precision, groups)
    _check_resources(implementation, workspace_bytes)
    if precision is None:  # here, because XLA's threads know nothing of a `with`
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    precision = tuple(precision) if isinstance(precision, list) else precision
    chosen, platform = IMPLEMENTATIONS[implementation], traced_platform()
    if platform == "cpu":
        workspace_bytes = min(workspace_bytes, chosen.slice_bytes_on_a_cpu)
    available = dispatch.available_platforms() if chosen.native else ()
    sampler = _sampler_of(implementation, available, platform, deterministic)
    static = Static(geometry, groups, sampler, precision, workspace_bytes)
    return _deform_conv2d(chosen.run, static, (x, offset, mask), (kernel, bias))


@functools.partial(jax.jit, static_argnums=(0, 1))  # loops would be compiled again for every call
def _deform_conv2d(run: Callable, static: Static, images, parameters) -> jax.Array:
    of_images = functools.partial(_of_images, run, static)
    return run_per_device(of_images, images[0])(images, parameters)


def _of_images(run: Callable, static: Static, images, parameters) -> jax.Array:
    x, offset, mask = images
    kernel, bias = parameters
    dtype = jnp.dtype("float64" if "float64" in (x.dtype, offset.dtype) else "float32")
    mask = jnp.zeros((*offset.shape[:3], 0), dtype) if mask is None else mask
    wide = jnp.float64 if dtype == jnp.float64 else x.dtype  # one of the two is: all is
    args = x.astype(wide), offset.astype(dtype), mask.astype(dtype), kernel
    y = run(static, *match_varying(args)).astype(x.dtype)
    if bias is not None:
        y = (y.astype(dtype) + bias.astype(dtype).reshape(1, 1, 1, -1)).astype(x.dtype)
    return y


def _first_order(static: Static, *args) -> jax.Array:
    """Of images and a kernel; with a gradient, and no other derivative."""
    return _core(static, *reverse_mode_only("deform_conv2d", *args))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(static: Static, x, offset, mask, kernel) -> jax.Array:
    return partition.forward(static, *add_example_axis(x, offset, mask, kernel))[0]


def _forward(static: Static, *args):
    return partition.forward(static, *add_example_axis(*args))[0], args


def _backward(static: Static, kept, dy):
    # The barrier keeps the samples from being kept since the forward pass.
    kept, dy = lax.optimization_barrier((kept, dy))
    gradients = partition.backward(static, *add_example_axis(*kept, dy))
    return tuple(d[0].astype(a.dtype) for d, a in zip(gradients, kept, strict=True))


_core.defvjp(_forward, _backward)


class Implementation(NamedTuple):
    """What a value of `implementation` stands for."""

    run: Callable  # the operator without bias: (static, x, offset, mask, kernel) -> y
    native: dict[str, Sampler]  # by platform; used where they were built
    elsewhere: Sampler
    # Larger slices fall out of its caches. Those of a GPU hold 50 MB, but a slice has five kernels
    # to start forward, eight backward: what is quicker there has not been measured.
    slice_bytes_on_a_cpu: int
    whole: Callable | None = None  # of `Sampler`


def _without_columns(static: Static, *args) -> jax.Array:
    try:
        from .fused import on_a_gpu  # Pallas takes its time to import
    except ImportError as error:  # JAX has announced that it will go
        raise RuntimeError(
            f"implementation='fused' needs Pallas for Triton, which this JAX has not ({error}). "
            "Pass `implementation=None` for the best there is."
        ) from error
    return on_a_gpu(static, *args)


IMPLEMENTATIONS = {
    # CUDA joins when its kernels have run on a GPU: so far they have been compiled, and emulated
    # on a CPU.
    None: Implementation(_first_order, {"cpu": custom_call.CPU}, xla.SAMPLER, 24 * 2**20),
    "native": Implementation(
        _first_order,
        {"cpu": custom_call.CPU, "cuda": custom_call.CUDA},
        custom_call.NOWHERE,
        24 * 2**20,
    ),
    "xla": Implementation(xla.deform_conv_xla, {}, xla.SAMPLER, 64 * 2**20),
    "fused": Implementation(
        _first_order, {"cuda": custom_call.CUDA}, xla.SAMPLER, 24 * 2**20, _without_columns
    ),
}


@functools.cache  # one object for equal choices: jit compares them
def _sampler_of(
    implementation: str | None, available: tuple[str, ...], platform: str, deterministic: bool
) -> Sampler:
    """The samplers of all platforms as one, with the workspace of that on `platform`."""
    chosen = IMPLEMENTATIONS[implementation]
    samplers = {p: sampler for p, sampler in chosen.native.items() if p in available}
    if deterministic:
        samplers = {p: sampler.in_order or sampler for p, sampler in samplers.items()}
    columns, columns_backward = (
        select_by_platform(
            {p: of(sampler) for p, sampler in samplers.items()}, of(chosen.elsewhere)
        )
        for of in (lambda sampler: sampler.columns, lambda sampler: sampler.columns_backward)
    )
    here = samplers.get(platform, chosen.elsewhere)
    return Sampler(columns, columns_backward, here.sample_bytes, here.tap_bytes, whole=chosen.whole)


def _check_resources(implementation: str | None, workspace_bytes: Any) -> None:
    if not isinstance(workspace_bytes, int) or workspace_bytes < 1 or workspace_bytes is True:
        raise ValueError(
            f"`workspace_bytes` (={workspace_bytes!r:.80}) must be a positive integer."
        )
    if implementation == "native" and not dispatch.available_platforms():
        raise RuntimeError(dispatch.unavailable_message(custom_call.OPERATOR, traced_platform()))
