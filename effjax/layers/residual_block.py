"""The stem and the blocks of a ResNet as functions of arrays, plain or recomputed.

Recomputed, they are under `jax.checkpoint`: of all that a block computes the outputs of its inner
convolutions are kept, or nothing, and the statistics of its norms in any case, so that there is no
second all-reduce.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..ops.batch_norm.sync import STATISTICS, BatchStats
from ..ops.deform_conv import deform_conv2d
from .batch_norm import normalize_batch, normalize_inference
from .deform_conv import split_predicted
from .images import conv, max_pool
from .resnet import BlockPlan, ConvPlan, ResNetOptions

CONV = "effjax.resnet.conv"  # the outputs of a block's convolutions but the last


class Norm(NamedTuple):
    """How a BatchNorm computes."""

    running: bool  # with the running statistics
    frozen: bool  # with constants: running statistics, scale and bias without a gradient
    common: tuple[tuple[str, Any], ...]  # arguments of `normalize_batch` and `normalize_with`
    batch: tuple[tuple[str, Any], ...]  # of `normalize_batch` alone


class NormArrays(NamedTuple):
    mean: Any
    var: Any
    scale: Any
    bias: Any


class Part(NamedTuple):
    """The arrays of a stem or of a block.

    A convolution has a kernel, or of a deformable one `{"kernel", "offset_conv": {"kernel",
    "bias"}}`; the shortcut's come last.
    """

    convs: tuple[Any, ...]
    norms: tuple[NormArrays, ...]


Result = tuple[jax.Array, tuple[BatchStats | None, ...]]


def norm_of(norm: Any, running: bool, frozen: bool) -> Norm:
    """Of a module of either flavor."""
    common = dict(
        dtype=norm.dtype, axis=-1, epsilon=norm.epsilon, activation=norm.activation
    )  # fmt: skip
    batch = {name: getattr(norm, name) for name in ("axis_name", "axis_index_groups", "stats")}
    return Norm(running or frozen, frozen, tuple(common.items()), tuple(batch.items()))


def stem(
    options: ResNetOptions, norm: Norm, x: jax.Array, part: Part, mask: jax.Array | None
) -> Result:
    """The stem's output, and the statistics of its norm."""

    def run(x: jax.Array, part: Part, mask: jax.Array | None) -> Result:
        plan = options.stem(x.shape[-1])
        h = checkpoint_name(_convolve(x, part.convs[0], plan, options), CONV)
        h, statistics = _normalize(norm, h, part.norms[0], mask)
        return h if options.small_inputs else max_pool(h), (statistics,)

    return _recomputed(run, options)(x, part, mask)


def block(
    options: ResNetOptions, plan: BlockPlan, norms: tuple[Norm, ...], x: jax.Array, part: Part,
    mask: jax.Array | None,
) -> Result:  # fmt: skip
    """A block's output, and the statistics of its norms, the shortcut's last."""

    def run(x: jax.Array, part: Part, mask: jax.Array | None) -> Result:
        h, shortcut, found, of_shortcut, count = x, x, [], [], len(plan.convs)
        if plan.shortcut is not None:
            shortcut = _convolve(x, part.convs[count], plan.shortcut, options)
            shortcut, statistics = _normalize(norms[count], shortcut, part.norms[count], mask)
            of_shortcut.append(statistics)
        for k, of_conv in enumerate(plan.convs):
            h = _convolve(h, part.convs[k], of_conv, options)
            last = k == count - 1
            h = h if last else checkpoint_name(h, CONV)
            h, statistics = _normalize(norms[k], h, part.norms[k], mask, shortcut if last else None)
            found.append(statistics)
        return h, (*found, *of_shortcut)

    return _recomputed(run, options)(x, part, mask)


def _recomputed(run: Callable[..., Result], options: ResNetOptions) -> Callable[..., Result]:
    if not options.efficient:
        return run
    names = (STATISTICS, CONV) if options.save == "conv" else (STATISTICS,)
    return jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))


def _convolve(x: jax.Array, arrays: Any, plan: ConvPlan, options: ResNetOptions) -> jax.Array:
    if not plan.deformable:
        return conv(x, arrays, plan.strides, plan.padding)
    offset_conv = arrays["offset_conv"]
    predicted = conv(x, offset_conv["kernel"], plan.strides, plan.padding)
    predicted += offset_conv["bias"].astype(x.dtype).reshape(1, 1, 1, -1)
    offset, mask = split_predicted(predicted, options.modulated)
    return deform_conv2d(
        x, offset, arrays["kernel"].astype(x.dtype), mask, strides=plan.strides,
        padding=plan.padding, offset_groups=options.offset_groups,
    )  # fmt: skip


def _normalize(
    norm: Norm, x: jax.Array, arrays: NormArrays, mask: jax.Array | None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, BatchStats | None]:  # fmt: skip
    common: dict[str, Any] = dict(norm.common, residual=residual)
    if norm.frozen:
        arrays = NormArrays(*map(lax.stop_gradient, arrays))
    if norm.running:
        return normalize_inference(x, *arrays, **common), None
    return normalize_batch(x, *arrays[2:], mask=mask, **common, **dict(norm.batch))
