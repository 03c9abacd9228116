"""DenseNet-BC for Flax linen."""

import chex
import jax
from flax import linen as nn
from jax.typing import ArrayLike

from ...layers.densenet import (
    DenseNetConfig,
    block_key,
    block_options,
    block_widths,
    prepare_batch,
)
from ...layers.images import conv, copy_config, lecun_normal, max_pool, norm_options
from ...linen.batch_norm import BatchNorm
from ...linen.dense_block import DenseBlock
from ...linen.kernel import KernelParam
from ...ops._common.arguments import with_torch_hints
from ...ops._common.dtypes import accumulation_dtype
from ...ops.dense_block.bn_relu_conv import bn_relu_conv


@with_torch_hints
class DenseNet(nn.Module, DenseNetConfig):
    """DenseNet-BC on images `[N, H, W, C]`: stem, dense blocks with transitions, linear head.

    The options, their defaults and the network are those of `effjax.models.DenseNet`. The variables
    have the same names (`blocks_0/layers_1/norm1/scale` is nnx's
    `blocks[0].layers[1].norm1.scale`). With `efficient=True` the memory of training is linear in
    the depth. Outputs, gradients, running statistics and variables are those of `efficient=False`.
    Reverse mode only.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    def __post_init__(self):
        DenseNetConfig.__post_init__(self)
        super().__post_init__()

    def setup(self):
        """Create the submodules."""
        config = copy_config(self, DenseNetConfig)
        norm, dtype = norm_options(config), config.param_dtype
        self.stem_conv = KernelParam(
            config.num_init_features, 3 if config.small_inputs else 7, dtype
        )
        if not config.small_inputs:
            self.stem_norm = BatchNorm(**norm)
        options = block_options(config)
        self.blocks = [DenseBlock(num_layers, **options) for num_layers in config.block_config]
        self.transitions = [Transition(after, config) for _, after in block_widths(config)[:-1]]
        self.final_norm = BatchNorm(**norm)
        self.classifier = nn.Dense(
            config.num_classes, kernel_init=lecun_normal, dtype=config.dtype,
            param_dtype=config.param_dtype,
        )  # fmt: skip

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: use (and collect) batch statistics, and apply dropout. Requires
                `mutable=["batch_stats"]`, and `rngs={"dropout": key}` if `drop_rate` is positive.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, computed in `dtype` and returned as float32 (float64 if computed in
            float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, or `axis_name`
                is not mapped in training.
        """
        h = self._features(x, train, mask)[-1].mean((1, 2))
        logits = self.classifier(h)
        chex.assert_shape(logits, (len(h), self.num_classes))
        return logits.astype(accumulation_dtype(logits))

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """Return the outputs of all blocks: `model.apply(variables, x, method="features")`."""
        return self._features(x, train, mask)

    @nn.nowrap
    def _features(self, x: ArrayLike, train: bool, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        h, image_mask = prepare_batch(self, x, None, mask)
        key = self.make_rng("dropout") if train and self.drop_rate else None
        if self.small_inputs:
            h = conv(h, self.stem_conv(h.shape[-1]), padding=1)
        else:
            h = conv(h, self.stem_conv(h.shape[-1]), strides=2, padding=3)
            h = max_pool(self.stem_norm(h, use_running_average=not train, mask=image_mask))
        outputs = []
        for i, (block, (channels, _)) in enumerate(
            zip(self.blocks, block_widths(self), strict=True)
        ):
            if i:
                h = self.transitions[i - 1](h, train, image_mask)
            chex.assert_axis_dimension(h, 3, channels)
            h = block(h, not train, mask=image_mask, rng=block_key(key, i))
            outputs.append(h)
        return *outputs[:-1], self.final_norm(h, use_running_average=not train, mask=image_mask)


class Transition(nn.Module):
    """BN-ReLU-conv1x1 and a 2x2 average pool."""

    features: int
    config: DenseNetConfig

    def setup(self):
        """Create the submodules."""
        self.norm = BatchNorm(**norm_options(self.config))
        self.conv = KernelParam(self.features, 1, self.config.param_dtype)

    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Return features with fewer channels and half the height and width."""
        config, channels = self.config, x.shape[-1]
        if not (train and config.efficient) or self.is_initializing():
            x = self.norm(x, use_running_average=not train, mask=mask)
            x = conv(x, self.conv(channels))
        else:
            x, batch_stats = bn_relu_conv(
                x, *self.norm.parameters(), self.conv(channels), mask=mask,
                axis_name=config.axis_name, axis_index_groups=config.axis_index_groups,
                epsilon=config.epsilon, num_chunks=config.num_chunks,
            )  # fmt: skip
            self.norm.update_running_stats(batch_stats)
        return nn.avg_pool(x, (2, 2), (2, 2))
