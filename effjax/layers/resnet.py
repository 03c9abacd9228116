"""Options of a ResNet and its stem and blocks as functions of arrays, shared by linen and nnx.

With `efficient=True` stem and blocks run under `jax.checkpoint`. A block then keeps the outputs of
its inner convolutions (`save="conv"`) or nothing (`save="features"`), and in both cases the
statistics of its norms, so that the backward pass repeats no all-reduce.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..ops._common.arguments import as_integer, check_divides
from ..ops.batch_norm.sync import STATISTICS, BatchStats
from ..ops.samplers.deform_conv import deform_conv2d
from .batch_norm import normalize_batch, normalize_inference
from .deform_conv import split_predicted
from .images import ImageNetworkConfig, as_sizes, conv, max_pool

EXPANSION = 4  # ratio of a bottleneck's output channels to its inner channels
CONV_OUTPUT = "effjax.resnet.conv"  # checkpoint name of all convolutions but a block's last


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ResNetConfig(ImageNetworkConfig):
    """Options of a ResNet; `effjax.models.ResNet` documents them."""

    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    inner_width: int | None = None
    feature_group_count: int = 1
    stride_in_1x1: bool = False
    stage_with_dcn: Sequence[bool] = ()
    modulated: bool = True
    offset_groups: int = 1
    num_classes: int | None = 1000
    frozen_stages: int = -1
    frozen_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stage_sizes = as_sizes("stage_sizes", self.stage_sizes)
        self.stage_with_dcn = tuple(map(bool, self.stage_with_dcn))
        if len(self.stage_with_dcn) not in (0, len(self.stage_sizes)):
            raise ValueError(
                f"`stage_with_dcn` (={self.stage_with_dcn}) must be () or have one value for each "
                f"of the {len(self.stage_sizes)} stages."
            )
        for name in ("width", "feature_group_count", "offset_groups"):
            setattr(self, name, as_integer(name, getattr(self, name), 1))
        if self.inner_width is not None:
            self.inner_width = as_integer("inner_width", self.inner_width, 1)
        if not self.bottleneck and (self.inner_width is not None or self.feature_group_count > 1):
            raise ValueError(
                f"`inner_width` (={self.inner_width}) and `feature_group_count` "
                f"(={self.feature_group_count}) need bottleneck=True."
            )
        check_divides(
            "feature_group_count", self.feature_group_count, self.inner_width or self.width,
            "channels of the first stage's 3x3 convolutions",
        )  # fmt: skip
        if self.num_classes is not None:
            self.num_classes = as_integer("num_classes", self.num_classes, 1)

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        channels = self.width * (EXPANSION if self.bottleneck else 1)
        return tuple(channels << stage for stage in range(len(self.stage_sizes)))


class ConvSpec(NamedTuple):
    """Sizes of a convolution whose padding is half of the kernel size on every side."""

    channels: int
    features: int
    size: int
    strides: int
    deformable: bool = False
    groups: int = 1

    @property
    def padding(self) -> int:
        """Padding on every side."""
        return self.size // 2


class BlockSpec(NamedTuple):
    """Convolutions of a block and of its shortcut; `frozen` if its norms are constant."""

    convs: tuple[ConvSpec, ...]
    shortcut: ConvSpec | None
    frozen: bool


def stem_spec(config: ResNetConfig, in_channels: int) -> ConvSpec:
    """Return the sizes of the first convolution."""
    size, strides = (3, 1) if config.small_inputs else (7, 2)
    return ConvSpec(in_channels, config.width, size, strides)


def stage_specs(config: ResNetConfig) -> list[list[BlockSpec]]:
    """Return the blocks of each stage."""
    stages, channels = [], config.width
    for stage, num_blocks in enumerate(config.stage_sizes):
        blocks = []
        for i in range(num_blocks):
            strides = 2 if stage > 0 and i == 0 else 1
            blocks.append(_block_spec(config, stage, channels, strides))
            channels = config.feature_channels[stage]
        stages.append(blocks)
    return stages


def _block_spec(config: ResNetConfig, stage: int, channels: int, strides: int) -> BlockSpec:
    inner, features = (config.inner_width or config.width) << stage, config.feature_channels[stage]
    deformable = bool(config.stage_with_dcn) and config.stage_with_dcn[stage]
    if config.bottleneck:
        first, second = (strides, 1) if config.stride_in_1x1 else (1, strides)
        convs = (
            ConvSpec(channels, inner, 1, first),
            ConvSpec(inner, inner, 3, second, deformable, config.feature_group_count),
            ConvSpec(inner, features, 1, 1),
        )
    else:
        convs = (
            ConvSpec(channels, inner, 3, strides),
            ConvSpec(inner, features, 3, 1, deformable),
        )
    shortcut = None
    if strides > 1 or channels != features:
        shortcut = ConvSpec(channels, features, 1, strides)
    return BlockSpec(convs, shortcut, has_frozen_norm(config, stage + 1))


def has_frozen_norm(config: ResNetConfig, part: int) -> bool:
    """Return True if the norms of the stem (part 0) or of a stage (1, …) are constant."""
    return config.frozen_norm or part <= config.frozen_stages


def stop_frozen_gradient(config: ResNetConfig, h: jax.Array, part: int) -> jax.Array:
    """Stop the gradient of the output of the stem (part 0) or of a stage (1, …) if frozen."""
    return lax.stop_gradient(h) if part <= config.frozen_stages else h


class NormSpec(NamedTuple):
    """Static arguments of one BatchNorm call."""

    use_running_stats: bool
    frozen: bool  # running statistics, scale and bias are constants
    options: dict[str, Any]  # of `normalize_batch` and `normalize_inference`
    batch_options: dict[str, Any]  # of `normalize_batch` only


class NormArrays(NamedTuple):
    """Running statistics and parameters of one BatchNorm."""

    mean: Any
    var: Any
    scale: Any
    bias: Any


class BlockArrays(NamedTuple):
    """Arrays of a stem or a block; those of the shortcut come last.

    A convolution is its kernel; a deformable one is a dict
    `{"kernel", "offset_conv": {"kernel", "bias"}}`.
    """

    convs: tuple[Any, ...]
    norms: tuple[NormArrays, ...]


Output = tuple[jax.Array, tuple[BatchStats | None, ...]]


def norm_spec(norm: Any, use_running_stats: bool, frozen: bool) -> NormSpec:
    """Return the static arguments of a BatchNorm module of either flavor."""
    options = dict(
        dtype=norm.dtype, axis=-1, epsilon=norm.epsilon, activation=norm.activation
    )  # fmt: skip
    batch_options = dict(
        axis_name=norm.axis_name, axis_index_groups=norm.axis_index_groups, stats=norm.stats
    )
    return NormSpec(use_running_stats or frozen, frozen, options, batch_options)


def apply_stem(
    config: ResNetConfig, norm: NormSpec, x: jax.Array, arrays: BlockArrays, mask: jax.Array | None
) -> Output:
    """Return the output of the stem and the batch statistics of its norm."""

    def run(x: jax.Array, arrays: BlockArrays, mask: jax.Array | None) -> Output:
        h = _apply_conv(config, x, arrays.convs[0], stem_spec(config, x.shape[-1]))
        h = checkpoint_name(h, CONV_OUTPUT)
        h, stats = _apply_norm(norm, h, arrays.norms[0], mask)
        return h if config.small_inputs else max_pool(h), (stats,)

    return _recompute(config, run)(x, arrays, mask)


def apply_block(
    config: ResNetConfig, spec: BlockSpec, norms: tuple[NormSpec, ...], x: jax.Array,
    arrays: BlockArrays, mask: jax.Array | None,
) -> Output:  # fmt: skip
    """Return the output of a block and the batch statistics of its norms, the shortcut's last."""

    def run(x: jax.Array, arrays: BlockArrays, mask: jax.Array | None) -> Output:
        shortcut, shortcut_stats = x, []
        if spec.shortcut is not None:
            shortcut = _apply_conv(config, x, arrays.convs[-1], spec.shortcut)
            shortcut, stats = _apply_norm(norms[-1], shortcut, arrays.norms[-1], mask)
            shortcut_stats = [stats]
        h, all_stats = x, []
        for k, conv_spec in enumerate(spec.convs):
            is_last = k == len(spec.convs) - 1
            h = _apply_conv(config, h, arrays.convs[k], conv_spec)
            if not is_last:
                h = checkpoint_name(h, CONV_OUTPUT)
            # The last norm adds the shortcut before its ReLU.
            residual = shortcut if is_last else None
            h, stats = _apply_norm(norms[k], h, arrays.norms[k], mask, residual)
            all_stats.append(stats)
        return h, (*all_stats, *shortcut_stats)

    return _recompute(config, run)(x, arrays, mask)


def _recompute(config: ResNetConfig, run: Callable[..., Output]) -> Callable[..., Output]:
    if not config.efficient:
        return run
    names = (STATISTICS, CONV_OUTPUT) if config.save == "conv" else (STATISTICS,)
    return jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))


def _apply_conv(config: ResNetConfig, x: jax.Array, arrays: Any, spec: ConvSpec) -> jax.Array:
    if not spec.deformable:
        return conv(x, arrays, spec.strides, spec.padding, spec.groups)
    offset_conv = arrays["offset_conv"]
    predicted = conv(x, offset_conv["kernel"], spec.strides, spec.padding)
    predicted += offset_conv["bias"].astype(x.dtype).reshape(1, 1, 1, -1)
    offset, mask = split_predicted(predicted, config.modulated)
    return deform_conv2d(
        x, offset, arrays["kernel"].astype(x.dtype), mask, strides=spec.strides,
        padding=spec.padding, feature_group_count=spec.groups, offset_groups=config.offset_groups,
    )  # fmt: skip


def _apply_norm(
    norm: NormSpec, x: jax.Array, arrays: NormArrays, mask: jax.Array | None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, BatchStats | None]:  # fmt: skip
    if norm.frozen:
        arrays = NormArrays(*map(lax.stop_gradient, arrays))
    if norm.use_running_stats:
        return normalize_inference(x, *arrays, residual=residual, **norm.options), None
    return normalize_batch(
        x, arrays.scale, arrays.bias, mask=mask, residual=residual,
        **norm.options, **norm.batch_options,
    )  # fmt: skip
