"""The gated MLPs of a mixture of experts, without a copy of the tokens by expert.

`expert_mlp` takes the matrices of the experts. `mix_experts` is its general form, for matrices that
are made of other parameters one expert at a time: dequantized, or with low-rank adapters.
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
from ._common.sharding import AnyMesh, match_varying, run_per_device, zeros

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
    mesh: AnyMesh | None = None,
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
        mesh: devices over which the tokens are divided, if the axes of their mesh are Auto; its
            size must divide T. Without it, each of them computes all tokens. Not needed for
            Explicit axes, which x shows, nor within `shard_map` and `pmap`.

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
        x, experts, weights, (gate, up, down), tuple, activation=activation, transposed=transposed,
        mesh=mesh,
    )  # fmt: skip


class Adapted(NamedTuple):
    """The matrix ``weight + a @ b``, which would round in 16 bits and is not formed."""

    weight: jax.Array
    a: jax.Array  # [inputs, rank], or transposed
    b: jax.Array  # [rank, outputs], or transposed


def mix_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    parameters: Any,
    make: Callable[[Any], tuple[jax.Array | Adapted, ...]],
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    transposed: bool = False,
    mesh: AnyMesh | None = None,
) -> jax.Array:
    """Compute `expert_mlp` of matrices that are made of other parameters.

    `parameters` is a pytree of arrays [E, ...], of any dtype. ``make(parameters of one expert)``
    returns its matrices (gate, up, down), of any floating dtype: [D, F], [D, F], [F, D], or if
    transposed [F, D], [F, D], [D, F]. Each may be `Adapted`. In each pass it runs one time for each
    expert. It is differentiated by the floating-point parameters whose gradients are needed. If
    none is needed, as of frozen weights, neither are the gradients of matrices computed.
    """
    x, weights = as_array("x", x), as_array("weights", weights)
    known, experts = experts, as_array("experts", experts, jnp.integer)
    if not callable(activation):
        activation = ACTIVATIONS[check_choice("activation", activation, *ACTIVATIONS)]
    leaves, structure = jax.tree.flatten(parameters)
    num_experts = leaves[0].shape[0]
    _check_choices(x, experts, weights, known, num_experts)
    if mesh is not None and x.shape[0] % mesh.size:
        raise ValueError(f"`mesh` of {mesh.size} devices must divide the tokens of `x` {x.shape}.")
    if not x.size or not experts.shape[1]:
        return x * 0
    static = _Static(make, structure, activation, transposed)

    def run(arrays, leaves):
        arrays, leaves = match_varying((arrays, leaves))
        x, experts, weights = arrays
        experts, weights = _merge_equal_choices(experts, weights, num_experts)
        x, weights, *leaves = forbid_forward_mode("expert_mlp", (x, weights, *leaves))
        return _mix(static, x, experts, weights, *leaves)

    return run_per_device(run, x, mesh)((x, experts, weights), leaves)


def _merge_equal_choices(experts, weights, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Let each token name an expert at most once; give the number E to all other choices."""
    # A narrow dtype cannot represent E.
    experts = experts.astype("int64" if experts.dtype.itemsize == 8 else "int32")
    is_known = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_known, experts, num_experts).astype(jnp.int32)
    choices = jnp.arange(experts.shape[1])
    first = jnp.argmax(experts[:, :, None] == experts[:, None, :], -1)  # [T, k]
    merged = jnp.where(first[:, :, None] == choices, weights[:, :, None], 0).sum(1)
    return jnp.where(first == choices, experts, num_experts), merged.astype(weights.dtype)


class _Static(NamedTuple):
    make: Callable
    structure: Any  # of the parameters
    activation: Callable
    transposed: bool

    def matrices(self, entries: Sequence[jax.Array]) -> tuple[Adapted, Adapted]:
        """Return gate and up as one matrix, and down, of the parameters of an expert."""

        def as_adapted(m: jax.Array | Adapted) -> Adapted:
            if isinstance(m, Adapted):
                return m
            pair = m[:0], m[:, :0]  # of rank 0
            return Adapted(m, *pair) if self.transposed else Adapted(m, *pair[::-1])

        gate, up, down = map(as_adapted, self.make(self.structure.unflatten(entries)))
        axis = 0 if self.transposed else 1
        weight, a = (jnp.concatenate(pair, axis) for pair in zip(gate[:2], up[:2], strict=True))
        return Adapted(weight, a, jax.scipy.linalg.block_diag(gate.b, up.b)), down

    def orient(self, matrices: Any) -> Any:
        """Transpose [outputs, inputs] to [inputs, outputs], or back."""
        return jax.tree.map(jnp.transpose, matrices) if self.transposed else matrices


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=accumulation_dtype(a))


def _multiply(x: jax.Array, matrix: Adapted) -> jax.Array:
    """Return x @ W in float32 or wider, the sum of products that are rounded to the dtype of x."""
    wide = accumulation_dtype(x)
    y = _dot(x, matrix.weight).astype(x.dtype).astype(wide)
    if matrix.a.size:
        inner = _dot(x, matrix.a).astype(x.dtype)
        y += _dot(inner, matrix.b).astype(x.dtype).astype(wide)
    return y


def _multiply_transposed(dy: jax.Array, matrix: Adapted) -> jax.Array:
    """Return dy @ W.T."""
    return _multiply(dy, Adapted(matrix.weight.T, matrix.b.T, matrix.a.T))


def _gradients(x: jax.Array, dy: jax.Array, matrix: Adapted) -> Adapted:
    """Return the gradients of the arrays of W in ``y = x @ W``, in float32 or wider."""
    inner, dinner = (_dot(a, b).astype(x.dtype) for a, b in ((x, matrix.a), (dy, matrix.b.T)))
    return Adapted(_dot(x.T, dy), _dot(x.T, dinner), _dot(inner.T, dy))


_entry = functools.partial(lax.dynamic_index_in_dim, axis=0, keepdims=False)


def _take(a: jax.Array, rows: jax.Array) -> jax.Array:
    return a.at[rows].get(mode="fill", fill_value=0)


def _block_sizes(mean: int) -> list[int]:
    """Return the sizes of blocks, given the mean number of tokens of an expert."""
    # Each block reads the matrices and adds to their gradients, and the last one has rows of
    # padding. So most tokens are in large blocks, and the rest of an expert in small ones.
    large = min(1 << max(mean, 16).bit_length() - 1, 2048)
    return [large, large // 4] if large >= 64 else [large]


def _for_each_expert(static: _Static, experts, num_experts: int, body: Callable, carry: Any):
    """Run ``carry = body(carry, expert, scan_blocks)`` on every expert that has tokens.

    ``scan_blocks(f, inner)`` runs ``inner = f(inner, choices, tokens)`` on each block of the
    expert, with positions in the flat choices and in the tokens. Those of padding are out of range.
    """
    num_choices, k = experts.size, experts.shape[1]
    (known_choices,) = known_sizes(num_choices)
    mean = -(-known_choices // min(num_experts, known_choices))
    sizes = _block_sizes(mean)
    flat = experts.reshape(-1)
    order = jnp.pad(jnp.argsort(flat, stable=True).astype(jnp.int32), (0, sizes[0]))
    # Not searchsorted, which needs a known T.
    numbers = jnp.arange(num_experts + 1, dtype=flat.dtype)
    firsts = jnp.sum(flat < numbers[:, None], 1, dtype=jnp.int32)
    counts = jnp.diff(firsts)  # choices of each expert
    used_first = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)

    def visit(i, carry):
        expert = used_first[i]
        size = counts[expert]

        def scan_blocks(f, inner):
            start, known = 0, 0
            for block in sizes:

                def step(n, inner, block=block, start=start):
                    offset = start + n * block
                    choices = lax.dynamic_slice(order, (firsts[expert] + offset,), (block,))
                    is_own = offset + jnp.arange(block) < size
                    choices = jnp.where(is_own, choices, num_choices)
                    return f(inner, choices, choices // k)

                is_last = block == sizes[-1]
                count = (size - start + is_last * (block - 1)) // block
                # The planner counts an expert of the mean size, and one block more for padding.
                planned = (mean - known) // block + is_last
                with set_xla_metadata(max_trip_count=planned):
                    inner = lax.fori_loop(0, count, step, inner)
                start, known = start + count * block, known + planned * block
            return inner

        return body(carry, expert, scan_blocks)

    return lax.fori_loop(0, min_dim(num_experts, num_choices), visit, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(static: _Static, x, experts, weights, *leaves) -> Any:
    wide = accumulation_dtype(x)
    w = weights.reshape(-1).astype(wide)

    def visit(y, expert, scan_blocks):
        matrices = static.matrices([_entry(a, expert) for a in leaves])
        both, down = static.orient(jax.tree.map(lambda a: a.astype(x.dtype), matrices))

        def add_block(y, choices, tokens):
            gate, up = jnp.split(_multiply(_take(x, tokens), both), 2, 1)
            h = _take(w, choices)[:, None] * (static.activation(gate) * up)
            return _add_rows(y, tokens, _multiply(h.astype(x.dtype), down))

        return scan_blocks(add_block, y)

    y = zeros(x.shape, wide, x)
    return _for_each_expert(static, experts, leaves[0].shape[0], visit, y).astype(x.dtype)


def _add_rows(y: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    # A token occurs at most once in a block.
    return y.at[tokens].add(rows, mode="drop", unique_indices=True)


def _forward(static: _Static, x, experts, weights, *leaves):
    # A residual of None has no gradient. JAX keeps the structure of residuals, not their values.
    needed = [() if a.perturbed else None for a in (x, weights, *leaves)]
    values = [a.value for a in (x, experts, weights, *leaves)]
    return _mix(static, *values), (values, needed)


def _backward(static: _Static, residuals, dy):
    (x, experts, weights, *leaves), needed = residuals
    needs_dx, needs_dw, *needs = (n is not None for n in needed)
    if isinstance(dy, SymbolicZero):
        return (None,) * (3 + len(leaves))
    wide = accumulation_dtype(x)
    w = weights.reshape(-1).astype(wide)
    trained = [i for i, is_needed in enumerate(needs) if is_needed]

    def visit(carry, expert, scan_blocks):
        dx, dw, dleaves = carry
        entries = {i: _entry(a, expert) for i, a in enumerate(leaves)}

        def make(some):
            return static.matrices([*(entries | some).values()])

        matrices, pull_back = jax.vjp(make, {i: entries[i] for i in trained})
        both, down = static.orient(jax.tree.map(lambda a: a.astype(x.dtype), matrices))

        def add_block(carry, choices, tokens):
            dx, dw, sums = carry
            x_block, dy_block = _take(x, tokens), _take(dy, tokens)
            share = _take(w, choices)[:, None]
            gate, up = jnp.split(_multiply(x_block, both), 2, 1)
            h, pull_back = jax.vjp(lambda gate, up: static.activation(gate) * up, gate, up)
            dh = _multiply_transposed(dy_block, down)
            if needs_dw:
                dw = dw.at[choices].set(jnp.sum(h * dh, 1), mode="drop", unique_indices=True)
            dgate, dup = pull_back(share * dh)
            # XLA would not fuse a concatenation with the functions before it.
            dhidden = jnp.where(jnp.arange(2)[:, None] == 0, dgate[:, None], dup[:, None])
            dhidden = dhidden.reshape(len(tokens), 2 * h.shape[1]).astype(x.dtype)
            if needs_dx:
                dx = _add_rows(dx, tokens, _multiply_transposed(dhidden, both))
            if trained:
                h = (share * h).astype(x.dtype)
                new = _gradients(x_block, dhidden, both), _gradients(h, dy_block, down)
                sums = jax.tree.map(jnp.add, sums, static.orient(new))
            return dx, dw, sums

        # XLA drops the sums of matrices that do not depend on trained parameters.
        sums = jax.tree.map(lambda a: zeros(a.shape, wide, x), matrices if trained else ())
        dx, dw, sums = scan_blocks(add_block, (dx, dw, sums))
        if trained:
            (new,) = pull_back(jax.tree.map(lambda d, a: d.astype(a.dtype), sums, matrices))
            write = functools.partial(lax.dynamic_update_index_in_dim, index=expert, axis=0)
            dleaves = jax.tree.map(write, dleaves, new)
        return dx, dw, dleaves

    carry = (
        zeros(x.shape, wide, x) if needs_dx else None,
        zeros(w.shape, wide, x) if needs_dw else None,
        {i: zeros(leaves[i].shape, leaves[i].dtype, x) for i in trained},
    )
    dx, dw, dleaves = _for_each_expert(static, experts, leaves[0].shape[0], visit, carry)
    return (
        None if dx is None else dx.astype(x.dtype),
        None,
        None if dw is None else dw.reshape(weights.shape).astype(weights.dtype),
        *(dleaves.get(i) for i in range(len(leaves))),
    )


_mix.defvjp(_forward, _backward, symbolic_zeros=True)


def _check_choices(x, experts, weights, known: Any, num_experts: int) -> None:
    """Raise an error for wrong shapes, and for numbers of experts if they are known."""
    if x.ndim != 2:
        raise ValueError(f"`x` of shape {x.shape} must be [T, D].")
    if experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"`experts` of shape {experts.shape} must be [T, k] for `x` {x.shape}.")
    if weights.shape != experts.shape:
        raise ValueError(f"`weights` of shape {weights.shape} must be {experts.shape}.")
    # Of arrays of several processes, each would see its part.
    if isinstance(known, Tracer) or not getattr(known, "is_fully_addressable", True):
        return
    known = np.asarray(known)  # not a jax.numpy function, which jit around this would trace
    wrong = known[(known < 0) | (known >= num_experts)]
    if wrong.size:
        raise ValueError(f"`experts` has {wrong[0]}, but must be in [0, {num_experts}).")


def _check_matrices(x, gate, up, down, transposed: bool) -> None:
    if x.ndim != 2:
        return  # `mix_experts` raises the error
    if gate.ndim != 3 or not gate.shape[0]:
        raise ValueError(f"`gate` of shape {gate.shape} must have three axes, E at least 1.")
    e, f, d = gate.shape[0], gate.shape[1 if transposed else 2], x.shape[1]
    into, out = ((e, f, d), (e, d, f)) if transposed else ((e, d, f), (e, f, d))
    for name, a, shape in ("gate", gate, into), ("up", up, into), ("down", down, out):
        if a.shape != shape:
            raise ValueError(f"`{name}` of shape {a.shape} must be {shape}, for `x` {x.shape}.")
