"""DenseNet-BC for Flax NNX."""

import dataclasses
from typing import Any

import chex
import jax
from flax import nnx
from jax.typing import ArrayLike

from ...layers.densenet import (
    DenseNetConfig,
    block_key,
    block_options,
    block_widths,
    prepare_batch,
)
from ...layers.images import conv, copy_config, lecun_normal, max_pool, norm_options
from ...nnx.batch_norm import BatchNorm
from ...nnx.dense_block import DenseBlock, as_dropout_key, make_kernel, shared_batch_options
from ...ops._common.arguments import as_integer, with_torch_hints
from ...ops._common.dtypes import accumulation_dtype
from ...ops.dense_block.bn_relu_conv import bn_relu_conv


@with_torch_hints
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
        self.stem_conv = make_kernel(
            self.in_channels, features, 3 if self.small_inputs else 7, self.param_dtype, rngs
        )
        self.stem_norm: Any = nnx.data(None)
        if not self.small_inputs:
            self.stem_norm = BatchNorm(features, **norm, rngs=rngs)
        blocks, transitions, channels = [], [], features
        widths = zip(config.block_config, block_widths(config), strict=True)
        for num_layers, (before, channels) in widths:
            block = DenseBlock(before, num_layers, **block_options(config), rngs=rngs)
            blocks.append(block)
            if len(blocks) < len(config.block_config):
                transitions.append(Transition(block.out_features, channels, config, rngs=rngs))
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
            deterministic, key_of_block = key is None, block_key(key, i)
            h = block(h, mask=image_mask, deterministic=deterministic, rngs=key_of_block)
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

    def __init__(self, channels: int, features: int, config: DenseNetConfig, *, rngs: nnx.Rngs):
        self.norm = BatchNorm(channels, **norm_options(config), rngs=rngs)
        self.conv = make_kernel(channels, features, 1, config.param_dtype, rngs)
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
