"""What the linen and the nnx ResNet share: options, their validation, the plan of the network."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..ops._common.arguments import as_dtype, as_flag, as_integer, as_number, check_choice, describe
from ..ops.batch_norm.statistics import as_index_groups
from .batch_norm import check_momentum, hashable_axes
from .images import as_image_mask, as_images, compute_dtype

Save = Literal["conv", "features"]
EXPANSION = 4  # of a bottleneck: its output's channels by those of its 3x3 convolution


class ConvPlan(NamedTuple):
    """A convolution of a block; its padding is half of its size on every side."""

    channels: int
    features: int
    size: int
    strides: int
    deformable: bool = False

    @property
    def padding(self) -> int:
        return self.size // 2


class BlockPlan(NamedTuple):
    """The convolutions of a block, and that of its shortcut, if there is one; whether its norms are
    constants."""

    convs: tuple[ConvPlan, ...]
    shortcut: ConvPlan | None
    frozen: bool


@dataclasses.dataclass(frozen=True)
class ResNetOptions:
    """The options of a ResNet, checked; `effjax.models.ResNet` documents them."""

    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    stride_in_1x1: bool = False
    stage_with_dcn: Sequence[bool] = ()
    modulated: bool = True
    offset_groups: int = 1
    num_classes: int | None = 1000
    small_inputs: bool = False
    efficient: bool = True
    save: Save = "conv"
    frozen_stages: int = -1
    frozen_norm: bool = False
    axis_name: Any = None
    axis_index_groups: int | Sequence[Sequence[int]] | None = None
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    unbiased_running_var: bool = False

    def __post_init__(self):
        _freeze(self, "stage_sizes", _stage_sizes(self.stage_sizes))
        _freeze(self, "stage_with_dcn", _deformed(self.stage_with_dcn, len(self.stage_sizes)))
        _freeze(self, "axis_index_groups", as_index_groups(self.axis_index_groups))
        _freeze(self, "axis_name", hashable_axes(self.axis_name))
        for name in ("width", "offset_groups"):
            as_integer(name, getattr(self, name), 1)
        if self.num_classes is not None:
            as_integer("num_classes", self.num_classes, 1)
        if as_integer("frozen_stages", self.frozen_stages, -1) > len(self.stage_sizes):
            raise ValueError(
                f"`frozen_stages` (={self.frozen_stages}) is more than the "
                f"{len(self.stage_sizes)} stages; -1 freezes nothing, 0 the stem."
            )
        check_momentum(self.momentum)
        as_number("epsilon", self.epsilon, lambda e: 0 <= e < math.inf, "at least 0")
        for name in (
            "bottleneck", "stride_in_1x1", "modulated", "small_inputs", "efficient",
            "frozen_norm", "unbiased_running_var",
        ):  # fmt: skip
            as_flag(name, getattr(self, name))
        check_choice("save", self.save, "conv", "features")
        if self.dtype is not None:
            as_dtype("dtype", self.dtype)
        as_dtype("param_dtype", self.param_dtype)
        if any(self.stage_with_dcn) and self.width % self.offset_groups:
            raise ValueError(
                f"`offset_groups` (={self.offset_groups}) must divide `width` (={self.width}), "
                "the channels of the deformable convolutions."
            )

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of the output of each stage."""
        wide = self.width * (EXPANSION if self.bottleneck else 1)
        return tuple(wide << stage for stage in range(len(self.stage_sizes)))

    def freezes_norm(self, part: int) -> bool:
        """Whether the norms of the stem (0) or of a stage (1, …) are constant."""
        return self.frozen_norm or part <= self.frozen_stages

    def cut(self, h: jax.Array, part: int) -> jax.Array:
        """The output of the stem (0) or of a stage (1, …), without a gradient if it is frozen."""
        return lax.stop_gradient(h) if part <= self.frozen_stages else h

    def stem(self, in_channels: int) -> ConvPlan:
        """The first convolution."""
        return ConvPlan(
            in_channels, self.width, *((3, 1) if self.small_inputs else (7, 2))
        )  # fmt: skip

    def stages(self) -> list[list[BlockPlan]]:
        """The blocks of each stage."""
        found, channels = [], self.width
        for stage, (size, features) in enumerate(
            zip(self.stage_sizes, self.feature_channels, strict=True)
        ):
            blocks = []
            for i in range(size):
                blocks.append(self._block(stage, channels, 2 if stage and not i else 1))
                channels = features
            found.append(blocks)
        return found

    def _block(self, stage: int, channels: int, strides: int) -> BlockPlan:
        inner, features = self.width << stage, self.feature_channels[stage]
        deformable = bool(self.stage_with_dcn) and self.stage_with_dcn[stage]
        if self.bottleneck:
            first, second = (strides, 1) if self.stride_in_1x1 else (1, strides)
            convs = (
                ConvPlan(channels, inner, 1, first),
                ConvPlan(inner, inner, 3, second, deformable),
                ConvPlan(inner, features, 1, 1),
            )
        else:
            convs = (
                ConvPlan(channels, inner, 3, strides),
                ConvPlan(inner, features, 3, 1, deformable),
            )
        shortcut = None
        if strides > 1 or channels != features:
            shortcut = ConvPlan(channels, features, 1, strides)
        return BlockPlan(convs, shortcut, self.freezes_norm(stage + 1))

    def norm(self, activation: str | None = "relu") -> dict[str, Any]:
        """The arguments of a BatchNorm."""
        return dict(
            momentum=self.momentum, epsilon=self.epsilon, dtype=self.dtype,
            param_dtype=self.param_dtype, axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups, activation=activation,
            unbiased_running_var=self.unbiased_running_var,
        )  # fmt: skip

    def prepare(
        self, x: ArrayLike, in_channels: int | None, mask: ArrayLike | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Checks a batch; returns it in the computation's dtype, and the mask as [N, 1, 1, 1]."""
        x = as_images(x, in_channels)
        if min(x.shape[1:3]) < 1:
            raise ValueError(f"`x` of shape {x.shape} has no pixels.")
        dtype = compute_dtype(x.dtype, self.dtype, self.param_dtype)
        return x.astype(dtype), as_image_mask(mask, x)


def _stage_sizes(sizes: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(as_integer("stage_sizes", size, 1) for size in sizes)
    except TypeError:
        raise TypeError(
            "`stage_sizes` must be the number of blocks of each stage, like (3, 4, 6, 3), not "
            f"{describe(sizes)}."
        ) from None
    if not sizes:
        raise ValueError(
            "`stage_sizes` is empty: give the number of blocks of each stage, like (3, 4, 6, 3)."
        )
    return sizes


def _deformed(stages: Any, count: int) -> tuple[bool, ...]:
    try:
        stages = tuple(as_flag("stage_with_dcn", stage) for stage in stages)
    except TypeError:
        raise TypeError(
            "`stage_with_dcn` must say of each stage whether it is deformable, like (False, True, "
            f"True, True), not be {describe(stages)}."
        ) from None
    if stages and len(stages) != count:
        raise ValueError(
            f"`stage_with_dcn` (={stages}) must have a value for each of the {count} stages, or "
            "be ()."
        )
    return stages


def _freeze(options: ResNetOptions, name: str, value: Any) -> None:
    object.__setattr__(options, name, value)
