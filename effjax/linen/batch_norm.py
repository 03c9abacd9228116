"""Batch normalization over devices for Flax linen."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from ..layers.batch_norm import (
    Activation,
    Stats,
    check_options,
    feature_axes,
    normalize_batch,
    normalize_with,
    updated_running_stats,
)
from ..ops._common.arguments import as_array, as_flag
from ..ops.batch_norm.sync import BatchStats


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` with the statistics, the backward pass and the memory of effjax.

    `y = activation((x − μ)/sqrt(σ² + ε)·scale + bias + residual)`, with μ and σ² of the batch
    (`use_running_average=False`) or the running ones. Statistics are those of `axis_name`, with one
    all-reduce each way, weighted by the counts of an optional mask. See `effjax.sync_batch_norm`.

    A drop-in replacement: all of Flax's fields, in order and with their defaults, and the same
    variables (`params`: scale, bias; `batch_stats`: mean, var), so that checkpoints load both ways.
    Different from Flax:

    - `use_fast_variance` is accepted and ignored: the variance is always the numerically stable
      one.
    - `force_float32_reductions=False` only gives the running statistics the dtype `param_dtype`, as
      in Flax; the computation is float32 or wider in any case.
    - `dtype=None` keeps float16 and bfloat16 inputs in their dtype (Flax promotes them to float32).
    - No gradient flows through the running statistics: there is a `stop_gradient` before each
      update.
    - `epsilon` must be positive in training.
    - A single example without a batch axis needs `axis_name` in training.
    - A batch (or a channel) without a single value leaves the running statistics as they are.
    - `residual` and `activation` are fused into the normalization.

    Further fields:
        momentum: may be None: the running statistics are then the mean over all batches so far.
            This adds `batch_stats/num_batches` (one float32 a channel); no other value of
            `momentum` does.
        unbiased_running_var: the running variance is that of PyTorch, σ²·n/(n − 1).
        track_running_stats: if False, there are no running statistics and the batch's own are used
            in evaluation too; `use_running_average` has no effect.
        activation: None or "relu".
        stats: how the statistics are merged over devices, see `effjax.sync_batch_norm`.

    Complex inputs work as in Flax, without `activation` (TypeError).

    Kept for the backward pass: the input, in its own dtype or in `dtype` where that is wider, and
    statistics of the size of a channel (with `residual` and `activation` the result as well).
    Training is for reverse mode only.
    """

    axis: int | Sequence[int] = -1  # type: ignore[assignment]
    momentum: float | None = 0.99  # type: ignore[assignment]
    unbiased_running_var: bool = False
    track_running_stats: bool = True
    activation: Activation | None = None
    stats: Stats = "auto"

    def __post_init__(self):
        # Of this class, and not of one derived from it.
        names = {field.name for field in dataclasses.fields(BatchNorm)} - {"parent", "name"}
        check_options(**{name: getattr(self, name) for name in names})
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
        """Normalizes `x`.

        Args:
            x: the input, floating point or complex (integers are promoted); features at `axis`.
            use_running_average: whether to use the running statistics; here or in the field.
            mask: bool, broadcastable to `x`; where it is False, x does not count in the statistics.
            residual: the shape of `x`; added before the activation.

        Returns:
            The normalized input, of x's shape and of dtype `dtype` (see the class).

        Raises:
            TypeError, ValueError: for an argument that does not fit, or an `axis_name` that is not
                mapped where statistics are taken.

        During initialization the running statistics do not change and `axis_name` need not exist.
        """
        x = as_array("x", x, jnp.number)
        if use_running_average is not None:
            as_flag("use_running_average", use_running_average)
        if self.track_running_stats:
            use_running_average = nn.merge_param(
                "use_running_average", self.use_running_average, use_running_average
            )
        else:
            use_running_average = False
        shape = tuple(x.shape[a] for a in feature_axes(x.ndim, self.axis))
        scale, bias = self._create(shape)
        initializing = self.is_initializing()
        mean, var = (self.get_variable("batch_stats", name) for name in ("mean", "var"))
        if initializing and len(shape) == x.ndim:  # a single example has no statistics of its own
            use_running_average, mean, var = True, jnp.zeros(shape), jnp.ones(shape)
        if use_running_average:
            return normalize_with(
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

    # What is not wrapped by Flax is no row of `tabulate`.

    @nn.nowrap
    def _create(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Creates all variables; returns scale and bias, None where unused."""
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
        """Scale and bias after initialization, None where unused."""
        scale, bias = (self.get_variable("params", name) for name in ("scale", "bias"))
        return nn.meta.unbox((scale, bias))

    @nn.nowrap
    def update_running_stats(self, batch: BatchStats) -> None:
        """Moves the running statistics towards these of a batch; nothing during initialization."""
        if not self.track_running_stats or self.is_initializing():
            return
        names = ("mean", "var", "num_batches")
        mean, var, num_batches = (self.get_variable("batch_stats", name) for name in names)
        if mean is None:  # `apply` was given none: they begin here, as in Flax
            mean, var = jnp.zeros_like(batch.mean), jnp.ones_like(batch.var)
            num_batches = jnp.zeros_like(batch.mean) if self.momentum is None else None
        new = updated_running_stats(
            mean, var, num_batches, batch,
            momentum=self.momentum, unbiased=self.unbiased_running_var,
        )  # fmt: skip
        for name, value in zip(names, new, strict=True):
            if value is not None:
                self.put_variable("batch_stats", name, value)
