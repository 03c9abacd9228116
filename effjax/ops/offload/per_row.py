"""Detection of optimizers that treat the rows of a parameter separately, from their programs."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from .backends import nested_jaxprs

# A wrong "no" costs memory, and a wrong "yes" would change results without an error. So this is a
# list of operations that are known to treat rows separately; any other one mixes them.


class Rows(Enum):
    """The relation of an array to the rows of a parameter, its entries along the first axis."""

    CONSTANT = 0  # depends on no row; may differ along its first axis, such as an iota
    UNIFORM = 1  # depends on no row, and is equal along its first axis, or random
    ROWS = 2  # consists of equal contiguous parts along the first axis, each of one row only
    MIXED = 3


_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pcast", "pow", "pvary",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
_REDUCTIONS = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum",
}  # fmt: skip
_CALLS = {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


def find_row_factors(
    tx: Any, params: Any, leaf: int, state: Sequence[int], sizes: Sequence[int]
) -> list[int] | None:
    """Check that an optimizer can be applied to a few rows of a parameter at a time.

    Args:
        tx: an optax.GradientTransformation that treats every parameter separately.
        params: the shapes of the parameters.
        leaf: the index of the parameter.
        state: the leaves of the state that belong to the parameter.
        sizes: the numbers of rows to which it is applied.

    Returns:
        The entries per row of each of these leaves along its first axis. None if the result would
        differ from that for all rows at once, or if this is unknown. Random numbers count as equal.
    """
    leaves, structure = jax.tree.flatten(params)
    rows, programs = leaves[leaf], []
    for size in (*sizes, rows.shape[0]):
        leaves[leaf] = jax.ShapeDtypeStruct((size, *rows.shape[1:]), rows.dtype)
        programs.append(_trace(tx, structure.unflatten(leaves)))
    whole = programs[-1]
    if whole is None or any(p is None or p.constants != whole.constants for p in programs):
        return None
    factors = []
    for k in state:
        shape = whole.state[k].shape
        if not shape or shape[0] % rows.shape[0]:
            return None
        factors.append(shape[0] // rows.shape[0])
        expected = [(factors[-1] * size, *shape[1:]) for size in sizes]
        if [p.state[k].shape for p in programs[:-1]] != expected:
            return None
    for program, size in zip(programs, (*sizes, rows.shape[0]), strict=True):
        count = len(leaves)
        of_params = [Rows.ROWS if j == leaf else Rows.CONSTANT for j in range(count)]
        of_state = [Rows.ROWS if k in state else Rows.CONSTANT for k in range(len(whole.state))]
        results = _classify(program.jaxpr, [*of_params, *of_state, *of_params], size)
        kinds = [results[leaf], *(results[count + k] for k in state)]
        if Rows.MIXED in kinds or Rows.CONSTANT in kinds:
            return None
    return factors


class _Program(NamedTuple):
    """The traced update of an optimizer."""

    jaxpr: Any
    state: list  # shapes
    constants: list  # operations and their constants, some of which are computed from shapes


def _trace(tx: Any, params: Any) -> _Program | None:
    try:
        state = jax.eval_shape(tx.init, params)
        update = jax.make_jaxpr(tx.update)(params, state, params)
    except Exception:  # optimizers raise errors of any type
        return None
    return _Program(update.jaxpr, jax.tree.leaves(state), list(_constants(update)))


def _constants(program: Any) -> Iterator[tuple]:
    yield from (("closed over", id(a)) for a in getattr(program, "consts", ()))
    for eqn in getattr(program, "jaxpr", program).eqns:
        literals = [str(v.val) for v in eqn.invars if isinstance(v, Literal)]
        yield eqn.primitive.name, *literals
        for inner in nested_jaxprs(eqn.params):
            yield from _constants(inner)


def _classify(jaxpr: Any, inputs: Sequence[Rows], size: int) -> list[Rows]:
    """Return the kind of each output of a program, for a parameter with `size` rows."""
    known: dict = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v):
        return Rows.CONSTANT if isinstance(v, Literal) else known.get(v, Rows.CONSTANT)

    for eqn in jaxpr.eqns:
        kinds = [read(v) for v in eqn.invars]
        known.update(zip(eqn.outvars, _classify_equation(eqn, kinds, size), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _classify_equation(eqn: Any, kinds: list[Rows], size: int) -> list[Rows]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "cond":
        index, *operands = kinds
        branches = [_classify(b.jaxpr, operands, size) for b in eqn.params["branches"]]
        return [
            _join([(index, 0), *((kind, _ndim(v)) for kind in of_branches)])
            for v, *of_branches in zip(eqn.outvars, *branches, strict=True)
        ]
    if name in _CALLS:
        for inner in nested_jaxprs(eqn.params):
            jaxpr = getattr(inner, "jaxpr", inner)
            if len(jaxpr.invars) == len(kinds) and len(jaxpr.outvars) == count:
                return _classify(jaxpr, kinds, size)
    if name in ("optimization_barrier", "effjax_barrier"):
        return kinds
    if name in _ELEMENTWISE:
        return [_join([(k, _ndim(v)) for k, v in zip(kinds, eqn.invars, strict=True)])] * count
    if name == "broadcast_in_dim":
        return [_classify_broadcast(eqn, kinds[0])]
    if Rows.ROWS in kinds or Rows.MIXED in kinds:
        return [Rows.ROWS if _keeps_rows(name, eqn, kinds, size) else Rows.MIXED] * count
    if any(n % size == 0 for v in eqn.invars for n in getattr(v.aval, "shape", ())):
        return [Rows.MIXED] * count  # perhaps the number of rows, as a sum of ones
    # Random numbers of other chunks are others, and as random.
    is_uniform = name == "random_bits" or (name == "iota" and eqn.params["dimension"] != 0)
    return [Rows.UNIFORM if is_uniform else Rows.CONSTANT] * count


def _join(kinds: Sequence[tuple[Rows, int]]) -> Rows:
    """Return the kind of an elementwise result of operands with these kinds and ranks."""
    # A scalar is equal along every axis.
    found = {Rows.UNIFORM if not ndim and kind == Rows.CONSTANT else kind for kind, ndim in kinds}
    if Rows.MIXED in found or {Rows.ROWS, Rows.CONSTANT} <= found:
        return Rows.MIXED
    return next((k for k in (Rows.ROWS, Rows.CONSTANT) if k in found), Rows.UNIFORM)


def _classify_broadcast(eqn: Any, kind: Rows) -> Rows:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    operand = eqn.invars[0].aval.shape
    keeps_first = bool(axes) and axes[0] == 0 and operand[0] == shape[0]
    if keeps_first or not shape:
        return kind
    return Rows.MIXED if kind in (Rows.ROWS, Rows.MIXED) else Rows.UNIFORM


def _keeps_rows(name: str, eqn: Any, kinds: list[Rows], size: int) -> bool:
    """Return True if the results consist of rows, as some operands do."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if Rows.MIXED in kinds:
        return False
    if name in _REDUCTIONS:
        return 0 not in params["axes"]
    if name == "concatenate":
        return params["dimension"] != 0 and Rows.CONSTANT not in kinds
    if name == "pad":
        return kinds[0] == Rows.ROWS and params["padding_config"][0] == (0, 0, 0)
    if name == "reshape":
        new = params["new_sizes"]
        return params["dimensions"] is None and bool(new) and new[0] % size == 0
    if name == "squeeze":
        return 0 not in params["dimensions"]
    if name == "transpose":
        return params["permutation"][0] == 0
    if name == "slice":
        starts, ends, strides = (params[k] for k in ("start_indices", "limit_indices", "strides"))
        return starts[0] == 0 and ends[0] == shape[0] and (strides is None or strides[0] == 1)
    return False


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))
