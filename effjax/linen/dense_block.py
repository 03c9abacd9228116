"""DenseNet-BC block for Flax linen."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from ..layers.dense_block import DenseBlockConfig, prepare_features
from ..layers.images import conv, copy_config, norm_options
from ..ops._common.arguments import as_key, with_torch_hints
from ..ops.dense_block.block import DenseLayerParams, dense_block
from ..ops.dropout import dropout
from .batch_norm import BatchNorm
from .kernel import KernelParam


@with_torch_hints
class DenseBlock(nn.Module, DenseBlockConfig):
    """DenseNet-BC block on images, whose memory in training is linear in its depth.

    The options, their defaults and the block are those of `effjax.nnx.DenseBlock`, except
    `in_features`, which follows from the input. The variables have the same names
    (`layers_1/norm1/scale` is nnx's `layers[1].norm1.scale`). Reverse mode only.

    Attributes:
        use_running_average: if True, the norms use their running statistics instead of the
            batch's. Pass it here or to the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    use_running_average: bool | None = None

    def __post_init__(self):
        DenseBlockConfig.__post_init__(self)
        super().__post_init__()

    def setup(self):
        """Create the submodules."""
        config = copy_config(self, DenseBlockConfig)
        self.layers = [DenseLayer(config) for _ in range(self.num_layers)]

    def __call__(
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        deterministic: bool | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Return the input and the new channels of all layers.

        During initialization the running statistics do not change, and `axis_name` need not be
        mapped.

        Args:
            x: `[N, H, W, C]`.
            use_running_average: use the running statistics. Pass it here or in the field. Batch
                statistics require `mutable=["batch_stats"]`.
            mask: bool, broadcastable to `[N, H, W, 1]`: the pixels to include in the batch
                statistics.
            deterministic: if True, no dropout. If None, as `use_running_average`.
            rng: the dropout key. If None, it comes from `rngs={"dropout": key}`.

        Returns:
            `[N, H, W, C + num_layers * growth_rate]` of the dtype of the computation.

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, or `axis_name`
                is not mapped where batch statistics are taken.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        scale, _ = self.layers[0].norm1.parameters()
        x, mask = prepare_features(self, x, None if scale is None else scale.size, mask)
        key = None
        if self.drop_rate and not (use_running_average if deterministic is None else deterministic):
            key = self.make_rng("dropout") if rng is None else as_key("rng", rng)
        if use_running_average or not self.efficient or self.is_initializing():
            for i, layer in enumerate(self.layers):
                new = layer(x, use_running_average, mask)
                if key is not None:
                    new = dropout(new, self.drop_rate, jax.random.fold_in(key, i))
                x = jnp.concatenate([x, new], -1)
            return x
        widths = [x.shape[-1] + i * self.growth_rate for i in range(self.num_layers)]
        params = [layer.parameters(c) for layer, c in zip(self.layers, widths, strict=True)]
        features, stats = dense_block(
            x, params, save=self.save, axis_name=self.axis_name, mask=mask,
            axis_index_groups=self.axis_index_groups, epsilon=self.epsilon,
            dropout_rate=0.0 if key is None else self.drop_rate, key=key,
            chunk_size=self.chunk_size,
        )  # fmt: skip
        for layer, (stats1, stats2) in zip(self.layers, stats, strict=True):
            layer.norm1.update_running_stats(stats1)
            layer.norm2.update_running_stats(stats2)
        return features


class DenseLayer(nn.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3; returns the new channels of one layer."""

    config: DenseBlockConfig

    def setup(self):
        """Create the submodules."""
        config, norm = self.config, norm_options(self.config)
        dtype = config.param_dtype
        self.norm1 = BatchNorm(**norm)
        self.conv1 = KernelParam(config.bn_size * config.growth_rate, 1, dtype)
        self.norm2 = BatchNorm(**norm)
        self.conv2 = KernelParam(config.growth_rate, 3, dtype)

    def __call__(
        self, x: jax.Array, use_running_average: bool, mask: jax.Array | None
    ) -> jax.Array:
        """Return the new channels."""
        x = self.norm1(x, use_running_average, mask=mask)
        x = conv(x, self.conv1(x.shape[-1]))
        x = self.norm2(x, use_running_average, mask=mask)
        return conv(x, self.conv2(x.shape[-1]), padding=1)

    def parameters(self, channels: int) -> DenseLayerParams:
        """Return the parameters of `effjax.dense_block` for an input of `channels` channels."""
        width = self.config.bn_size * self.config.growth_rate
        return DenseLayerParams(
            *self.norm1.parameters(), self.conv1(channels),
            *self.norm2.parameters(), self.conv2(width),
        )  # fmt: skip
