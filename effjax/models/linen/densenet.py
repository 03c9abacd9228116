"""DenseNet-BC for Flax linen, plain or in memory linear in its depth."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike

from ...layers.densenet import (
    DenseNetOptions,
    Save,
    block_key,
)
from ...layers.images import conv, he_normal, lecun_normal, max_pool
from ...linen.batch_norm import BatchNorm
from ...ops._common.arguments import as_flag
from ...ops._common.dtypes import accumulation_dtype
from ...ops.dense_block.block import DenseLayerParams, dense_block
from ...ops.dense_block.bn_relu_conv import bn_relu_conv
from ...ops.dropout import dropout


class DenseNet(nn.Module):
    """DenseNet-BC on images `[N, H, W, C]`: stem, dense blocks with transitions, linear head.

    The options, their defaults and the network are those of `effjax.models.DenseNet`, whose
    documentation holds here too; the variables have the same names (`blocks_0/layers_1/norm1/scale`
    is nnx's `blocks[0].layers[1].norm1.scale`). With `efficient=True` training keeps memory linear
    in the depth, with outputs, gradients, running statistics and variables of `efficient=False`;
    reverse mode only.

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    growth_rate: int = 32
    block_config: Sequence[int] = (6, 12, 24, 16)
    compression: float = 0.5
    num_init_features: int = 64
    bn_size: int = 4
    drop_rate: float = 0.0
    num_classes: int = 1000
    small_inputs: bool = False
    efficient: bool = True
    save: Save = "conv"
    num_chunks: int | None = None
    axis_name: Any = None
    axis_index_groups: Any = None
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    unbiased_running_var: bool = False

    def __post_init__(self):
        _options(self)  # checks them
        super().__post_init__()

    def setup(self):
        options = self.options
        self.stem_conv = Kernel(
            options.num_init_features, 3 if options.small_inputs else 7, options
        )
        if not options.small_inputs:
            self.stem_norm = BatchNorm(**options.norm())
        self.blocks = [DenseBlock(layers, options) for layers in options.block_config]
        self.transitions = [Transition(after, options) for _, after in options.widths()[:-1]]
        self.final_norm = BatchNorm(**options.norm())
        self.classifier = nn.Dense(
            options.num_classes, kernel_init=lecun_normal, dtype=options.dtype,
            param_dtype=options.param_dtype,
        )  # fmt: skip

    @property
    def options(self) -> DenseNetOptions:
        """The fields, checked."""
        return _options(self)

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: whether to use (and collect) batch statistics, and dropout. Needs
                `mutable=["batch_stats"]`, and `rngs={"dropout": key}` if `drop_rate` is positive.
            mask: bool `[N]` or `[N, 1, 1, 1]`: which images count in the batch statistics.

        Returns:
            `[N, num_classes]`, computed in `dtype`, returned as float32 (float64 where computed
            so).

        Raises:
            TypeError, ValueError: if `x`, `train` or `mask` does not fit, or `axis_name` is not
                mapped in training.
        """
        h = self._features(x, train, mask)[-1].mean((1, 2))
        logits = self.classifier(h)
        chex.assert_shape(logits, (len(h), self.num_classes))
        return logits.astype(accumulation_dtype(logits))

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """The outputs of all blocks, as nnx's: `model.apply(variables, x, method="features")`."""
        return self._features(x, train, mask)

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return self.options.feature_channels

    @nn.nowrap
    def _features(self, x: ArrayLike, train: bool, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        options = self.options
        as_flag("train", train)
        h, valid = options.prepare(x, None, mask)
        key = self.make_rng("dropout") if train and options.drop_rate else None
        if options.small_inputs:
            h = conv(h, self.stem_conv(h.shape[-1]), padding=1)
        else:
            h = conv(h, self.stem_conv(h.shape[-1]), strides=2, padding=3)
            h = max_pool(self.stem_norm(h, use_running_average=not train, mask=valid))
        found = []
        for i, (block, (before, _)) in enumerate(zip(self.blocks, options.widths(), strict=True)):
            if i:
                h = self.transitions[i - 1](h, train, valid)
            chex.assert_axis_dimension(h, 3, before)
            h = block(h, train, valid, block_key(key, i))
            found.append(h)
        return *found[:-1], self.final_norm(h, use_running_average=not train, mask=valid)


def _options(module: DenseNet) -> DenseNetOptions:
    names = [field.name for field in dataclasses.fields(DenseNetOptions)]
    return DenseNetOptions(**{name: getattr(module, name) for name in names})


class DenseBlock(nn.Module):
    """The layers between two transitions; the result is the input and all their new channels."""

    num_layers: int
    options: DenseNetOptions

    def setup(self):
        self.layers = [DenseLayer(self.options) for _ in range(self.num_layers)]

    def __call__(
        self, x: jax.Array, train: bool, mask: jax.Array | None, key: jax.Array | None
    ) -> jax.Array:
        options = self.options
        if not (train and options.efficient) or self.is_initializing():
            for i, layer in enumerate(self.layers):
                new = layer(x, train, mask)
                if key is not None:
                    new = dropout(new, options.drop_rate, jax.random.fold_in(key, i))
                x = jnp.concatenate([x, new], -1)
            return x
        widths = [x.shape[-1] + i * options.growth_rate for i in range(self.num_layers)]
        params = [layer.parameters(c) for layer, c in zip(self.layers, widths, strict=True)]
        features, stats = dense_block(
            x, params, save=options.save, axis_name=options.axis_name, mask=mask,
            axis_index_groups=options.axis_index_groups, epsilon=options.epsilon,
            dropout_rate=options.drop_rate, key=key, num_chunks=options.num_chunks,
        )  # fmt: skip
        for layer, batches in zip(self.layers, stats, strict=True):
            layer.norm1.update_running_stats(batches[0])
            layer.norm2.update_running_stats(batches[1])
        return features


class DenseLayer(nn.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3: the new channels of one layer."""

    options: DenseNetOptions

    def setup(self):
        options = self.options
        self.norm1 = BatchNorm(**options.norm())
        self.conv1 = Kernel(options.bn_size * options.growth_rate, 1, options)
        self.norm2 = BatchNorm(**options.norm())
        self.conv2 = Kernel(options.growth_rate, 3, options)

    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        x = self.norm1(x, use_running_average=not train, mask=mask)
        x = conv(x, self.conv1(x.shape[-1]))
        x = self.norm2(x, use_running_average=not train, mask=mask)
        return conv(x, self.conv2(x.shape[-1]), padding=1)

    def parameters(self, channels: int) -> DenseLayerParams:
        """The parameters for an input of so many channels, as `effjax.dense_block` takes them."""
        width = self.options.bn_size * self.options.growth_rate
        first = (*self.norm1.parameters(), self.conv1(channels))
        return DenseLayerParams(*first, *self.norm2.parameters(), self.conv2(width))


class Transition(nn.Module):
    """BN-ReLU-conv1x1 and a 2x2 average pool."""

    features: int
    options: DenseNetOptions

    def setup(self):
        self.norm = BatchNorm(**self.options.norm())
        self.conv = Kernel(self.features, 1, self.options)

    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        options, channels = self.options, x.shape[-1]
        if not (train and options.efficient) or self.is_initializing():
            x = self.norm(x, use_running_average=not train, mask=mask)
            x = conv(x, self.conv(channels))
        else:
            x, batch = bn_relu_conv(
                x, *self.norm.parameters(), self.conv(channels), mask=mask,
                axis_name=options.axis_name, axis_index_groups=options.axis_index_groups,
                epsilon=options.epsilon, num_chunks=options.num_chunks,
            )  # fmt: skip
            self.norm.update_running_stats(batch)
        return nn.avg_pool(x, (2, 2), (2, 2))


class Kernel(nn.Module):
    """Holds a kernel; the convolution is `layers.images.conv` or part of an operator."""

    features: int
    size: int
    options: DenseNetOptions

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        shape = (self.size, self.size, channels, self.features)
        return self.param("kernel", he_normal, shape, self.options.param_dtype)
