"""Synchronized batch norm for Flax linen."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from ..layers.batch_norm import (
    Activation,
    Stats,
    check_momentum,
    check_num_features,
    feature_axes,
    normalize_batch,
    normalize_inference,
    update_running_stats,
)
from ..ops._common.arguments import as_array, with_torch_hints
from ..ops.batch_norm.sync import BatchStats


@with_torch_hints
class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` with synchronized statistics and a memory-efficient backward pass.

    This is a drop-in replacement: it has all of Flax's fields, in order and with their defaults,
    and the same variables (`params`: scale, bias; `batch_stats`: mean, var), so checkpoints load
    both ways. It computes what `effjax.nnx.BatchNorm` does, which documents its differences from
    Flax, the further options, and what is kept for the backward pass. Here

    - `momentum=None` adds `batch_stats/num_batches`.
    - `force_float32_reductions=False` only changes the dtype of the running statistics to
      `param_dtype`, as in Flax. Computation is always in float32 or wider.

    Training is for reverse mode only.
    """

    axis: int | Sequence[int] = -1  # type: ignore[assignment]
    momentum: float | None = 0.99  # type: ignore[assignment]
    unbiased_running_var: bool = False
    track_running_stats: bool = True
    activation: Activation | None = None
    stats: Stats = "auto"

    def __post_init__(self):
        check_momentum(self.momentum)
        super().__post_init__()

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalize x.

        During initialization the running statistics do not change, and `axis_name` need not be
        mapped.

        Args:
            x: floating point or complex; integers are promoted. Features are at `axis`.
            use_running_average: if True, use the running statistics. Pass it here or in the field.
            mask: boolean, broadcastable to x: the values to include in the statistics.
            residual: of the shape of x; added before the activation.

        Returns:
            The normalized input, of the shape of x and of dtype `dtype` (see the class).

        Raises:
            ValueError: for mismatched shapes, or an `axis_name` that is not mapped where statistics
                are taken.
            TypeError: for an `x`, `mask` or `residual` that is not an array or has an unsupported
                dtype.
        """
        x = as_array("x", x, jnp.number)
        if self.track_running_stats:
            use_running_average = nn.merge_param(
                "use_running_average", self.use_running_average, use_running_average
            )
        else:
            use_running_average = False
        mean = self.get_variable("batch_stats", "mean")
        check_num_features(x, self.axis, *self.parameters(), mean)
        shape = tuple(x.shape[a] for a in feature_axes(x.ndim, self.axis))
        scale, bias = self._create(shape)
        initializing = self.is_initializing()
        if use_running_average:
            mean, var = (self.get_variable("batch_stats", name) for name in ("mean", "var"))
            return normalize_inference(
                x, mean, var, scale, bias, dtype=self.dtype, axis=self.axis,
                epsilon=self.epsilon, activation=self.activation, residual=residual,
            )  # fmt: skip
        y, batch = normalize_batch(
            x, scale, bias, dtype=self.dtype, axis=self.axis, epsilon=self.epsilon,
            activation=self.activation, residual=residual, mask=mask, stats=self.stats,
            axis_name=None if initializing else self.axis_name,
            axis_index_groups=None if initializing else self.axis_index_groups,
        )  # fmt: skip
        self.update_running_stats(batch)
        return y

    # nn.nowrap keeps these methods out of the rows of `tabulate`.

    @nn.nowrap
    def _create(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Create all variables; return scale and bias, or None where unused."""
        if self.track_running_stats:
            dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
            self.variable("batch_stats", "mean", jnp.zeros, shape, dtype)
            self.variable("batch_stats", "var", jnp.ones, shape, dtype)
            if self.momentum is None:
                self.variable("batch_stats", "num_batches", jnp.zeros, shape, jnp.float32)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        return scale, bias

    @nn.nowrap
    def parameters(self) -> tuple[Any, Any]:
        """Return scale and bias after initialization, or None where unused."""
        scale, bias = (self.get_variable("params", name) for name in ("scale", "bias"))
        return nn.meta.unbox((scale, bias))

    @nn.nowrap
    def update_running_stats(self, batch: BatchStats) -> None:
        """Update the running statistics, except during initialization."""
        if not self.track_running_stats or self.is_initializing():
            return
        names = ("mean", "var", "num_batches")
        mean, var, num_batches = (self.get_variable("batch_stats", name) for name in names)
        if mean is None:  # `apply` was called without batch_stats: create them, as Flax does
            mean, var = jnp.zeros_like(batch.mean), jnp.ones_like(batch.var)
            num_batches = jnp.zeros_like(batch.mean) if self.momentum is None else None
        new = update_running_stats(
            mean, var, num_batches, batch,
            momentum=self.momentum, unbiased=self.unbiased_running_var,
        )  # fmt: skip
        for name, value in zip(names, new, strict=True):
            if value is not None:
                self.put_variable("batch_stats", name, value)
