"""Synchronized batch norm for Flax NNX."""

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
    check_momentum,
    check_num_features,
    hashable_axes,
    normalize_batch,
    normalize_inference,
    update_running_stats,
)
from ..ops._common.arguments import as_array, with_torch_hints
from ..ops.batch_norm.statistics import as_index_groups
from ..ops.batch_norm.sync import BatchStats


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with synchronized statistics and a memory-efficient backward pass.

    `y = activation((x − μ)/sqrt(σ² + ε)·scale + bias + residual)`, with μ and σ² of the batch
    (`use_running_average=False`) or the running ones. Statistics are taken over all devices of
    `axis_name`, and optionally under a mask, with one all-reduce per pass, or two small ones in the
    forward pass of large layers. See `effjax.sync_batch_norm`.

    This is a drop-in replacement: it has all of Flax's arguments with their defaults and the same
    variables (Params scale and bias, BatchStats mean and var), so checkpoints load both ways.
    `train()`, `eval()`, `set_attributes` and `nnx.view` work as in Flax. Differences from Flax:

    - `use_fast_variance` is ignored; the variance is always the numerically stable one.
    - Computation is in float32 or wider. With `dtype=None`, float16 and bfloat16 inputs keep their
      dtype; Flax promotes them to float32. A custom `promote_dtype` is called first on
      (x, mean, var, scale, bias), as in Flax.
    - A batch or channel without a single counted value leaves the running statistics unchanged.
    - No gradient flows through the running statistics.
    - `epsilon` must be positive in training.
    - `residual` and `activation` are fused into the normalization.
    - `axis` may be a tuple; `num_features` is then the product of the sizes of these axes.

    Args:
        momentum: weight of the old running statistics. None means the mean over all batches, which
            adds a BatchStat `num_batches` (one float32 per channel).
        unbiased_running_var: if True, the running variance is σ²·n/(n − 1), as in PyTorch.
        track_running_stats: if False, there are no running statistics, and evaluation uses those of
            the batch; `use_running_average` has no effect.
        activation: None or "relu".
        stats: how statistics are merged over devices, see `effjax.sync_batch_norm`.

    Complex inputs work as in Flax's linen module, without `activation` (TypeError).

    Kept for the backward pass: the input, in its own dtype or `dtype` if that is wider, and
    a few numbers per channel. With `residual` and `activation`, the result is kept too.
    Training is for reverse mode only.
    """

    mean: Any  # BatchStat, or None without running statistics
    var: Any
    scale: Any  # Param, or None if unused
    bias: Any
    momentum: float | None
    # Defaults for a Flax layer that `convert_batch_norm` has converted:
    num_batches: Any = None
    unbiased_running_var: bool = False
    track_running_stats: bool = True
    activation: Activation | None = None
    stats: Stats = "auto"

    @with_torch_hints
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
        check_momentum(momentum)
        super().__init__(
            num_features, use_running_average=use_running_average,
            axis=tuple(axis) if isinstance(axis, list) else axis,  # type: ignore[arg-type]
            momentum=momentum,  # type: ignore[arg-type]
            epsilon=epsilon, dtype=dtype, param_dtype=param_dtype,
            use_bias=use_bias, use_scale=use_scale, bias_init=bias_init, scale_init=scale_init,
            axis_name=hashable_axes(axis_name),
            axis_index_groups=as_index_groups(axis_index_groups),
            use_fast_variance=use_fast_variance, promote_dtype=promote_dtype, rngs=rngs,
            bias_metadata=bias_metadata, scale_metadata=scale_metadata,
        )  # fmt: skip
        self.num_batches = nnx.data(None)
        if not track_running_stats:
            self.mean = self.var = nnx.data(None)
        elif momentum is None:
            self.num_batches = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.unbiased_running_var = unbiased_running_var
        self.track_running_stats = track_running_stats
        self.activation = activation
        self.stats = stats

    def __call__(  # type: ignore[override]
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalize x.

        Args:
            x: floating point or complex; integers are promoted. Features are at `axis`.
            use_running_average: overrides the attribute of the same name.
            mask: boolean, broadcastable to x: the values to include in the statistics.
            residual: of the shape of x; added before the activation.

        Returns:
            The normalized input, of the shape of x and of dtype `dtype` (see the class).

        Raises:
            ValueError: if `use_running_average` is None here and in the module, if x does not have
                `num_features` features, or `axis_name` is not mapped where statistics are taken.
            TypeError: for an `x`, `mask` or `residual` that is not an array or has an unsupported
                dtype.
        """
        x = as_array("x", x, jnp.number)
        use_running_average = self._uses_running_average(use_running_average)
        mean, var, scale, bias = (
            None if v is None else v[...] for v in (self.mean, self.var, self.scale, self.bias)
        )
        check_num_features(x, self.axis, mean, scale, bias)
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
            return normalize_inference(x, mean, var, scale, bias, **common)
        y, batch = normalize_batch(
            x, scale, bias, mask=mask, axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups, stats=self.stats, **common,
        )  # fmt: skip
        self._update_running_stats(batch)
        return y

    # Private, because `nnx.tabulate` runs all public methods under jit, where these fail.

    def _uses_running_average(self, use_running_average: bool | None = None) -> bool:
        """Return True if a call with this argument uses the running statistics."""
        if not self.track_running_stats:
            return False
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "`use_running_average` is None in this BatchNorm and in its call. Pass it to the "
                "constructor or the call, or use model.train(), model.eval() or nnx.view(...)."
            )
        return use_running_average

    def _update_running_stats(self, batch: BatchStats) -> None:
        if not self.track_running_stats:
            return
        variables = (self.mean, self.var, self.num_batches)
        new = update_running_stats(
            self.mean[...], self.var[...],
            None if self.num_batches is None else self.num_batches[...], batch,
            momentum=self.momentum, unbiased=self.unbiased_running_var,
        )  # fmt: skip
        for variable, value in zip(variables, new, strict=True):
            if variable is not None:
                variable.set_value(value)
