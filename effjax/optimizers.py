"""optax transformations for low-precision parameters and optimizer state.

They work alone, in ``optax.chain``, ``masked``, ``inject_hyperparams`` and ``MultiSteps``, and with
`effjax.offload_train_step` and `effjax.stream_update`, because they treat each parameter
separately.
"""

import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

__all__ = [
    "adamw_8bit",
    "get_hyperparams",
    "in_24_bits",
    "in_float32",
    "scale_by_adam_8bit",
    "set_hyperparams",
    "split_matrices",
    "stochastic_rounding",
    "with_matmul_precision",
]

_MIN_AXIS = 16  # float32 scales of a shorter last axis would take more than they save

_INT8_STEPS, _UINT8_STEPS = 127, 255


class ScaleByAdam8bitState(NamedTuple):
    """State of `scale_by_adam_8bit`. All but `count` have the structure of the parameters."""

    count: jax.Array
    mu: Any  # int8 codes of the parameter's shape; of a small parameter, float32 moments
    nu: Any  # uint8 codes; as `mu`
    mu_scale: Any  # float32 [..., blocks of the last axis]; None for small parameters
    nu_scale: Any


class In24BitsState(NamedTuple):
    """State of `in_24_bits`."""

    # int8 [...] of each bfloat16 parameter, in units of 2⁻⁸ of the spacing of bfloat16 numbers;
    # None for parameters of other dtypes.
    correction: Any
    inner: Any


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: jax.Array
    key: jax.Array  # the same in every step


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    block_size: int = 256,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Make AdamW with moments in 8 bits.

    Computes ``optax.adamw`` in float32 from the moments of `scale_by_adam_8bit`. The updates are
    float32 for every dtype of the parameters. ``optax.apply_updates`` adds them in float32 and
    rounds the sum once. Under ``jax_numpy_dtype_promotion="strict"`` cast them first.

    Memory: 2 + 8 / block_size bytes per parameter, 2.03 by default, instead of 8.

    In ``optax.inject_hyperparams`` pass ``static_args=("block_size", "min_size")``.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the square root of the second moment.
        eps_root: added to the second moment inside of the square root.
        weight_decay: strength of the decoupled weight decay, multiplied by the learning rate.
        mask: a pytree of bools, or a function of the parameters that returns one. True applies
            weight decay. By default all parameters are decayed.
        block_size: number of values that share a scale.
        min_size: parameters with fewer values keep float32 moments.

    Returns:
        The transformation.

    Raises:
        ValueError: if `block_size` is not an int above 0, or `min_size` is not an int.
    """
    return in_float32(
        optax.chain(
            scale_by_adam_8bit(b1, b2, eps, eps_root, block_size=block_size, min_size=min_size),
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    block_size: int = 256,
    min_size: int = 4096,
) -> optax.GradientTransformation:
    """Rescale updates by Adam with moments in 8 bits.

    Each block of the last axis has two float32 scales, ``a = max |m|`` and ``s = max sqrt(v)``. The
    codes are linear in the square root, so that they are dense near zero::

        m       = a · sign(c) · (c / 127)²     c in -127 … 127, int8
        sqrt(v) = s · (c / 255)²               c in 0 … 255, uint8

    With n = 127 or 255, the error of a value x is at most ``(2 sqrt(x / scale) + 1 / 2n) / 2n``
    times the scale. A second moment above zero never becomes zero: it is rounded up to code 1. An
    update is computed in float32 from the new moments before they are rounded.

    Blocks are parts of the last axis; the last one may be shorter. The codes have the parameter's
    shape, and can be sharded like it. Under explicit sharding, `block_size` must divide the part of
    the last axis on each device.

    The moments of parameters with fewer than `min_size` values, or with a last axis shorter than
    16, are float32 and unrounded, as in ``optax.scale_by_adam``.

    A finite gradient of any size makes a finite update, where the square of one above 1.8e19 stops
    ``optax.adam`` from updating its parameter ever again; the moments of small parameters are
    optax's. A gradient that is NaN or infinite makes the scale of its block NaN or infinite. All
    updates of this block are NaN from the next step on, so that the damage shows in the loss; other
    blocks are unaffected. To skip such steps use ``optax.apply_if_finite`` or the argument
    `skip_nonfinite` of `offload_train_step`.

    Memory: 2 + 8 / block_size bytes per parameter, if block_size divides the last axis.

    References:
        T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022
        (arXiv:2110.02861), with another code.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the square root of the second moment.
        eps_root: added to the second moment inside of the square root.
        block_size: number of values that share a scale.
        min_size: parameters with fewer values keep float32 moments.

    Returns:
        The transformation. Its updates are float32. Its state is a NamedTuple of `count`, the codes
        `mu` and `nu` of the parameters' shapes, and their scales, `mu_scale` and `nu_scale`.

    Raises:
        ValueError: if `block_size` is not an int above 0, or `min_size` is not an int.
        TypeError: from `init`, if a parameter is not a real floating-point array.
    """
    _check_sizes(block_size, min_size)

    def is_quantized(p: jax.Array) -> bool:
        return p.ndim > 0 and p.size >= max(min_size, 1) and p.shape[-1] >= _MIN_AXIS

    def init(params: optax.Params) -> ScaleByAdam8bitState:
        _check_floating(params)

        def codes(p: jax.Array, dtype: Any) -> jax.Array:
            return jnp.zeros_like(p, dtype=dtype if is_quantized(p) else jnp.float32)

        def scale(p: jax.Array) -> jax.Array | None:
            if not is_quantized(p):
                return None
            # Made from the codes, so that its type has the sharding that `update` returns.
            return _block_max(codes(p, jnp.int8), block_size).astype(jnp.float32)

        return ScaleByAdam8bitState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: codes(p, jnp.int8), params),
            nu=jax.tree.map(lambda p: codes(p, jnp.uint8), params),
            mu_scale=jax.tree.map(scale, params),
            nu_scale=jax.tree.map(scale, params),
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdam8bitState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        t = count.astype(jnp.float32)
        mu_correction, root_correction = 1 - b1**t, jnp.sqrt(1 - b2**t)

        # Squares of gradients above 1.8e19 are infinite in float32. Those of encoded moments are
        # never computed: the roots r of the second moments are averaged as they are stored.
        def new_moments(g: jax.Array, m: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
            return b1 * m + (1 - b1) * g, _root_of_sum(b2, r, 1 - b2, g)

        def step(m: jax.Array, r: jax.Array) -> jax.Array:
            # m / mu_correction could be infinite; both corrections together are at most the root's.
            m = m * (root_correction / mu_correction)
            if not (isinstance(eps_root, numbers.Real) and eps_root == 0):
                r = _root_of_sum(1.0, r, 1.0, root_correction * jnp.sqrt(eps_root))
            return m / (r + eps * root_correction)

        def update_leaf(g: jax.Array, *moments: Any) -> tuple:
            g = g.astype(jnp.float32)
            if moments[-1] is None:
                m = b1 * moments[0] + (1 - b1) * g
                v = b2 * moments[1] + (1 - b2) * jnp.square(g)
                return step(m, jnp.sqrt(v)), m, v, None, None
            (m, r), encoded = _update_encoded(new_moments, g, moments, block_size)
            return step(m, r), *encoded

        leaves, structure = jax.tree.flatten(updates)
        trees = [structure.flatten_up_to(tree) for tree in state[1:]]
        results = [update_leaf(*of_leaf) for of_leaf in zip(leaves, *trees, strict=True)]
        columns = zip(*results, strict=True) if results else [()] * 5
        new_updates, *new_state = (structure.unflatten(column) for column in columns)
        return new_updates, ScaleByAdam8bitState(count, *new_state)

    return optax.GradientTransformation(init, update)


def _check_sizes(block_size: Any, min_size: Any) -> None:
    for name, value in ("block_size", block_size), ("min_size", min_size):
        if not isinstance(value, numbers.Integral):
            raise ValueError(
                f"`{name}` must be an int, not {type(value).__name__}. In optax.inject_hyperparams "
                'pass static_args=("block_size", "min_size").'
            )
    if block_size < 1:
        raise ValueError(f"`block_size` (={block_size}) must be above 0.")


def _check_floating(params: Any) -> None:
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(p.dtype, jnp.floating):
            name = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"{name} must be a real floating-point array, not {p.dtype}. Exclude it with "
                "optax.masked."
            )


def _update_encoded(
    new_moments: Callable, g: jax.Array, encoded: tuple, block_size: int
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """Return the first moments and the roots of the second ones, in float32, and both encoded.

    `encoded` is (mu, nu, mu_scale, nu_scale), before and after the step.
    """

    def compute(g, mu, nu, mu_scale, nu_scale):
        m = _decode_signed(mu, _per_value(mu_scale, mu, block_size))
        return new_moments(g, m, _decode_unsigned(nu, _per_value(nu_scale, nu, block_size)))

    m, r = compute(g, *encoded)
    scales = _block_max(jnp.abs(m), block_size), _block_max(r, block_size)
    # Compute the moments again once the scales are known, instead of storing them in float32
    # between the two passes. The barrier keeps XLA from merging the two computations.
    g, encoded, scales = lax.optimization_barrier((g, encoded, scales))
    m, r = compute(g, *encoded)
    mu = _encode_signed(m, _per_value(scales[0], m, block_size))
    nu = _encode_unsigned(r, _per_value(scales[1], r, block_size))
    return (m, r), (mu, nu, *scales)


def _root_of_sum(a: Any, x: jax.Array, b: Any, y: jax.Array) -> jax.Array:
    """Return sqrt(a x² + b y²) for x ≥ 0, without overflow or underflow of the squares."""
    largest = jnp.maximum(x, jnp.abs(y))
    largest = jnp.where(largest == 0, 1.0, largest)
    return largest * jnp.sqrt(a * jnp.square(x / largest) + b * jnp.square(y / largest))


def _per_value(scale: jax.Array, x: jax.Array, block_size: int) -> jax.Array:
    """Repeat the scales of the blocks, [..., blocks], to the shape of x, [..., n]."""
    n = x.shape[-1]
    width = min(block_size, n)
    repeated = jnp.broadcast_to(scale[..., None], (*scale.shape, width))
    repeated = repeated.reshape(*scale.shape[:-1], -1)
    return repeated if repeated.shape[-1] == n else repeated[..., :n]


def _block_max(x: jax.Array, block_size: int) -> jax.Array:
    """Return the maximum of each block, [..., blocks], of values above or equal to zero, [..., n].

    It is NaN where a value is.
    """
    n = x.shape[-1]
    width = min(block_size, n)
    blocks = -(-n // width)
    if padding := blocks * width - n:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(*x.shape[:-1], blocks, width).max(-1)


def _relative(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / scale, or zero where the scale is zero."""
    return x / jnp.where(scale == 0, 1.0, scale)


def _encode_signed(x: jax.Array, scale: jax.Array) -> jax.Array:
    root = jnp.sqrt(jnp.abs(_relative(x, scale)))
    code = jnp.clip(jnp.round(_INT8_STEPS * root), 0, _INT8_STEPS)
    return jnp.where(x < 0, -code, code).astype(jnp.int8)


def _decode_signed(code: jax.Array, scale: jax.Array) -> jax.Array:
    root = code.astype(jnp.float32) / _INT8_STEPS
    return scale * (root * jnp.abs(root))


def _encode_unsigned(x: jax.Array, scale: jax.Array) -> jax.Array:
    code = jnp.round(_UINT8_STEPS * jnp.sqrt(_relative(x, scale)))
    # Zero would make the next step as large as m / eps.
    smallest = jnp.where(x > 0, 1.0, 0.0)
    return jnp.clip(code, smallest, _UINT8_STEPS).astype(jnp.uint8)


def _decode_unsigned(code: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * jnp.square(code.astype(jnp.float32) / _UINT8_STEPS)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run a transformation on parameters and gradients cast to float32.

    Its state is float32 for bfloat16 and float16 parameters, both moments of Adam included
    (``optax.adamw(mu_dtype=jnp.float32)`` leaves the second one in bfloat16). Other dtypes are
    unchanged. The updates are float32: ``optax.apply_updates`` adds them in float32 and rounds the
    sum once. Under ``jax_numpy_dtype_promotion="strict"`` cast them first.

    Memory: what `inner` takes for float32 parameters; 8 bytes per parameter for Adam.

    Args:
        inner: any optax transformation.

    Returns:
        The transformation, with the state of `inner`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(_widen(params))

    def update(updates, state, params=None, **extra_args):
        return inner.update(_widen(updates), state, _widen(params), **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def with_matmul_precision(
    inner: optax.GradientTransformation, precision: Any
) -> optax.GradientTransformationExtraArgs:
    """Compute the matrix products of a transformation with a precision.

    ``optax.contrib.muon`` multiplies in the dtype of its momentum. The published Muon multiplies in
    bfloat16, which is faster on GPUs. This has operands in bfloat16, and sums in float32::

        with_matmul_precision(optax.contrib.muon(1e-3), "BF16_BF16_F32")

    The rest of the computation and the state are unchanged. Backends may be more precise: XLA
    multiplies float32 operands in float32 on CPUs.

    Args:
        inner: any optax transformation.
        precision: as in ``jax.default_matmul_precision``, such as "highest" or the name of a
            ``jax.lax.DotAlgorithmPreset``.

    Returns:
        The transformation, with the state of `inner`.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        with jax.default_matmul_precision(precision):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def split_matrices(
    inner: optax.GradientTransformation, sizes: Mapping[str, Sequence[int]], axis: int = -1
) -> optax.GradientTransformationExtraArgs:
    """Pass each matrix of an array that has several to a transformation by itself.

    Of queries, keys and values in one array, ``optax.contrib.muon`` orthogonalizes the three
    together. This orthogonalizes each of them::

        split_matrices(optax.contrib.muon(1e-3), {"attn.qkv.kernel": (1024, 256, 256)})

    The state has the whole arrays, as without this.

    Args:
        inner: any optax transformation.
        sizes: the sizes of the matrices along `axis`, by the end of the parameter's path as
            ``jax.tree_util.keystr(path, simple=True, separator=".")`` writes it.
        axis: the axis that is split.

    Returns:
        The transformation, with the state of `inner`.

    Raises:
        ValueError: in `update`, if the sizes of a parameter do not add up to its axis.
    """
    inner = optax.with_extra_args_support(inner)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def split_leaf(path: Any, a: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        end = next((end for end in sizes if f".{name}".endswith(f".{end}")), None)
        if end is None:
            return a
        if is_leaf(a):
            return tuple(a for _ in sizes[end])
        *ends, last = itertools.accumulate(sizes[end])
        if last != a.shape[axis]:
            raise ValueError(
                f"`sizes` of {end} (={tuple(sizes[end])}) must add up to axis {axis} of {a.shape}."
            )
        return tuple(jnp.split(a, ends, axis))

    def split(tree: Any) -> Any:
        return jax.tree.map_with_path(split_leaf, tree, is_leaf=is_leaf)

    def join(like: Any, tree: Any) -> Any:
        def join_leaf(a: Any, parts: Any) -> Any:
            if is_leaf(a):
                return a
            return jnp.concatenate(parts, axis) if isinstance(parts, tuple) else parts

        return jax.tree.map(join_leaf, like, tree, is_leaf=is_leaf)

    def update(updates, state, params=None, **extra_args):
        arguments = map(split, (updates, state, params))
        new_updates, new_state = inner.update(*arguments, **extra_args)
        return join(updates, new_updates), join(state, new_state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def in_24_bits(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run a transformation on bfloat16 parameters with the 8 bits that they lack.

    The state has 8 more bits of each bfloat16 parameter p, its correction c. Together they are a
    number of 24 bits, a float32 without its last 8 bits::

        master = p + c · spacing(p) / 256        c in -128 … 127, int8

    `inner` gets the master copy and the gradients in float32. The sum of the master copy and the
    update is rounded to the nearest number of 24 bits, a relative error of at most 2⁻¹⁶ (a
    bfloat16 number has 2⁻⁸), and split. p is the nearest bfloat16 number of the sum. Updates below
    2⁻¹⁶ of a parameter can be lost; with `stochastic_rounding` they would be kept on average. ::

        in_24_bits(adamw_8bit(1e-3))

    The returned update leads to p exactly, with ``optax.apply_updates`` and with offload. Nothing
    may follow in a chain. Parameters that are changed elsewhere keep their correction. No finite
    sum becomes infinite: the largest bfloat16 number is kept. The correction of infinity and NaN
    is 0. Parameters and gradients of other dtypes are passed on unchanged. Under
    ``jax_numpy_dtype_promotion="strict"`` add the updates in float32 and cast the sum.

    Memory: 1 byte per parameter, and what `inner` takes for float32 parameters. With `adamw_8bit`,
    parameters and state take 5.03 bytes.

    References:
        FlashOptim, 2026 (arXiv:2602.23349), with another code.

    Args:
        inner: any optax transformation.

    Returns:
        The transformation. Its state is a NamedTuple of `correction`, int8 for each bfloat16
        parameter, and the state `inner`.

    Raises:
        ValueError: from `update`, if `params` is None.
        TypeError: from `init`, if a parameter is float16.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> In24BitsState:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if p.dtype == jnp.float16:
                name = f"params{jax.tree_util.keystr(path)}"
                raise TypeError(f"{name} must be bfloat16, not float16. Use in_float32.")
        correction = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype=jnp.int8) if _is_half(p) else None, params
        )
        return In24BitsState(correction, inner.init(_widen(params)))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("`params` must be passed to `update`, to be corrected.")
        old, structure = jax.tree.flatten(params)
        corrections = structure.flatten_up_to(state.correction)
        pairs = zip(old, corrections, strict=True)
        masters = [p if c is None else _join_24_bits(p, c) for p, c in pairs]
        updates, new_inner = inner.update(
            _widen(updates), state.inner, structure.unflatten(masters), **extra_args
        )
        new_updates = structure.flatten_up_to(updates)
        for i, (p, master, u) in enumerate(zip(old, masters, new_updates, strict=True)):
            if corrections[i] is not None:
                new, corrections[i] = _split_24_bits(master + u.astype(jnp.float32))
                new_updates[i] = new - p.astype(jnp.float32)
        new_state = In24BitsState(structure.unflatten(corrections), new_inner)
        return structure.unflatten(new_updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


_SIGN, _MAX_BFLOAT16 = 0x80000000, 0x7F7F


def _join_24_bits(p: jax.Array, correction: jax.Array) -> jax.Array:
    """Return the float32 number of a bfloat16 number and its correction."""
    # The bits of the magnitude of a float are an integer that grows with it, across exponents.
    wide = p.astype(jnp.float32)
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    size = (bits & jnp.uint32(_SIGN - 1)).astype(jnp.int32) + (correction.astype(jnp.int32) << 8)
    joined = (bits & jnp.uint32(_SIGN)) | jnp.maximum(size, 0).astype(jnp.uint32)
    return jnp.where(jnp.isfinite(wide), lax.bitcast_convert_type(joined, jnp.float32), wide)


def _split_24_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the nearest bfloat16 number of x, as float32, and its correction, int8."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = (bits & jnp.uint32(_SIGN - 1)).astype(jnp.int32)
    size = (size + 0x7F + ((size >> 8) & 1)) >> 8  # to the nearest, of ties to the even one
    high = jnp.minimum((size + 128) >> 8, _MAX_BFLOAT16)
    correction = jnp.clip(size - (high << 8), -128, 127)
    split = (bits & jnp.uint32(_SIGN)) | (high << 16).astype(jnp.uint32)
    is_finite = jnp.isfinite(x)
    new = jnp.where(is_finite, lax.bitcast_convert_type(split, jnp.float32), x)
    return new, jnp.where(is_finite, correction, 0).astype(jnp.int8)


def stochastic_rounding(key: jax.Array | int) -> optax.GradientTransformation:
    """Round bfloat16 and float16 parameters stochastically when updates are added to them.

    Small updates are lost if p + u is rounded to the nearest number. This transformation rounds
    the float32 sum to one of its two neighbours, at random so that the mean is the sum::

        P(up) = (p + u - lower) / (upper - lower)

    in steps of 2⁻¹⁶ for bfloat16 and of 2⁻¹³ for float16. It returns the float32 update that
    leads to the rounded number exactly, with ``optax.apply_updates`` and with offload. Make it the
    last one of a chain, after `in_float32` or `adamw_8bit`, whose updates are float32::

        optax.chain(in_float32(optax.adamw(1e-3)), stochastic_rounding(0))

    Numbers that need no rounding, infinity and NaN are unchanged. Those above the largest number of
    the dtype are rounded to the nearest, so that no number below it becomes infinite. Updates of
    parameters of other dtypes are unchanged. Under ``jax_numpy_dtype_promotion="strict"`` add the
    updates in float32 and cast the sum.

    The random numbers differ from leaf to leaf and from step to step, and with offload from layer
    to layer. They are a function of the key and the count in the state, so that a resumed run draws
    the same ones. Replicas of a parameter draw the same numbers if their keys are equal. For
    parameters that are sharded by ``jax.shard_map``, fold ``lax.axis_index`` into the key.

    Memory: a key and a count.

    References:
        P. Zamirai et al., Revisiting BFloat16 Training, 2020 (arXiv:2010.06192).

    Args:
        key: a PRNG key, or a seed.

    Returns:
        The transformation. Its state is a NamedTuple of a `count` and the `key`.

    Raises:
        ValueError: from `update`, if `params` is None.
    """

    def init(params: optax.Params) -> StochasticRoundingState:
        del params
        # Copy the key: a step may donate its state.
        own = jax.random.key(key) if isinstance(key, numbers.Integral) else jnp.copy(key)
        return StochasticRoundingState(jnp.zeros([], jnp.int32), own)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("`params` must be passed to `update`, to be rounded.")
        step_key = jax.random.fold_in(state.key, state.count)
        leaves, structure = jax.tree.flatten(updates)
        new = [
            _round_update(p, u, jax.random.fold_in(step_key, i)) if _is_half(p) else u
            for i, (p, u) in enumerate(zip(structure.flatten_up_to(params), leaves, strict=True))
        ]
        count = jnp.asarray(optax.safe_increment(state.count))
        return structure.unflatten(new), StochasticRoundingState(count, state.key)

    return optax.GradientTransformation(init, update)


def _is_half(a: jax.Array) -> bool:
    return a.dtype in (jnp.bfloat16, jnp.float16)


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.float32) if _is_half(a) else a, tree)


def _round_update(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
    """Return the float32 update from p to the stochastically rounded p + u."""
    # The difference of the rounded sum t and p is exact, unless |t| is much above |p|. Then its
    # error is a fraction of a float32 step of t, and p plus the difference is still rounded to t.
    wide = p.astype(jnp.float32)
    total = wide + u.astype(jnp.float32)
    return _round_stochastically(total, jax.random.bits(key, p.shape, jnp.uint16), p.dtype) - wide


def _round_stochastically(x: jax.Array, noise: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 numbers to a dtype of 16 bits, with uint16 random numbers."""
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant  # bits
    noise = noise.astype(jnp.uint32) & jnp.uint32(2**dropped - 1)
    # Add a random number below the last bit that is kept, and cut the others off.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + noise
    bits &= jnp.uint32(2**32 - 2**dropped)
    rounded = lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.float16:
        # Subnormal numbers of float16 are normal in float32, with more bits than float16 keeps.
        spacing = float(info.smallest_subnormal)
        steps = jnp.abs(x) / spacing
        lower = jnp.floor(steps)
        is_up = steps - lower > noise.astype(jnp.float32) / 2**dropped
        subnormal = jnp.sign(x) * (lower + is_up) * spacing
        rounded = jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
    # Above the largest number of the dtype, the upper neighbour is infinite: round to the nearest.
    rounded = jnp.where(jnp.abs(x) > float(info.max), x.astype(dtype).astype(x.dtype), rounded)
    return jnp.where(jnp.isfinite(x), rounded, x)


def get_hyperparams(state: Any) -> dict[str, jax.Array]:
    """Return the hyperparameters of ``optax.inject_hyperparams`` in a state, by name.

    They may be anywhere in the state, of optax or offloaded. With offload each layer has its own
    copies, of which this is the first::

        effjax.optimizers.get_hyperparams(state)["learning_rate"]

    Args:
        state: a pytree, such as an `effjax.OffloadState` or the `opt_state` of an optimizer.

    Returns:
        Scalars, by name. A scheduled one has the value of the last step.
    """
    found: dict[str, jax.Array] = {}
    for path, a in jax.tree_util.tree_leaves_with_path(state):
        if (name := _hyperparam_name(path, "hyperparams")) is not None:
            found.setdefault(name, jnp.ravel(a)[0])
    return found


def set_hyperparams(state: Any, **values: jax.typing.ArrayLike) -> Any:
    """Return a state with other hyperparameters of ``optax.inject_hyperparams``.

    All copies with these names are replaced, those of all layers with offload::

        state = effjax.optimizers.set_hyperparams(state, learning_rate=1e-4)

    Args:
        state: as in `get_hyperparams`.
        **values: numbers, by name.

    Returns:
        The state, with the same dtypes and places.

    Raises:
        ValueError: for a name that the state does not have, or that a schedule sets in each step.
    """
    names = set(get_hyperparams(state))
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        scheduled = _hyperparam_name(path, "hyperparams_states")
        if scheduled in values:
            raise ValueError(
                f"`{scheduled}` (={values[scheduled]}) must not be a schedule, which would replace "
                "it in the next step. Pass a number to optax.inject_hyperparams."
            )
    for name, value in values.items():
        if name not in names:
            raise ValueError(
                f"`{name}` (={value}) must be one of the hyperparameters of optax."
                f"inject_hyperparams in the state: {', '.join(sorted(names)) or 'there are none'}."
            )

    def replace(path: tuple, a: jax.Array) -> jax.Array:
        name = _hyperparam_name(path, "hyperparams")
        return jnp.full_like(a, values[name]) if name in values else a

    return jax.tree_util.tree_map_with_path(replace, state)


def _hyperparam_name(path: tuple, field: str) -> str | None:
    """Return the key in the dict `field` of a state of ``optax.inject_hyperparams``, or None."""
    for at, key in itertools.pairwise(path):
        if getattr(at, "name", None) == field:
            return getattr(key, "key", None)
    return None


def __dir__() -> list[str]:
    return __all__
