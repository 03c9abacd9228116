"""DenseNet-BC for Flax NNX, and the published networks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
from flax import nnx
from jax.typing import ArrayLike

from ..layers.dense_block import DenseLayerConfig
from ..layers.images import lecun_normal, norm_options
from ..nnx.batch_norm import BatchNorm
from ..nnx.conv import make_conv
from ..nnx.dense_block import DenseBlock, as_dropout_key, shared_batch_options
from ..ops._common.arguments import as_integer, as_number, with_torch_hints
from ..ops._common.dtypes import accumulation_dtype
from ..ops.dense_block.bn_relu_conv import bn_relu_conv
from .images import (
    ImageNetwork,
    ImageNetworkConfig,
    as_sizes,
    cast_batch,
    make_constructor,
    max_pool,
)


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class DenseNetConfig(ImageNetworkConfig, DenseLayerConfig):
    """Options of a DenseNet; `DenseNet` documents them."""

    block_config: Sequence[int] = (6, 12, 24, 16)
    compression: float = 0.5
    num_init_features: int = 64
    num_classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_init_features", "num_classes"):
            setattr(self, name, as_integer(name, getattr(self, name), 1))
        self.block_config = as_sizes("block_config", self.block_config)
        self.compression = as_number(
            "compression", self.compression, lambda c: 0 < c <= 1, "in (0, 1]"
        )
        widths = block_widths(self)
        if min(after for _, after in widths) < 1:
            raise ValueError(
                f"`compression` (={self.compression}) must leave at least one channel after each "
                f"transition; the channels before and after each block would be {widths}."
            )

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return tuple(
            before + num_layers * self.growth_rate
            for num_layers, (before, _) in zip(self.block_config, block_widths(self), strict=True)
        )


def block_widths(config: DenseNetConfig) -> list[tuple[int, int]]:
    """Return each block's input channels, and the channels after the block and its transition."""
    widths, channels = [], config.num_init_features
    for i, num_layers in enumerate(config.block_config):
        before, channels = channels, channels + num_layers * config.growth_rate
        if i < len(config.block_config) - 1:
            channels = int(channels * config.compression)  # truncated, as in the original
        widths.append((before, channels))
    return widths


@with_torch_hints
@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class DenseNet(ImageNetwork, DenseNetConfig):
    """DenseNet-BC on images `[N, H, W, C]`: stem, dense blocks with transitions, linear head.

    A layer is BN-ReLU-conv1x1 to `bn_size·growth_rate` channels, then BN-ReLU-conv3x3 to
    `growth_rate` new channels, which are appended to the layer's input. A transition is
    BN-ReLU-conv1x1 to `compression` times the channels and a 2x2 average pool. The head is BN-ReLU,
    the mean over the image and a linear layer.

    With `efficient=True` training uses `effjax.dense_block` and `effjax.bn_relu_conv`, whose memory
    is linear in the depth. Outputs, gradients, running statistics and the state tree are those of
    `efficient=False` (plain autodiff). Evaluation runs the plain network in both cases.
    Reverse mode only.

    Args:
        growth_rate: new channels of a layer (k in the paper).
        block_config: the number of layers of each block.
        compression: share of the channels that a transition keeps, in (0, 1].
        num_init_features: channels of the stem.
        bn_size: width of the bottleneck in units of `growth_rate`.
        drop_rate: dropout of each layer's new channels, in [0, 1).
        num_classes: size of the logits.
        small_inputs: use one 3x3 convolution as the stem (CIFAR); otherwise 7x7 with stride 2, BN,
            ReLU and a 3x3 max pool with stride 2.
        efficient: recompute wide intermediate arrays in the backward pass instead of keeping them.
        save: "conv" keeps the output of each 1x1 convolution for the backward pass, "features"
            recomputes it too.
        chunk_size: as in `effjax.dense_block`.
        axis_name, axis_index_groups: the mapped axes over which batch statistics are reduced.
        momentum, epsilon: of the BatchNorms; PyTorch's momentum 0.1 is 0.9 here.
        dtype: of the computation. If None, x's dtype, promoted with `param_dtype` unless x is half
            precision. Parameters stay `param_dtype`, and statistics are float32 or wider.
        param_dtype: of the parameters.
        unbiased_running_var: use PyTorch's running variance σ²·n/(n − 1), as the original does.
        in_channels: channels of the images.
        rngs: for the parameters (stream `params`).

    Convolutions are initialized from N(0, 2/(kh·kw·out)), norms with scale 1 and bias 0, the head
    from N(0, 1/in) with bias 0.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    in_channels: int = 3
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__post_init__()
        self.in_channels = as_integer("in_channels", self.in_channels, 1)
        self.deterministic = False  # until `nnx.view` or `eval` sets it
        fields = dataclasses.fields(DenseLayerConfig)
        block_options = {field.name: getattr(self, field.name) for field in fields}
        norm = functools.partial(BatchNorm, **norm_options(self), rngs=rngs)
        conv = functools.partial(make_conv, param_dtype=self.param_dtype, rngs=rngs)
        self.stem_norm: Any = nnx.data(None)
        if self.small_inputs:
            self.stem_conv = conv(self.in_channels, self.num_init_features, 3)
        else:
            self.stem_conv = conv(self.in_channels, self.num_init_features, 7, 2)
            self.stem_norm = norm(self.num_init_features)
        blocks, transitions, channels = [], [], self.num_init_features
        for num_layers, (before, channels) in zip(
            self.block_config, block_widths(self), strict=True
        ):
            block = DenseBlock(before, num_layers, **block_options, rngs=rngs)
            blocks.append(block)
            if len(blocks) < len(self.block_config):
                transition = Transition(
                    block.out_features, channels, conv=conv, norm=norm,
                    efficient=self.efficient, chunk_size=self.chunk_size,
                )  # fmt: skip
                transitions.append(transition)
        self.blocks = nnx.List(blocks)
        self.transitions = nnx.List(transitions)
        self.final_norm = norm(channels)
        self.classifier = nnx.Linear(
            channels, self.num_classes, kernel_init=lecun_normal, dtype=self.dtype,
            param_dtype=self.param_dtype, rngs=rngs,
        )  # fmt: skip

    def __call__(
        self,
        x: ArrayLike,
        *,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, in_channels]`.
            rngs: the dropout key, required in training if `drop_rate` is positive: an Rngs with the
                stream `dropout`, a stream, or a key.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, computed in `dtype` and returned as float32 (float64 if computed in
            float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, the dropout key
                is missing, or `axis_name` is not mapped in training.
        """
        h = self._features(x, rngs, mask)[-1].mean((1, 2))
        logits = self.classifier(h)
        chex.assert_shape(logits, (None, self.num_classes))
        return logits.astype(accumulation_dtype(logits))

    def features(
        self, x: ArrayLike, *, rngs: Any = None, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """Return the outputs of all blocks, before their transitions, in `dtype`.

        They have 1/4, 1/8, … of the images' size (1/1, 1/2, … with `small_inputs`) and
        `feature_channels` channels. The last one is after BN and ReLU. Arguments and errors are
        those of a call.
        """
        return self._features(x, rngs, mask)

    # `nnx.tabulate` would show the public method instead of the model, so a call does not use it.
    def _features(self, x: ArrayLike, rngs: Any, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        # Each transition halves the image; the stem of large images does so twice, with padding.
        last = len(self.blocks) - 1
        smallest = 2**last if self.small_inputs else 2 ** (last + 2) - 3
        h, image_mask = cast_batch(self, x, mask, self.in_channels, smallest)
        key = self._dropout_key(rngs)
        h = self.stem_conv(h)
        if not self.small_inputs:
            h = max_pool(self.stem_norm(h, mask=image_mask))
        outputs = []
        for i, block in enumerate(self.blocks):
            if i:
                h = self.transitions[i - 1](h, mask=image_mask)
            # Blocks must not draw the same masks.
            block_key = None if key is None else jax.random.fold_in(key, i)
            h = block(h, mask=image_mask, deterministic=key is None, rngs=block_key)
            chex.assert_axis_dimension(h, 3, self.feature_channels[i])
            outputs.append(h)
        return *outputs[:-1], self.final_norm(h, mask=image_mask)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set whether dropout is disabled; called by `nnx.view`."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, rngs: Any) -> jax.Array | None:
        if not self.drop_rate or self.deterministic:
            return None
        return as_dropout_key(rngs)


class Transition(nnx.Module):
    """BN-ReLU-conv1x1 and a 2x2 average pool."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        conv: Callable[..., nnx.Conv],
        norm: Callable[..., BatchNorm],
        efficient: bool,
        chunk_size: int | None,
    ):
        self.norm = norm(in_features)
        self.conv = conv(in_features, out_features, 1)
        self.efficient, self.chunk_size = efficient, chunk_size

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        """Return features with fewer channels and half the height and width."""
        norm = self.norm
        # A norm that uses running statistics has no batch statistics, and nothing to recompute.
        options = shared_batch_options([norm]) if self.efficient else None
        if options is None:
            x = self.conv(norm(x, mask=mask))
        else:
            x, batch_stats = bn_relu_conv(
                x, norm.scale[...], norm.bias[...], self.conv.kernel[...], mask=mask,
                chunk_size=self.chunk_size, **options,
            )  # fmt: skip
            norm._update_running_stats(batch_stats)
        return nnx.avg_pool(x, (2, 2), (2, 2))


def densenet_cifar(
    depth: int = 100,
    growth_rate: int = 12,
    module: Callable[..., Any] = DenseNet,
    **options: Any,
) -> Any:
    """Return a DenseNet-BC with three equal blocks for small images, by default of 10 classes.

    Args:
        depth: the number of convolutions and linear layers: 6n + 4 for n layers per block.
        growth_rate: k; the stem has 2k channels.
        module: `effjax.models.DenseNet` (requires `rngs`) or `effjax.models.linen.DenseNet`.
        **options: of the module; they override those above.

    Raises:
        TypeError, ValueError: if `depth` is not 6n + 4 with n ≥ 1, or an option is out of range.
    """
    return module(**_cifar_options(depth, growth_rate) | options)


def _cifar_options(depth: int, growth_rate: int = 12) -> dict[str, Any]:
    num_layers, rest = divmod(as_integer("depth", depth, 1) - 4, 6)
    if rest or num_layers < 1:
        raise ValueError(
            f"`depth` (={depth}) of a DenseNet-BC with three blocks must be 6n + 4: 22, 40, 100."
        )
    return dict(
        growth_rate=growth_rate, block_config=(num_layers,) * 3, num_init_features=2 * growth_rate,
        small_inputs=True, num_classes=10,
    )  # fmt: skip


# Options of the published networks by name; not part of the public interface.
DENSENET_OPTIONS: dict[str, dict[str, Any]] = {
    "densenet121": dict(growth_rate=32, block_config=(6, 12, 24, 16), num_init_features=64),
    "densenet161": dict(growth_rate=48, block_config=(6, 12, 36, 24), num_init_features=96),
    "densenet169": dict(growth_rate=32, block_config=(6, 12, 32, 32), num_init_features=64),
    "densenet201": dict(growth_rate=32, block_config=(6, 12, 48, 32), num_init_features=64),
    "densenet40_12": _cifar_options(40, 12),
    "densenet100_12": _cifar_options(100, 12),
}

_publish = functools.partial(make_constructor, DenseNet, DENSENET_OPTIONS)

densenet121 = _publish("densenet121", "DenseNet-121 (k = 32)", 7_978_856)
densenet161 = _publish("densenet161", "DenseNet-161 (k = 48)", 28_681_000)
densenet169 = _publish("densenet169", "DenseNet-169 (k = 32)", 14_149_480)
densenet201 = _publish("densenet201", "DenseNet-201 (k = 32)", 20_013_928)
densenet40_12 = _publish("densenet40_12", "DenseNet-BC-40 (k = 12)", 176_122)
densenet100_12 = _publish("densenet100_12", "DenseNet-BC-100 (k = 12)", 769_162)
