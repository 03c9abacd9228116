"""DenseNet-BC for Flax NNX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from ...layers.densenet import DenseNetConfig, block_key, block_widths, prepare_batch
from ...layers.images import conv, copy_config, he_normal, lecun_normal, max_pool, norm_options
from ...nnx.batch_norm import BatchNorm
from ...ops._common.arguments import as_integer, as_key
from ...ops._common.dtypes import accumulation_dtype
from ...ops.dense_block.block import DenseLayerParams, dense_block
from ...ops.dense_block.bn_relu_conv import bn_relu_conv
from ...ops.dropout import dropout


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class DenseNet(nnx.Module, DenseNetConfig):
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
        num_chunks: the number of slices of rows in which the recomputation runs (None: by size).
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

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        # The options are compared by value, modules by identity.
        return self is other

    def __post_init__(self, rngs: nnx.Rngs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__post_init__()
        self.in_channels = as_integer("in_channels", self.in_channels, 1)
        config = copy_config(self, DenseNetConfig)
        norm, features = norm_options(config), self.num_init_features
        self.deterministic = False
        self.stem_conv = _conv(
            self.in_channels, features, 3 if self.small_inputs else 7, config, rngs
        )
        self.stem_norm: Any = nnx.data(None)
        if not self.small_inputs:
            self.stem_norm = BatchNorm(features, **norm, rngs=rngs)
        blocks, transitions, channels = [], [], features
        widths = zip(config.block_config, block_widths(config), strict=True)
        for num_layers, (before, channels) in widths:
            after = before + num_layers * self.growth_rate
            blocks.append(DenseBlock(before, num_layers, config, rngs=rngs))
            if len(blocks) < len(config.block_config):
                transitions.append(Transition(after, channels, config, rngs=rngs))
        self.blocks = nnx.List(blocks)
        self.transitions = nnx.List(transitions)
        self.final_norm = BatchNorm(channels, **norm, rngs=rngs)
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
        chex.assert_shape(logits, (len(h), self.num_classes))
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
        h, image_mask = prepare_batch(self, x, self.in_channels, mask)
        key = self._dropout_key(rngs)
        if self.small_inputs:
            h = conv(h, self.stem_conv.kernel[...], padding=1)
        else:
            h = conv(h, self.stem_conv.kernel[...], strides=2, padding=3)
            h = max_pool(self.stem_norm(h, mask=image_mask))
        outputs = []
        for i, (block, (channels, _)) in enumerate(
            zip(self.blocks, block_widths(self), strict=True)
        ):
            if i:
                h = self.transitions[i - 1](h, mask=image_mask)
            chex.assert_axis_dimension(h, 3, channels)
            h = block(h, mask=image_mask, key=block_key(key, i))
            outputs.append(h)
        return *outputs[:-1], self.final_norm(h, mask=image_mask)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set whether dropout is disabled; called by `nnx.view`."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, rngs: Any) -> jax.Array | None:
        if not self.drop_rate or self.deterministic:
            return None
        if isinstance(rngs, nnx.Rngs):
            return rngs.dropout()
        return as_key("rngs", rngs() if isinstance(rngs, nnx.RngStream) else rngs)


class DenseBlock(nnx.Module):
    """Layers between two transitions; returns the input and all new channels."""

    def __init__(self, channels: int, num_layers: int, config: DenseNetConfig, *, rngs: nnx.Rngs):
        widths = [channels + i * config.growth_rate for i in range(num_layers)]
        self.layers = nnx.List([DenseLayer(width, config, rngs=rngs) for width in widths])
        self.config = config

    def __call__(self, x: jax.Array, *, mask: jax.Array | None, key: jax.Array | None) -> jax.Array:
        """Return all features of the block."""
        config = self.config
        rate = 0.0 if key is None else config.drop_rate
        options, norms = None, []
        if config.efficient:
            norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
            options = shared_batch_options(norms)
        if options is None:
            for i, layer in enumerate(self.layers):
                new = layer(x, mask=mask)
                if key is not None:
                    new = dropout(new, rate, jax.random.fold_in(key, i))
                x = jnp.concatenate([x, new], -1)
            return x
        features, stats = dense_block(
            x, [layer._parameters() for layer in self.layers], save=config.save, mask=mask,
            dropout_rate=rate, key=key, num_chunks=config.num_chunks, **options,
        )  # fmt: skip
        for norm, batch_stats in zip(norms, (s for pair in stats for s in pair), strict=True):
            norm._update_running_stats(batch_stats)
        return features


class DenseLayer(nnx.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3; returns the new channels of one layer."""

    def __init__(self, channels: int, config: DenseNetConfig, *, rngs: nnx.Rngs):
        width = config.bn_size * config.growth_rate
        self.norm1 = BatchNorm(channels, **norm_options(config), rngs=rngs)
        self.conv1 = _conv(channels, width, 1, config, rngs)
        self.norm2 = BatchNorm(width, **norm_options(config), rngs=rngs)
        self.conv2 = _conv(width, config.growth_rate, 3, config, rngs)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        """Return the new channels."""
        x = conv(self.norm1(x, mask=mask), self.conv1.kernel[...])
        return conv(self.norm2(x, mask=mask), self.conv2.kernel[...], padding=1)

    def _parameters(self) -> DenseLayerParams:
        return DenseLayerParams(
            self.norm1.scale[...], self.norm1.bias[...], self.conv1.kernel[...],
            self.norm2.scale[...], self.norm2.bias[...], self.conv2.kernel[...],
        )  # fmt: skip


class Transition(nnx.Module):
    """BN-ReLU-conv1x1 and a 2x2 average pool."""

    def __init__(self, channels: int, features: int, config: DenseNetConfig, *, rngs: nnx.Rngs):
        self.norm = BatchNorm(channels, **norm_options(config), rngs=rngs)
        self.conv = _conv(channels, features, 1, config, rngs)
        self.config = config

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        """Return features with fewer channels and half the height and width."""
        norm, kernel = self.norm, self.conv.kernel[...]
        options = shared_batch_options([norm]) if self.config.efficient else None
        if options is None:
            x = conv(norm(x, mask=mask), kernel)
        else:
            x, batch_stats = bn_relu_conv(
                x, norm.scale[...], norm.bias[...], kernel, mask=mask,
                num_chunks=self.config.num_chunks, **options,
            )  # fmt: skip
            norm._update_running_stats(batch_stats)
        return nnx.avg_pool(x, (2, 2), (2, 2))


def shared_batch_options(norms: Sequence[BatchNorm]) -> dict[str, Any] | None:
    """Return the options with which all norms compute batch statistics, or None if they differ.

    Norms differ, or use their running statistics, after a user has changed or frozen some of them.
    One fused operator cannot replace such norms.
    """
    if any(norm._uses_running_average() for norm in norms):
        return None
    names = ("axis_name", "axis_index_groups", "epsilon", "stats")
    options = [{name: getattr(norm, name) for name in names} for norm in norms]
    return options[0] if all(other == options[0] for other in options) else None


def _conv(
    channels: int, features: int, size: int, config: DenseNetConfig, rngs: nnx.Rngs
) -> nnx.Conv:
    # Holds the kernel only; `layers.images.conv` or a fused operator convolves.
    return nnx.Conv(
        channels, features, (size, size), use_bias=False, kernel_init=he_normal,
        param_dtype=config.param_dtype, rngs=rngs,
    )  # fmt: skip
