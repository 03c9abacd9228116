"""The gated MLPs of a mixture of experts, without a copy of the tokens by expert.

`expert_mlp` takes the matrices of the experts. `mix_experts` is its general form, for matrices that
are computed one expert at a time: dequantized, or the sum of a frozen matrix and an adapter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, min_dim
from jax.custom_derivatives import SymbolicZero
from jax.experimental.xla_metadata import set_xla_metadata

from ._common.arguments import as_array, check_choice
from ._common.derivatives import forbid_forward_mode
from ._common.dtypes import accumulation_dtype
from ._common.platform import known_sizes
from ._common.sharding import match_varying, run_per_device, zeros

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def expert_mlp(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    transposed: bool = False,
) -> jax.Array:
    """Compute the weighted sum of the gated MLPs that each token chooses.

    ``y[t] = sum_j weights[t, j] * (f(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]`` with
    ``e = experts[t, j]``

    Args:
        x: [T, D], floating point.
        experts: integers [T, k] in [0, E). Outside of jit, another number is an error. Within, such
            a choice adds nothing and has no gradient.
        weights: [T, k], floating point.
        gate: [E, D, F], floating point; cast to the dtype of x. Products accumulate in float32.
        up: as gate.
        down: [E, F, D].
        activation: f: "silu", "gelu_pytorch_tanh", or an elementwise function.
        transposed: whether the matrices are [E, F, D], [E, F, D] and [E, D, F], as the weights of
            PyTorch's linear layers are. No transposed copy of them or of their gradients exists.

    Returns:
        [T, D], of the dtype of x. The sum over a token's experts is computed in float32 (float64
        for float64 x).

    Raises:
        TypeError: for arguments that are not arrays, or of the wrong kind of dtype.
        ValueError: for mismatched shapes, numbers of experts out of range, and an unknown
            activation.

    Kept for the backward pass: the arguments. It recomputes the hidden numbers of a block at a
    time. Reverse mode only (NotImplementedError in forward mode).
    """
    x, weights = as_array("x", x), as_array("weights", weights)
    gate, up, down = as_array("gate", gate), as_array("up", up), as_array("down", down)
    _check_matrices(x, gate, up, down, transposed)
    return mix_experts(
        x, experts, weights, (gate, up, down), _as_they_are,
        activation=activation, transposed=transposed,
    )  # fmt: skip


def _as_they_are(matrices: Any) -> Any:
    return matrices


def mix_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    parameters: Any,
    make: Callable[[Any], tuple[jax.Array, jax.Array, jax.Array]],
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    transposed: bool = False,
) -> jax.Array:
    """Compute `expert_mlp` of matrices that are made of other parameters.

    `parameters` is a pytree of arrays [E, ...], of any dtype. ``make(parameters of one expert)``
    returns its matrices (gate, up, down), of any floating dtype: [D, F], [D, F], [F, D], or if
    transposed [F, D], [F, D], [D, F]. In each pass it runs one time for each expert that has
    tokens. It is differentiated by the floating-point parameters whose gradients are needed. If
    none is needed, as of frozen weights, neither are the gradients of matrices computed.
    """
    x, weights = as_array("x", x), as_array("weights", weights)
    known, experts = experts, as_array("experts", experts, jnp.integer)
    if not callable(activation):
        activation = ACTIVATIONS[check_choice("activation", activation, *ACTIVATIONS)]
    leaves, structure = jax.tree.flatten(parameters)
    num_experts = leaves[0].shape[0]
    _check_choices(x, experts, weights)
    _check_range(known, num_experts)
    if not x.size or not experts.shape[1]:
        return x * 0
    num_tokens, k = known_sizes(*experts.shape)
    block = _default_block(num_tokens, k, num_experts)
    static = _Static(make, structure, activation, transposed, block)

    def run(arrays, leaves):
        arrays, leaves = match_varying((arrays, leaves))
        x, experts, weights = arrays
        experts, weights = _merge_equal_choices(experts, weights, num_experts)
        x, weights, *leaves = forbid_forward_mode("expert_mlp", (x, weights, *leaves))
        return _mix(static, x, experts, weights, *leaves)

    return run_per_device(run, x)((x, experts, weights), leaves)


def _merge_equal_choices(experts, weights, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Let each token name an expert at most once; give the number E to all other choices."""
    # A narrow dtype cannot represent E.
    experts = experts.astype("int64" if experts.dtype.itemsize == 8 else "int32")
    is_known = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_known, experts, num_experts).astype(jnp.int32)
    k = experts.shape[1]
    if k == 1:
        return experts, weights
    first = jnp.argmax(experts[:, :, None] == experts[:, None, :], -1)  # [T, k]
    choices = jnp.arange(k)
    merged = jnp.where(first[:, :, None] == choices, weights[:, :, None], 0).sum(1)
    return jnp.where(first == choices, experts, num_experts), merged.astype(weights.dtype)


class _Static(NamedTuple):
    make: Callable
    structure: Any  # of the parameters
    activation: Callable
    transposed: bool
    block: int

    def matrices(self, leaves: Sequence[jax.Array], expert: jax.Array) -> tuple:
        """Return the matrices of an expert."""
        return self.make(self.structure.unflatten(_entry(a, expert) for a in leaves))

    def pack(self, matrices: Sequence[jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return gate and up in one array, and down."""
        gate, up, down = matrices
        both = jnp.concatenate([gate, up], 0 if self.transposed else 1)
        return both.astype(dtype), down.astype(dtype)

    def multiply(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        """Return x @ W."""
        return _dot(x, matrix, 1, 1 if self.transposed else 0).astype(x.dtype)

    def multiply_transposed(self, dy: jax.Array, matrix: jax.Array) -> jax.Array:
        """Return dy @ W.T."""
        return _dot(dy, matrix, 1, 0 if self.transposed else 1).astype(dy.dtype)

    def matrix_gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """Return the gradient of W, in float32 or wider."""
        return _dot(dy, x, 0, 0) if self.transposed else _dot(x, dy, 0, 0)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    dims = ((axis_a,), (axis_b,)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=accumulation_dtype(a))


class _Layout(NamedTuple):
    """The choices of all tokens, sorted by expert."""

    order: jax.Array  # [T k + block], positions in the flat choices
    first: jax.Array  # [E], of each expert in order
    size: jax.Array  # [E]
    used: jax.Array  # experts, those with tokens first

    @classmethod
    def of(cls, experts: jax.Array, num_experts: int, block: int) -> "_Layout":
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        # Not searchsorted, which needs a known T.
        numbers = jnp.arange(num_experts + 1, dtype=flat.dtype)
        first = jnp.sum(flat < numbers[:, None], 1, dtype=jnp.int32)
        size = jnp.diff(first)
        used = jnp.argsort(size == 0, stable=True).astype(jnp.int32)
        order = jnp.pad(order, (0, block))
        return cls(order, first[:-1], size, used)


def _entry(a: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _take(a: jax.Array, rows: jax.Array) -> jax.Array:
    return a.at[rows].get(mode="fill", fill_value=0)


def _for_each_expert(static: _Static, experts, num_experts: int, body: Callable, carry: Any):
    """Run ``carry = body(carry, expert, scan_blocks)`` on every expert that has tokens.

    ``scan_blocks(f, inner)`` runs ``inner = f(inner, choices, tokens)`` on each block of the
    expert, with positions in the flat choices and in the tokens. Those of padding are out of range.
    """
    num_choices, k = experts.size, experts.shape[1]
    layout = _Layout.of(experts, num_experts, static.block)
    num_used = min_dim(num_experts, num_choices)
    # The planner counts this many blocks: each expert fills all but the last.
    (known_choices,) = known_sizes(num_choices)
    most = known_choices // static.block + min(num_experts, known_choices)
    mean_blocks = -(-most // min(num_experts, known_choices))

    def visit(i, carry):
        expert = layout.used[i]
        first, size = layout.first[expert], layout.size[expert]

        def scan_blocks(f, inner):
            def step(n, inner):
                start = n * static.block
                choices = lax.dynamic_slice(layout.order, (first + start,), (static.block,))
                is_own = start + jnp.arange(static.block) < size
                choices = jnp.where(is_own, choices, num_choices)
                return f(inner, choices, choices // k)

            with set_xla_metadata(max_trip_count=mean_blocks):
                return lax.fori_loop(0, -(-size // static.block), step, inner)

        return body(carry, expert, scan_blocks)

    return lax.fori_loop(0, num_used, visit, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(static: _Static, x, experts, weights, *leaves) -> Any:
    wide = accumulation_dtype(x)
    w = weights.reshape(-1).astype(wide)

    def visit(y, expert, scan_blocks):
        both, down = static.pack(static.matrices(leaves, expert), x.dtype)

        def add_block(y, choices, tokens):
            h = _hidden(static, static.multiply(_take(x, tokens), both))
            h = (h * _take(w, choices)[:, None]).astype(x.dtype)
            return _add_rows(y, tokens, static.multiply(h, down))

        return scan_blocks(add_block, y)

    y = zeros(x.shape, wide, x)
    return _for_each_expert(static, experts, leaves[0].shape[0], visit, y).astype(x.dtype)


def _hidden(static: _Static, both: jax.Array) -> jax.Array:
    """Return f(gate) * up in float32 or wider."""
    gate, up = jnp.split(both.astype(accumulation_dtype(both)), 2, 1)
    return static.activation(gate) * up


def _add_rows(y: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    # A token occurs at most once in a block.
    return y.at[tokens].add(rows.astype(y.dtype), mode="drop", unique_indices=True)


def _forward(static: _Static, x, experts, weights, *leaves):
    # A residual of None has no gradient. JAX keeps the structure of residuals, not their values.
    arrays = x, experts, weights, *leaves
    needed = [() if a.perturbed else None for a in (x, weights, *leaves)]
    values = [a.value for a in arrays]
    return _mix(static, *values), (values, needed)


def _backward(static: _Static, residuals, dy):
    (x, experts, weights, *leaves), needed = residuals
    needs_dx, needs_dw, *needs = (n is not None for n in needed)
    if isinstance(dy, SymbolicZero):
        return None, None, None, *[None] * len(leaves)
    wide = accumulation_dtype(x)
    w = weights.reshape(-1).astype(wide)
    trained = [i for i, is_needed in enumerate(needs) if is_needed]

    def visit(carry, expert, scan_blocks):
        dx, dw, dleaves = carry

        def make(some):
            entries = [_entry(a, expert) for a in leaves]
            for i, a in zip(trained, some, strict=True):
                entries[i] = a
            return static.make(static.structure.unflatten(entries))

        matrices, pull_back = jax.vjp(make, [_entry(leaves[i], expert) for i in trained])
        both, down = static.pack(matrices, x.dtype)

        def add_block(carry, choices, tokens):
            dx, dw, sums = carry
            x_block, dy_block = _take(x, tokens), _take(dy, tokens)
            share = _take(w, choices)[:, None]
            hidden = static.multiply(x_block, both).astype(wide)
            h, pull_back = jax.vjp(functools.partial(_hidden, static), hidden)
            dh = static.multiply_transposed(dy_block, down).astype(wide)
            if needs_dw:
                dw = dw.at[choices].set(jnp.sum(h * dh, 1), mode="drop", unique_indices=True)
            dhidden = pull_back(share * dh)[0].astype(x.dtype)
            if needs_dx:
                dx = _add_rows(dx, tokens, static.multiply_transposed(dhidden, both))
            if trained:
                h = (share * h).astype(x.dtype)
                sums = (
                    sums[0] + static.matrix_gradient(x_block, dhidden),
                    sums[1] + static.matrix_gradient(h, dy_block),
                )
            return dx, dw, sums

        sums = [zeros(a.shape, wide, x) for a in ((both, down) if trained else ())]
        dx, dw, sums = scan_blocks(add_block, (dx, dw, tuple(sums)))
        if trained:
            dgate, dup = jnp.split(sums[0], 2, 0 if static.transposed else 1)
            cotangents = (dgate, dup, sums[1])
            dmatrices = [d.astype(a.dtype) for d, a in zip(cotangents, matrices, strict=True)]
            (entries,) = pull_back(tuple(dmatrices))
            dleaves = [
                lax.dynamic_update_index_in_dim(d, a, expert, 0)
                for d, a in zip(dleaves, entries, strict=True)
            ]
        return dx, dw, dleaves

    carry = (
        zeros(x.shape, wide, x) if needs_dx else None,
        zeros(w.shape, wide, x) if needs_dw else None,
        [zeros(leaves[i].shape, leaves[i].dtype, x) for i in trained],
    )
    dx, dw, dleaves = _for_each_expert(static, experts, leaves[0].shape[0], visit, carry)
    gradients = dict(zip(trained, dleaves, strict=True))
    return (
        None if dx is None else dx.astype(x.dtype),
        None,
        None if dw is None else dw.reshape(weights.shape).astype(weights.dtype),
        *(gradients.get(i) for i in range(len(leaves))),
    )


_mix.defvjp(_forward, _backward, symbolic_zeros=True)


def _default_block(num_tokens: int, k: int, num_experts: int) -> int:
    """Return a power of two that is about a quarter of the mean number of tokens of an expert."""
    mean = num_tokens * k // num_experts
    return int(np.clip(1 << max(mean // 4, 1).bit_length() - 1, 16, 1024))


def _check_choices(x: jax.Array, experts: jax.Array, weights: jax.Array) -> None:
    if x.ndim != 2:
        raise ValueError(f"`x` of shape {x.shape} must be [T, D].")
    if experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"`experts` of shape {experts.shape} must be [T, k], with the T of `x` {x.shape}."
        )
    if weights.shape != experts.shape:
        raise ValueError(
            f"`weights` of shape {weights.shape} must be {experts.shape}, as `experts`."
        )


def _check_range(experts: Any, num_experts: int) -> None:
    # Of arrays of several processes, each would see its part.
    if isinstance(experts, Tracer) or not getattr(experts, "is_fully_addressable", True):
        return
    experts = np.asarray(experts)  # not a jax.numpy function, which jit around this would trace
    wrong = experts[(experts < 0) | (experts >= num_experts)]
    if wrong.size:
        raise ValueError(f"`experts` has {wrong[0]}, but must be in [0, {num_experts}).")


def _check_matrices(x, gate, up, down, transposed: bool) -> None:
    if x.ndim != 2:
        raise ValueError(f"`x` of shape {x.shape} must be [T, D].")
    axes = ("[E, F, D]", "[E, D, F]") if transposed else ("[E, D, F]", "[E, F, D]")
    width = x.shape[1]
    if gate.ndim != 3 or gate.shape[2 if transposed else 1] != width or not gate.shape[0]:
        raise ValueError(
            f"`gate` of shape {gate.shape} must be {axes[0]}, with D = {width}, as `x`, and E at "
            "least 1."
        )
    if up.shape != gate.shape:
        raise ValueError(f"`up` of shape {up.shape} must be {gate.shape}, as `gate`.")
    if down.shape != (gate.shape[0], gate.shape[2], gate.shape[1]):
        raise ValueError(
            f"`down` of shape {down.shape} must be {axes[1]}, for `gate` of {gate.shape}."
        )
