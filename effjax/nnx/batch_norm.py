"""Batch normalization over devices for Flax NNX."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers
from jax.typing import ArrayLike

from ..layers.batch_norm import (
    Activation,
    Stats,
    check_options,
    feature_axes,
    hashable_axes,
    normalize_batch,
    normalize_with,
    updated_running_stats,
)
from ..ops._common.arguments import as_array, as_callable, as_flag, as_integer, describe
from ..ops.batch_norm.statistics import as_index_groups
from ..ops.batch_norm.sync import BatchStats


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with the statistics, the backward pass and the memory of effjax.

    `y = activation((x − μ)/sqrt(σ² + ε)·scale + bias + residual)`, with μ and σ² of the batch
    (`use_running_average=False`) or the running ones. Statistics are those of `axis_name`, with one
    all-reduce each way, weighted by the counts of an optional mask. See `effjax.sync_batch_norm`.

    A drop-in replacement: all of Flax's arguments with their defaults, and the same variables
    (Params scale and bias, BatchStats mean and var), so that checkpoints load both ways. `train()`,
    `eval()`, `set_attributes` and `nnx.view` work as with Flax's. Different from Flax:

    - `use_fast_variance` is accepted and ignored: the variance is always the numerically stable
      one.
    - The computation is float32 or wider and the result of dtype `dtype`; with `dtype=None` float16
      and bfloat16 inputs keep their dtype (Flax promotes them to float32). A `promote_dtype` other
      than Flax's own is called on (x, mean, var, scale, bias) first, as in Flax.
    - A batch (or a channel) without a single value leaves the running statistics as they are.
    - No gradient flows through the running statistics: there is a `stop_gradient` before each
      update.
    - `epsilon` must be positive in training.
    - A single example without a batch axis needs `axis_name` in training.
    - `residual` and `activation` are fused into the normalization.
    - `axis` may be a tuple; `num_features` is then the product of these axes' sizes.

    Further arguments:
        momentum: may be None: the running statistics are then the mean over all batches so far.
            This adds a BatchStat `num_batches` (one float32 a channel); no other value of
            `momentum` does.
        unbiased_running_var: the running variance is that of PyTorch, σ²·n/(n − 1).
        track_running_stats: if False, there are no running statistics and the batch's own are used
            in evaluation too; `use_running_average` has no effect.
        activation: None or "relu".
        stats: how the statistics are merged over devices, see `effjax.sync_batch_norm`.

    Complex inputs work as in linen, without `activation` (TypeError).

    Kept for the backward pass: the input, in its own dtype or in `dtype` where that is wider, and
    statistics of the size of a channel (with `residual` and `activation` the result as well).
    Training is for reverse mode only.
    """

    mean: Any  # BatchStat, or None without running statistics
    var: Any
    scale: Any  # Param, or None where it is not used
    bias: Any
    momentum: float | None
    # What a layer of Flax's own class has after `convert_batch_norm`:
    num_batches: Any = None
    unbiased_running_var: bool = False
    track_running_stats: bool = True
    activation: Activation | None = None
    stats: Stats = "auto"

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int | Sequence[int] = -1,
        momentum: float | None = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: Any = None,
        axis_index_groups: int | Sequence[Sequence[int]] | None = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        unbiased_running_var: bool = False,
        track_running_stats: bool = True,
        activation: Activation | None = None,
        stats: Stats = "auto",
    ):
        of_flax: dict[str, Any] = dict(
            use_running_average=use_running_average, momentum=momentum, epsilon=epsilon,
            axis=tuple(axis) if isinstance(axis, list) else axis,
            dtype=dtype, param_dtype=param_dtype, use_bias=use_bias, use_scale=use_scale,
            bias_init=bias_init, scale_init=scale_init, axis_name=hashable_axes(axis_name),
            axis_index_groups=as_index_groups(axis_index_groups),
            use_fast_variance=use_fast_variance,
        )  # fmt: skip
        own: dict[str, Any] = dict(
            unbiased_running_var=unbiased_running_var, track_running_stats=track_running_stats,
            activation=activation, stats=stats,
        )  # fmt: skip
        check_options(**of_flax, **own)
        as_callable("promote_dtype", promote_dtype)
        for name, value in (("bias", bias_metadata), ("scale", scale_metadata)):
            if not isinstance(value, Mapping):
                raise TypeError(f"`{name}_metadata` must be a dict, not {describe(value)}.")
        super().__init__(
            as_integer("num_features", num_features, 0),
            **of_flax,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )
        self.num_batches = nnx.data(None)
        if not track_running_stats:
            self.mean = self.var = nnx.data(None)
        elif momentum is None:
            self.num_batches = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
        for name, value in own.items():
            setattr(self, name, value)

    def __call__(  # type: ignore[override]
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalizes `x`.

        Args:
            x: the input, floating point or complex (integers are promoted); features at `axis`.
            use_running_average: overrides the attribute of this name.
            mask: bool, broadcastable to `x`; where it is False, x does not count in the statistics.
            residual: the shape of `x`; added before the activation.

        Returns:
            The normalized input, of x's shape and of dtype `dtype` (see the class).

        Raises:
            ValueError: if `x` does not have `num_features` features, no `use_running_average` was
                given anywhere, or `axis_name` is not mapped where statistics are taken.
            TypeError: for an `x`, `mask` or `residual` that is no array, or of a dtype that does
                not fit.
        """
        x = as_array("x", x, jnp.number)
        self._check_features(x)
        use_running_average = self._uses_running_average(use_running_average)
        mean, var, scale, bias = (
            None if v is None else v[...] for v in (self.mean, self.var, self.scale, self.bias)
        )
        if self.promote_dtype is not dtypes.promote_dtype:
            x, mean, var, scale, bias = self.promote_dtype(
                (x, mean, var, scale, bias), dtype=self.dtype
            )
        common: dict[str, Any] = dict(
            dtype=self.dtype, axis=self.axis, epsilon=self.epsilon,
            activation=self.activation, residual=residual,
        )  # fmt: skip
        if use_running_average:
            assert mean is not None and var is not None
            return normalize_with(x, mean, var, scale, bias, **common)
        y, batch = normalize_batch(
            x, scale, bias, mask=mask, axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups, stats=self.stats, **common,
        )  # fmt: skip
        self._update_running_stats(batch)
        return y

    # Private, since `nnx.tabulate` runs all public methods under jit, and these would not.

    def _uses_running_average(self, use_running_average: bool | None = None) -> bool:
        """Whether a call would use the running statistics: the argument, else the attribute."""
        if not self.track_running_stats:
            return False
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "`use_running_average` is None in this BatchNorm and in its call; give it to the "
                "constructor or the call, or say model.train(), model.eval() or nnx.view(...)."
            )
        return as_flag("use_running_average", use_running_average)

    def _update_running_stats(self, batch: BatchStats) -> None:
        """Moves the running statistics towards these of a batch."""
        if not self.track_running_stats:
            return
        variables = (self.mean, self.var, self.num_batches)
        new = updated_running_stats(
            self.mean[...], self.var[...],
            None if self.num_batches is None else self.num_batches[...], batch,
            momentum=self.momentum, unbiased=self.unbiased_running_var,
        )  # fmt: skip
        for variable, value in zip(variables, new, strict=True):
            if variable is not None:
                variable.set_value(value)

    def _check_features(self, x: jax.Array) -> None:
        shape = tuple(x.shape[a] for a in feature_axes(x.ndim, self.axis))
        if math.prod(shape) != self.num_features:
            raise ValueError(
                f"`num_features` (={self.num_features}) does not match an input of shape "
                f"{x.shape}, whose feature axes {self.axis} have the size {shape}."
            )
