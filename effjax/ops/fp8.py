"""A linear layer whose matrix products take 8-bit floating-point numbers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._common.arguments import as_array
from ._common.derivatives import forbid_forward_mode, forbid_higher_order
from ._common.sharding import match_varying, with_auto_axes_over_batch

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MAX_FACTOR = 2.0**100  # so that the inverse of two is a normal number of float32
SECOND_ORDER = "fp8_linear supports only first derivatives in reverse mode, as in jax.grad."


def fp8_linear(x: jax.Array, kernel: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Compute ``x @ kernel`` and its gradients by products of 8-bit floating-point numbers.

    x and the kernel are rounded to e4m3 (4 bits of exponent, 3 of mantissa), and the gradient of
    the result to e5m2. The three products are those of the rounded numbers, summed in float32. Each
    array is multiplied before by a power of two, such that its largest finite magnitude is in the
    upper half of the format's range. So the rounding of a number does not depend on the others,
    unless it is smaller than the largest one by a factor of about 2^14 (e4m3) or 2^29 (e5m2).

    NVIDIA GPUs from compute capability 8.9 (Ada, Hopper) compute such products at twice the rate of
    bfloat16. Elsewhere XLA converts the rounded numbers to 16 or 32 bits before the products, which
    gives the same values and saves no time.

    Args:
        x: [..., D]: bfloat16, float16 or float32.
        kernel: [D, V], one of these dtypes.
        transposed: whether the kernel is [V, D], as the weight of a linear layer of PyTorch.

    Returns:
        [..., V], of the dtype of x.

    Raises:
        TypeError: for arguments that are not arrays, or of another dtype.
        ValueError: for mismatched shapes.

    Kept for the backward pass: x and the kernel, which it rounds again. A result that uses NaN or
    infinity is NaN. Under vmap and shard_map, each example and each device has its own power of
    two. Reverse mode only, and no second derivatives (NotImplementedError).

    References:
        Micikevicius et al., 2022 (arXiv:2209.05433), FP8 formats for deep learning.
    """
    x, kernel = (
        as_array(name, a, jnp.bfloat16, jnp.float16, jnp.float32)
        for name, a in (("x", x), ("kernel", kernel))
    )
    axes, axis = ("[V, D]", 1) if transposed else ("[D, V]", 0)
    if kernel.ndim != 2 or x.shape[-1:] != (kernel.shape[axis],):
        raise ValueError(
            f"`x` of shape {x.shape} must be [..., D] for the `kernel` {axes} of {kernel.shape}."
        )

    def run(x, kernel):
        arrays = forbid_forward_mode("fp8_linear", match_varying((x, kernel)))
        return _fp8_linear(transposed, *arrays), ()

    return with_auto_axes_over_batch(run, x)(x, kernel)[0]


# y = x W    dx = dy W^T    dW = x^T dy
# cuBLASLt's 8-bit products on Ada and Hopper sum over the last axes of both operands. All three get
# them so: the kernel that rounds an array also transposes it, where XLA would add a kernel that
# reads and writes the 8-bit numbers once more.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_linear(transposed: bool, x: jax.Array, kernel: jax.Array) -> Any:
    return _forward(transposed, x, kernel)[0]


def _forward(transposed: bool, x: jax.Array, kernel: jax.Array) -> Any:
    def run(x, kernel):
        matrix = _round(kernel, E4M3)
        return _multiply(_round(x, E4M3), matrix if transposed else matrix.turned(), 1, x.dtype)

    return forbid_higher_order(run, SECOND_ORDER)(x, kernel), (x, kernel)


def _backward(transposed: bool, residuals: Any, dy: jax.Array) -> Any:
    def run(x, kernel, dy):
        dy, matrix = _round(dy, E5M2), _round(kernel, E4M3)
        dx = _multiply(dy, matrix.turned() if transposed else matrix, 1, x.dtype)
        left, right = _round(x, E4M3).turned(), dy.turned()
        if transposed:
            left, right = right, left
        return dx, _multiply(left, right, x.ndim - 1, kernel.dtype)

    return forbid_higher_order(run, SECOND_ORDER)(*residuals, dy)


_fp8_linear.defvjp(_forward, _backward)


class _Rounded(NamedTuple):
    """8-bit numbers, and the factor by which they are too large."""

    values: jax.Array
    factor: jax.Array  # float32, a power of two

    def turned(self) -> "_Rounded":
        """Return the array with its last axis first."""
        return self._replace(values=jnp.moveaxis(self.values, -1, 0))


def _round(x: jax.Array, dtype: Any) -> _Rounded:
    is_finite = jnp.isfinite(x)
    most = jnp.max(jnp.abs(x), where=is_finite, initial=0).astype(jnp.float32)
    # Zeroing the mantissa rounds down to a power of two.
    ratio = jnp.minimum(float(jnp.finfo(dtype).max) / most, MAX_FACTOR)
    bits = lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    factor = jnp.where(most > 0, lax.bitcast_convert_type(bits, jnp.float32), 1)
    # GPUs round infinity to the largest number of e4m3. Selected here, and not before, so that XLA
    # does not simplify the conversion to 8 bits and back, which rounds.
    values = (x.astype(jnp.float32) * factor).astype(dtype)
    return _Rounded(jnp.where(is_finite, values, jnp.asarray(jnp.nan, dtype)), factor)


def _multiply(a: _Rounded, b: _Rounded, count: int, dtype: Any) -> jax.Array:
    """Contract the last `count` axes of two arrays."""
    left, right = (tuple(range(m.values.ndim - count, m.values.ndim)) for m in (a, b))
    # Float16 would overflow before the division. In bfloat16, powers of two are exact.
    wide = dtype if dtype == jnp.bfloat16 else jnp.float32
    # By default, Hopper's tensor cores sum with fewer bits than float32 (openxla/xla#6599).
    y = lax.dot_general(
        a.values, b.values, ((left, right), ((), ())),
        precision=lax.Precision.HIGHEST, preferred_element_type=wide,
    )  # fmt: skip
    # One scale, which becomes an argument of cuBLASLt. Two would be another kernel.
    return (y * (1 / a.factor * (1 / b.factor)).astype(wide)).astype(dtype)
