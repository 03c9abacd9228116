"""DenseNet-BC block for Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.typing import ArrayLike

from ..layers.dense_block import DenseBlockConfig, prepare_features
from ..layers.images import Save, norm_options
from ..ops._common.arguments import as_integer, as_key, with_torch_hints
from ..ops.dense_block.block import DenseLayerParams, dense_block
from ..ops.dropout import dropout
from .batch_norm import BatchNorm
from .conv import make_conv


class DenseBlock(nnx.Module):
    """DenseNet-BC block on images, whose memory in training is linear in its depth.

    A layer is BN-ReLU-conv1x1 to `bn_size·growth_rate` channels, then BN-ReLU-conv3x3 to
    `growth_rate` new channels, which are appended to the layer's input. The block returns its input
    and all new channels.

    With `efficient=True` training uses `effjax.dense_block`. Outputs, gradients, running statistics
    and the state tree are those of `efficient=False` (plain autodiff). Every running statistic is
    updated once per call. Evaluation runs the plain layers in both cases, and so does training
    where norms have different settings, such as frozen ones. Reverse mode only.

    Submodules: `layers[i].norm1` and `norm2`, each an `effjax.nnx.BatchNorm`, and `conv1` and
    `conv2`, each with a `kernel`. Kernels are initialized from N(0, 2/(kh·kw·out)), norms with
    scale 1 and bias 0.

    Args:
        in_features: channels of the input.
        num_layers: the number of layers.
        growth_rate: new channels of a layer (k in the paper).
        bn_size: width of the bottleneck in units of `growth_rate`.
        drop_rate: dropout of each layer's new channels, in [0, 1).
        efficient: recompute wide intermediate arrays in the backward pass instead of keeping them.
        save: "conv" keeps the output of each 1x1 convolution for the backward pass, "features"
            recomputes it too.
        chunk_size: as in `effjax.dense_block`.
        use_running_average: if True, the norms use their running statistics instead of the batch's.
            Set by `train()` and `eval()`.
        momentum, epsilon, unbiased_running_var, axis_name, axis_index_groups: of the norms, as in
            `effjax.nnx.BatchNorm`. PyTorch's momentum 0.1 is 0.9 here.
        dtype: of the computation. If None, x's dtype, promoted with `param_dtype` unless x is half
            precision. Parameters stay `param_dtype`, and statistics are float32 or wider.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`).

    Attributes:
        deterministic: if True, no dropout, also with batch statistics. Set by `train()` and
            `eval()`.
        out_features: `in_features + num_layers * growth_rate`.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    @with_torch_hints
    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        growth_rate: int = 32,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        efficient: bool = True,
        save: Save = "conv",
        chunk_size: int | None = None,
        use_running_average: bool | None = False,
        momentum: float | None = 0.99,
        epsilon: float = 1e-5,
        unbiased_running_var: bool = False,
        axis_name: Any = None,
        axis_index_groups: int | Sequence[Sequence[int]] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config = DenseBlockConfig(
            num_layers, growth_rate=growth_rate, bn_size=bn_size, drop_rate=drop_rate,
            efficient=efficient, save=save, chunk_size=chunk_size, momentum=momentum,
            epsilon=epsilon, unbiased_running_var=unbiased_running_var, axis_name=axis_name,
            axis_index_groups=axis_index_groups, dtype=dtype, param_dtype=param_dtype,
        )  # fmt: skip
        self.in_features = as_integer("in_features", in_features, 1)
        self.out_features = self.in_features + config.num_layers * config.growth_rate
        self.deterministic = False
        widths = range(self.in_features, self.out_features, config.growth_rate)
        self.layers = nnx.List(
            DenseLayer(width, config, use_running_average, rngs=rngs) for width in widths
        )

    def __call__(
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Return the input and the new channels of all layers.

        Args:
            x: `[N, H, W, in_features]`.
            use_running_average: overrides that of the norms. It does not turn dropout off.
            mask: bool, broadcastable to `[N, H, W, 1]`: the pixels to include in the batch
                statistics.
            deterministic: overrides the attribute of the same name.
            rngs: the dropout key, required in training if `drop_rate` is positive: an Rngs with the
                stream `dropout`, a stream, or a key.

        Returns:
            `[N, H, W, out_features]` of the dtype of the computation.

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, the dropout key
                is missing, or `axis_name` is not mapped where batch statistics are taken.
        """
        config = self.config
        x, mask = prepare_features(config, x, self.in_features, mask)
        if deterministic is None:
            deterministic = self.deterministic
        rate = 0.0 if deterministic else config.drop_rate
        key = as_dropout_key(rngs) if rate else None
        options, norms = None, []
        if config.efficient:
            norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
            options = shared_batch_options(norms, use_running_average)
        if options is None:
            for i, layer in enumerate(self.layers):
                new = layer(x, use_running_average, mask=mask)
                if key is not None:
                    new = dropout(new, rate, jax.random.fold_in(key, i))
                x = jnp.concatenate([x, new], -1)
            return x
        features, stats = dense_block(
            x, [layer._parameters() for layer in self.layers], save=config.save, mask=mask,
            dropout_rate=rate, key=key, chunk_size=config.chunk_size, **options,
        )  # fmt: skip
        for norm, batch_stats in zip(norms, (s for pair in stats for s in pair), strict=True):
            norm._update_running_stats(batch_stats)
        return features

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set whether dropout is disabled; called by `nnx.view`."""
        if deterministic is not None:
            self.deterministic = deterministic


class DenseLayer(nnx.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3; returns the new channels of one layer."""

    def __init__(
        self,
        channels: int,
        config: DenseBlockConfig,
        use_running_average: bool | None,
        *,
        rngs: nnx.Rngs,
    ):
        width, dtype = config.bn_size * config.growth_rate, config.param_dtype
        norm: dict[str, Any] = norm_options(config) | dict(use_running_average=use_running_average)
        self.norm1 = BatchNorm(channels, **norm, rngs=rngs)
        self.conv1 = make_conv(channels, width, 1, param_dtype=dtype, rngs=rngs)
        self.norm2 = BatchNorm(width, **norm, rngs=rngs)
        self.conv2 = make_conv(width, config.growth_rate, 3, param_dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, use_running_average: bool | None, *, mask: jax.Array | None
    ) -> jax.Array:
        """Return the new channels."""
        x = self.conv1(self.norm1(x, use_running_average, mask=mask))
        return self.conv2(self.norm2(x, use_running_average, mask=mask))

    def _parameters(self) -> DenseLayerParams:
        return DenseLayerParams(
            self.norm1.scale[...], self.norm1.bias[...], self.conv1.kernel[...],
            self.norm2.scale[...], self.norm2.bias[...], self.conv2.kernel[...],
        )  # fmt: skip


def shared_batch_options(
    norms: Sequence[BatchNorm], use_running_average: bool | None = None
) -> dict[str, Any] | None:
    """Return the options with which all norms compute batch statistics, or None if they differ."""
    # Norms differ, or use their running statistics, after a user has changed or frozen some of
    # them. One fused operator cannot replace such norms.
    if any(norm._uses_running_average(use_running_average) for norm in norms):
        return None
    names = ("axis_name", "axis_index_groups", "epsilon", "stats")
    options = [{name: getattr(norm, name) for name in names} for norm in norms]
    return options[0] if all(other == options[0] for other in options) else None


def as_dropout_key(rngs: Any) -> jax.Array:
    """Return the dropout key of an Rngs, a stream or a key."""
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    return as_key("rngs", rngs() if isinstance(rngs, nnx.RngStream) else rngs)
