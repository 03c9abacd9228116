"""DenseNet-BC for Flax NNX, plain or in memory linear in its depth."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.typing import ArrayLike

from ...layers.densenet import (
    DenseNetOptions,
    Save,
    block_key,
    common,
)
from ...layers.images import conv, he_normal, lecun_normal, max_pool
from ...nnx.batch_norm import BatchNorm
from ...ops._common.arguments import as_integer, as_key
from ...ops._common.dtypes import accumulation_dtype
from ...ops.dense_block.block import DenseLayerParams, dense_block
from ...ops.dense_block.bn_relu_conv import bn_relu_conv
from ...ops.dropout import dropout


class DenseNet(nnx.Module):
    """DenseNet-BC on images `[N, H, W, C]`: stem, dense blocks with transitions, linear head.

    A layer is BN-ReLU-conv1x1 to `bn_size·growth_rate` channels, BN-ReLU-conv3x3 to `growth_rate`
    new ones, which are appended to its input. A transition is BN-ReLU-conv1x1 to `compression`
    times the channels and a 2x2 average pool. The head is BN-ReLU, the mean over the image, a
    linear layer.

    With `efficient=True` training uses `effjax.dense_block` and `effjax.bn_relu_conv`: outputs,
    gradients, running statistics and state trees are those of `efficient=False` (plain autodiff);
    only memory and time differ; reverse mode only. Evaluation is the plain network in both.

    Args:
        growth_rate: new channels of a layer (k in the paper).
        block_config: the number of layers of each block.
        compression: share of the channels that a transition keeps, in (0, 1].
        num_init_features: channels of the stem.
        bn_size: width of the bottleneck in units of `growth_rate`.
        drop_rate: dropout of each layer's new channels, in [0, 1).
        num_classes: size of the logits.
        small_inputs: the stem is one 3x3 convolution (CIFAR); otherwise 7x7 with stride 2, BN, ReLU
            and a 3x3 max pool with stride 2.
        efficient: recompute in the backward pass instead of keeping what is as wide as the
            features.
        save: "conv" keeps the output of each 1x1 convolution for the backward pass, "features" does
            not.
        num_chunks: in how many slices of rows the recompute runs (None: by size).
        axis_name, axis_index_groups: the mapped axes over which all batch statistics are taken.
        momentum, epsilon: of the BatchNorms; 0.9 is PyTorch's 0.1.
        dtype: of the computation. None: x's, promoted with `param_dtype` unless x is half
            precision. Parameters stay `param_dtype` and statistics float32 or wider.
        param_dtype: of the parameters.
        unbiased_running_var: the running variances are those of PyTorch, σ²·n/(n − 1), as the
            original's are.
        in_channels: channels of the images.
        rngs: for the parameters (stream `params`).

    Convolutions are initialized from N(0, 2/(kh·kw·out)), norms with 1 and 0, the head from
    N(0, 1/in) and 0.

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    def __init__(
        self,
        *,
        growth_rate: int = 32,
        block_config: Sequence[int] = (6, 12, 24, 16),
        compression: float = 0.5,
        num_init_features: int = 64,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        num_classes: int = 1000,
        small_inputs: bool = False,
        efficient: bool = True,
        save: Save = "conv",
        num_chunks: int | None = None,
        axis_name: Any = None,
        axis_index_groups: int | Sequence[Sequence[int]] | None = None,
        momentum: float | None = 0.9,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        unbiased_running_var: bool = False,
        in_channels: int = 3,
        rngs: nnx.Rngs,
    ):
        options = DenseNetOptions(
            growth_rate=growth_rate, block_config=block_config, compression=compression,
            num_init_features=num_init_features, bn_size=bn_size, drop_rate=drop_rate,
            num_classes=num_classes, small_inputs=small_inputs, efficient=efficient, save=save,
            num_chunks=num_chunks, axis_name=axis_name, axis_index_groups=axis_index_groups,
            momentum=momentum, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype,
            unbiased_running_var=unbiased_running_var,
        )  # fmt: skip
        self.options = options
        self.in_channels = as_integer("in_channels", in_channels, 1)
        self.deterministic = False
        self.stem_conv = _conv(
            in_channels, num_init_features, 3 if small_inputs else 7, options, rngs
        )
        self.stem_norm: Any = nnx.data(None)
        if not small_inputs:
            self.stem_norm = BatchNorm(num_init_features, **options.norm(), rngs=rngs)
        blocks, transitions, channels = [], [], num_init_features
        for layers, (before, channels) in zip(options.block_config, options.widths(), strict=True):
            after = before + layers * growth_rate
            blocks.append(DenseBlock(before, layers, options, rngs=rngs))
            if len(blocks) < len(options.block_config):
                transitions.append(Transition(after, channels, options, rngs=rngs))
        self.blocks = nnx.List(blocks)
        self.transitions = nnx.List(transitions)
        self.final_norm = BatchNorm(channels, **options.norm(), rngs=rngs)
        self.classifier = nnx.Linear(
            channels, num_classes, kernel_init=lecun_normal, dtype=dtype,
            param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip

    def __call__(
        self,
        x: ArrayLike,
        *,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Logits of images.

        Args:
            x: `[N, H, W, in_channels]`.
            rngs: the key of dropout, needed where `drop_rate` is positive and the model in training
                mode: an Rngs with the stream `dropout`, one stream, or a key.
            mask: bool `[N]` or `[N, 1, 1, 1]`: which images count in the batch statistics.

        Returns:
            `[N, num_classes]`, computed in `dtype`, returned as float32 (float64 where computed
            so).

        Raises:
            TypeError, ValueError: if `x` or `mask` does not fit, dropout has no key, or `axis_name`
                is not mapped in training.
        """
        h = self._features(x, rngs, mask)[-1].mean((1, 2))
        logits = self.classifier(h)
        chex.assert_shape(logits, (len(h), self.options.num_classes))
        return logits.astype(accumulation_dtype(logits))

    def features(
        self, x: ArrayLike, *, rngs: Any = None, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """The outputs of all blocks, in `dtype`, at 1/4, 1/8, … of the images' size (from 1/1 on
        with `small_inputs`): before their transitions, the last one after BN and ReLU.

        Arguments and errors as in a call. `feature_channels` says how many channels each has.
        """
        return self._features(x, rngs, mask)

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return self.options.feature_channels

    # Not the public method, which `nnx.tabulate` would show in place of the model.
    def _features(self, x: ArrayLike, rngs: Any, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        h, valid = self.options.prepare(x, self.in_channels, mask)
        key = self._dropout_key(rngs)
        if self.options.small_inputs:
            h = conv(h, self.stem_conv.kernel[...], padding=1)
        else:
            h = conv(h, self.stem_conv.kernel[...], strides=2, padding=3)
            h = max_pool(self.stem_norm(h, mask=valid))
        found = []
        for i, (block, (before, _)) in enumerate(
            zip(self.blocks, self.options.widths(), strict=True)
        ):
            if i:
                h = self.transitions[i - 1](h, mask=valid)
            chex.assert_axis_dimension(h, 3, before)
            h = block(h, mask=valid, key=block_key(key, i))
            found.append(h)
        return *found[:-1], self.final_norm(h, mask=valid)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Used by `nnx.view`: whether to leave dropout out."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, rngs: Any) -> jax.Array | None:
        if not self.options.drop_rate or self.deterministic:
            return None
        if rngs is None:
            raise ValueError(
                f"`drop_rate` (={self.options.drop_rate}) needs a key in training: call the model "
                "with rngs=nnx.Rngs(dropout=key), or say model.eval()."
            )
        if isinstance(rngs, nnx.Rngs):
            if not ({"dropout", "default"} & set(rngs)):
                raise ValueError("`rngs` has no stream `dropout`; pass nnx.Rngs(dropout=key).")
            return rngs.dropout()
        key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
        as_key("rngs", key)
        return key


class DenseBlock(nnx.Module):
    """The layers between two transitions; the result is the input and all their new channels."""

    def __init__(self, channels: int, num_layers: int, options: DenseNetOptions, *, rngs: nnx.Rngs):
        widths = [channels + i * options.growth_rate for i in range(num_layers)]
        self.layers = nnx.List([DenseLayer(width, options, rngs=rngs) for width in widths])
        self.options = options

    def __call__(self, x: jax.Array, *, mask: jax.Array | None, key: jax.Array | None) -> jax.Array:
        options = self.options
        rate = 0.0 if key is None else options.drop_rate
        norms = self._norms() if options.efficient else []
        sync = batch_options(norms) if norms else None
        if sync is None:
            for i, layer in enumerate(self.layers):
                new = layer(x, mask=mask)
                if key is not None:
                    new = dropout(new, rate, jax.random.fold_in(key, i))
                x = jnp.concatenate([x, new], -1)
            return x
        features, stats = dense_block(
            x, [layer._parameters() for layer in self.layers], save=options.save, mask=mask,
            dropout_rate=rate, key=key, num_chunks=options.num_chunks, **sync,
        )  # fmt: skip
        for norm, batch in zip(norms, (s for pair in stats for s in pair), strict=True):
            norm._update_running_stats(batch)
        return features

    def _norms(self) -> list[BatchNorm]:
        return [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]


class DenseLayer(nnx.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3: the new channels of one layer."""

    def __init__(self, channels: int, options: DenseNetOptions, *, rngs: nnx.Rngs):
        width = options.bn_size * options.growth_rate
        self.norm1 = BatchNorm(channels, **options.norm(), rngs=rngs)
        self.conv1 = _conv(channels, width, 1, options, rngs)
        self.norm2 = BatchNorm(width, **options.norm(), rngs=rngs)
        self.conv2 = _conv(width, options.growth_rate, 3, options, rngs)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        x = conv(self.norm1(x, mask=mask), self.conv1.kernel[...])
        return conv(self.norm2(x, mask=mask), self.conv2.kernel[...], padding=1)

    def _parameters(self) -> DenseLayerParams:
        """The parameters as `effjax.dense_block` takes them."""
        parts = ((self.norm1, self.conv1), (self.norm2, self.conv2))
        values = ((norm.scale[...], norm.bias[...], conv.kernel[...]) for norm, conv in parts)
        return DenseLayerParams(*(v for part in values for v in part))


class Transition(nnx.Module):
    """BN-ReLU-conv1x1 and a 2x2 average pool."""

    def __init__(self, channels: int, features: int, options: DenseNetOptions, *, rngs: nnx.Rngs):
        self.norm = BatchNorm(channels, **options.norm(), rngs=rngs)
        self.conv = _conv(channels, features, 1, options, rngs)
        self.options = options

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        norm, kernel = self.norm, self.conv.kernel[...]
        sync = batch_options([norm]) if self.options.efficient else None
        if sync is None:
            x = conv(norm(x, mask=mask), kernel)
        else:
            x, batch = bn_relu_conv(
                x, norm.scale[...], norm.bias[...], kernel, mask=mask,
                num_chunks=self.options.num_chunks, **sync,
            )  # fmt: skip
            norm._update_running_stats(batch)
        return nnx.avg_pool(x, (2, 2), (2, 2))


def batch_options(norms: Sequence[BatchNorm]) -> dict[str, Any] | None:
    """How all these norms take batch statistics; None if some do not, or not in the same way.

    One operator then stands for all of them. Norms can differ after a user has frozen some of them.
    """
    if any(norm._uses_running_average() for norm in norms):
        return None
    names = ("axis_name", "axis_index_groups", "epsilon", "stats")
    options = [{name: getattr(norm, name) for name in names} for norm in norms]
    return common(options)


def _conv(channels: int, features: int, size: int, options: DenseNetOptions, rngs: nnx.Rngs):
    """Holds a kernel; the convolution itself is `layers.images.conv`, or part of an operator."""
    return nnx.Conv(
        channels, features, (size, size), use_bias=False, kernel_init=he_normal,
        param_dtype=options.param_dtype, rngs=rngs,
    )  # fmt: skip
