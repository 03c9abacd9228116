"""The parts of a model that an optimizer combines: parameters, layers or rows."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .backends import nested_jaxprs
from .optimizer import with_value
from .trees import check_same_shapes, is_key, shapes_of

# Layers are updated one at a time, so an optimizer must treat every parameter separately. For each
# output of init and update, find the inputs that it depends on: i stands for parameter i or its
# gradient, ("state", j) for entry j of the state.
Dependencies = set


class _TraceError(ValueError):
    """An optimizer that cannot be traced for some parameters."""


def check_per_leaf(tx: Any, params: Any) -> None:
    """Check that an optimizer can be applied layer by layer.

    Args:
        tx: an optax.GradientTransformation.
        params: the parameters of one layer, or their shapes.

    Raises:
        ValueError: if tx fails for these parameters, if the update of a parameter depends on
            another parameter or layer (with the entry of the state where they meet), or if random
            numbers do not come from a key in the state.
    """
    if params is None:  # one frozen array; None has another meaning in optax
        return
    program = _trace(tx, params)
    remedy = _finite_remedy(tx)
    names = [f"params{jax.tree_util.keystr(path)}" for path in program.param_paths]
    if mixed := program.find_mixed():
        i, others, place = mixed
        _raise_mixed("parameter", names[i], [names[j] for j in others], place, remedy)
    # Trace two layers too, with two arrays per parameter. This fails for optimizers that select
    # parameters by path; then skip the check.
    with contextlib.suppress(_TraceError):
        if mixed := _trace(tx, jax.tree.map(lambda a: [a, a], params)).find_mixed():
            i, _, place = mixed
            _raise_mixed("layer", names[i // 2], ["other layers"], place, remedy)
    _check_noise(program)


def find_state_keys(tx: Any, params: Any) -> set[int]:
    """Return the indices of the leaves of the state that are PRNG keys."""
    return set() if params is None else _trace(tx, params).find_keys()


def find_owners(tx: Any, params: Any) -> list[set[int]]:
    """Return the parameters on which each leaf of the state depends after any number of steps."""
    of_state = _trace(tx, params).state_dependencies()
    return [{d for d in deps if isinstance(d, int)} for deps in of_state]


def _finite_remedy(tx: Any) -> str:
    """Return the alternative to a transformation that skips steps that are not finite, or ""."""
    skipping = {"optax.apply_if_finite", "optax.MultiSteps"}
    if skipping.isdisjoint(name for name, may_mix, _ in _walk(tx.update) if may_mix):
        return ""
    return (
        " In place of optax.apply_if_finite and optax.skip_not_finite, use "
        "effjax.offload_train_step with skip_nonfinite=True."
    )


def _raise_mixed(unit: str, name: str, others: list[str], place: str, remedy: str) -> None:
    listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    if place:
        reason = f"the update of {name} uses {place}, which also depends on {listed}"
    else:
        reason = f"the update of {name} depends on {listed}"
    raise ValueError(
        f"`tx` must treat every {unit} separately, but {reason}. Layers are updated one at a time. "
        "Remove this transformation, or use an optimizer with separate state for each parameter, "
        f"such as optax.adamw. To clip by the global norm pass `clip_norm`.{remedy}"
    )


def _check_noise(program: "_OptimizerProgram") -> None:
    keys, of_state = program.find_keys(), program.state_dependencies()
    draws = [*program.random.draws, *(of_state[j] for j in keys)]
    where = ""
    if any(not keys & set(_state_entries(_expand(deps, of_state))) for deps in draws):
        where = "from a key that is not in its state"
    if program.random_at_init.draws:
        where = "when it is initialized"
    if where:
        raise ValueError(
            f"`tx` draws random numbers {where}, which would be the same in every layer. Keep the "
            "key in the state, as optax.add_noise does: the layer's number is folded into it."
        )


class _Random(NamedTuple):
    """Dependencies of the random numbers that a program draws."""

    draws: list[Dependencies]
    raw_keys: list[tuple[Dependencies, int]]  # old-style keys, with their size

    def record(self, eqn: Any, deps: list[Dependencies]) -> None:
        if eqn.primitive.name == "random_wrap":
            self.raw_keys.append((deps[0], eqn.invars[0].aval.shape[-1]))
        takes_keys = any(map(_is_key_variable, eqn.invars))
        returns_keys = any(map(_is_key_variable, eqn.outvars))
        if takes_keys and not returns_keys and eqn.primitive.name != "random_unwrap":
            self.draws.append(set().union(*deps))


def _is_key_variable(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and is_key(v.aval)


class _OptimizerProgram(NamedTuple):
    """Dependencies of the results of an optimizer's init and update."""

    param_paths: list[tuple]
    state: list[tuple[tuple, Any]]  # paths and types
    state_at_init: list[Dependencies]
    updates: list[Dependencies]
    state_after: list[Dependencies]
    random_at_init: _Random
    random: _Random

    def state_dependencies(self) -> list[Dependencies]:
        """Return the dependencies of the state after any number of steps, a fixed point."""
        old = []
        new = [a | b for a, b in zip(self.state_at_init, self.state_after, strict=True)]
        while old != new:
            old, new = new, [_expand(deps, new) for deps in new]
        return new

    def find_mixed(self) -> tuple[int, list[int], str] | None:
        """Find a parameter whose update depends on others.

        Returns (its index, the others, the entry of the state where they meet or ""), or None.
        """
        of_state = self.state_dependencies()
        for i, deps in enumerate(self.updates):
            deps = _expand(deps, of_state)
            if others := sorted(d for d in deps if isinstance(d, int) and d != i):
                places = map(self._meeting_place, _state_entries(deps))
                return i, others, next(filter(None, places), "")
        return None

    def _meeting_place(self, j: int) -> str:
        """Return the name of an entry of the state that depends on several parameters, or ""."""
        path, _ = self.state[j]
        belongs_to_one = any(path[len(path) - len(p) :] == p for p in self.param_paths)
        params = [d for d in self.state_at_init[j] | self.state_after[j] if isinstance(d, int)]
        return "" if belongs_to_one or len(params) < 2 else f"state{jax.tree_util.keystr(path)}"

    def find_keys(self) -> set[int]:
        """Return the entries of the state that are keys: typed, or uint32 wrapped as a key."""

        def is_raw_key(j: int, a: Any) -> bool:
            return a.dtype == jnp.uint32 and any(
                ("state", j) in deps and a.shape[-1:] == (size,)
                for deps, size in self.random.raw_keys
            )

        return {j for j, (_, a) in enumerate(self.state) if is_key(a) or is_raw_key(j, a)}


def _state_entries(deps: Dependencies) -> list[int]:
    return sorted(d[1] for d in deps if isinstance(d, tuple))


def _expand(deps: Dependencies, of_state: list[Dependencies]) -> Dependencies:
    """Add the dependencies of the state entries in `deps`."""
    return deps.union(*(of_state[j] for j in _state_entries(deps)))


def _trace(tx: Any, params: Any) -> _OptimizerProgram:
    try:
        init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)

        def run(params: Any, state: Any, value: Any) -> tuple[Any, Any]:
            return with_value(tx, value).update(params, state, params)

        update, (updates, new_state) = jax.make_jaxpr(run, return_shape=True)(
            params, state, jax.ShapeDtypeStruct((), jnp.float32)
        )
        check_same_shapes("updates", updates, "the parameters", params)
        check_same_shapes("state", new_state, "the state", state)
    except Exception as error:  # optimizers raise errors of any type
        raise _TraceError(
            "`tx` failed for the parameters of one layer. Of the extra arguments of optax, an "
            "offloaded optimizer gets only `value`, the loss, because others need all parameters "
            f"at the same time. {type(error).__name__}: {error!s:.500}"
        ) from error
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    entries = jax.tree_util.tree_leaves_with_path(state)
    of_params: list[Dependencies] = [{i} for i in range(len(paths))]
    of_state: list[Dependencies] = [{("state", j)} for j in range(len(entries))]
    random_at_init, random = _Random([], []), _Random([], [])
    state_at_init = _find_dependencies(init.jaxpr, of_params, random_at_init)
    results = _find_dependencies(update.jaxpr, [*of_params, *of_state, set()], random)
    updates, state_after = results[: len(paths)], results[len(paths) :]
    return _OptimizerProgram(
        paths, entries, state_at_init, updates, state_after, random_at_init, random
    )


def _find_dependencies(
    jaxpr: Any, inputs: list[Dependencies], random: _Random
) -> list[Dependencies]:
    """Return the dependencies of each output of a program; record its draws in `random`."""
    known: dict = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v):
        return set() if isinstance(v, Literal) else known.get(v, set())

    for eqn in jaxpr.eqns:
        deps = _equation_dependencies(eqn, [read(v) for v in eqn.invars], random)
        known.update(zip(eqn.outvars, deps, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation_dependencies(
    eqn: Any, deps: list[Dependencies], random: _Random
) -> list[Dependencies]:
    if eqn.primitive.name == "cond":
        index, *deps = deps
        branches = [
            _find_dependencies(branch.jaxpr, deps, random) for branch in eqn.params["branches"]
        ]
        return [index.union(*results) for results in zip(*branches, strict=True)]
    inner = list(_inner_jaxprs(eqn))
    if eqn.primitive.name not in ("scan", "while") and len(inner) == 1:
        jaxpr = inner[0]
        if len(jaxpr.invars) == len(deps) and len(jaxpr.outvars) == len(eqn.outvars):
            return _find_dependencies(jaxpr, deps, random)
    # An upper bound: every output depends on every input.
    union = set().union(*deps)
    for jaxpr in inner:
        _find_dependencies(jaxpr, [union] * len(jaxpr.invars), random)
    if not inner:
        random.record(eqn, deps)
    return [union] * len(eqn.outvars)


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    return (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in nested_jaxprs(eqn.params))


# Rows.

# Transformations whose update of an element depends on no other element of the parameter, by the
# package and the name of the function that makes them. A wrong name would change results without an
# error; a missing one costs memory. Updates are told apart by their code, which a decorator such as
# functools.wraps cannot pretend to be. tests/ops/offload/test_mixing_rows.py compares each with the
# update of whole matrices.
SEPARATE_ROWS = {
    "optax": {
        "add_decayed_weights", "add_noise", "identity", "scale", "scale_by_adam", "scale_by_lion",
        "scale_by_rms", "scale_by_schedule", "trace",
    },
    "effjax": {"scale_by_adam_8bit", "stochastic_rounding"},
}  # fmt: skip
# Masks and labels in the closures of wrappers.
_SELECTORS = {"optax.masked": "mask", "optax.partition": "param_labels"}
# Transformations of others, which they close over.
WRAPPERS = {
    "optax": {"chain", "masked", "partition", "with_extra_args_support"},
    "effjax": {"in_24_bits", "in_float32", "with_full_paths", "with_matmul_precision"},
}


def find_mixing(tx: Any, params: Any = None) -> str | None:
    """Return the first transformation in `tx` that may mix rows, or None if there is none.

    Transformations of labels that none of `params` has are left out.
    """
    return next((name for name, may_mix, _ in _walk(tx.update, params) if may_mix), None)


def find_row_factors(
    tx: Any, params: Any, leaf: int, state: Sequence[int], sizes: Sequence[int]
) -> list[int] | None:
    """Return how many rows the state of an optimizer without mixing has per row of a parameter.

    Args:
        tx: an optax.GradientTransformation for which `find_mixing` returns None.
        params: the shapes of the parameters.
        leaf: the index of the parameter.
        state: the leaves of the state that belong to the parameter.
        sizes: the numbers of rows to which it is applied.

    Returns:
        The entries per row of each of these leaves along its first axis. None if tx would treat a
        parameter with fewer rows differently: if its state would not be a part of the rows, or if a
        mask would be another one.
    """
    leaves, structure = jax.tree.flatten(params)
    num_rows, *shape = leaves[leaf].shape
    whole = jax.eval_shape(tx.init, params)
    chosen = _selections(tx, params)
    entries = [jax.tree.leaves(whole)[k].shape for k in state]
    if any(not shape or shape[0] % num_rows for shape in entries):
        return None
    factors = [entry[0] // num_rows for entry in entries]
    for size in sizes:
        leaves[leaf] = jax.ShapeDtypeStruct((size, *shape), leaves[leaf].dtype)
        rows = structure.unflatten(leaves)
        of_rows = jax.eval_shape(tx.init, rows)
        if jax.tree.structure(of_rows) != jax.tree.structure(whole):
            return None
        new = [jax.tree.leaves(of_rows)[k].shape for k in state]
        expected = [
            (factor * size, *entry[1:]) for factor, entry in zip(factors, entries, strict=True)
        ]
        if new != expected or _selections(tx, rows) != chosen:
            return None
    return factors


def _walk(update: Any, params: Any = None) -> Iterator[tuple[str, bool, dict]]:
    """Yield (name, whether it may mix rows, closure) of each transformation in an update function.

    A wrapper does not mix rows itself; what it wraps comes after it. With `params`, without the
    transformations of labels that none of them has.
    """
    owner = getattr(update, "__self__", None)
    if owner is not None:
        yield from _walk_multi_steps(update, owner, params)
        return
    code, space = getattr(update, "__code__", None), getattr(update, "__globals__", {})
    package = space.get("__name__", "").partition(".")[0]
    name = code.co_qualname.partition(".")[0] if code else type(update).__name__
    closure = dict(inspect.getclosurevars(update).nonlocals) if code else {}
    full_name = f"{package}.{name}" if package else name
    if name in WRAPPERS.get(package, ()):
        values = closure
        if params is not None and full_name == "effjax.with_full_paths":
            params = closure["put_in"](params)
        if params is not None and full_name == "optax.partition":
            labels = {*jax.tree.leaves(_select(closure["param_labels"], params))}
            values = {name: tx for name, tx in closure["transforms"].items() if name in labels}
        wrapped = [inner for value in values.values() for inner in _transformations(value)]
        yield full_name, not wrapped, closure
        for inner in wrapped:
            yield from _walk(inner, params)
    else:
        is_separate = name in SEPARATE_ROWS.get(package, ())
        yield full_name, not (is_separate and all(map(_is_number, closure.values()))), closure


def _walk_multi_steps(update: Any, owner: Any, params: Any) -> Iterator[tuple[str, bool, dict]]:
    kind = type(owner)
    is_own = kind.__module__.partition(".")[0] == "optax" and kind.__name__ == "MultiSteps"
    if is_own and update.__func__ is kind.update:
        # Whether a step is skipped may depend on all rows; by default none is.
        skip = getattr(owner._should_skip_update_fn, "__code__", None)
        if skip and skip.co_qualname.startswith("MultiSteps.__init__.<locals>"):
            yield from _walk(owner._opt.update, params)
            return
    yield f"{kind.__module__.partition('.')[0]}.{kind.__name__}", True, {}


def _transformations(value: Any) -> Iterator[Callable]:
    """Yield the update functions in a value that a wrapper closes over."""
    if hasattr(value, "init") and hasattr(value, "update"):
        yield value.update
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _transformations(entry)
    elif isinstance(value, (tuple, list)):  # the update functions of optax.chain
        yield from (entry for entry in value if callable(entry))


def _is_number(value: Any) -> bool:
    """Return True for numbers, options and schedules, which do not differ between rows."""
    if callable(value) and not isinstance(value, type):
        try:
            value = jax.eval_shape(value, jax.ShapeDtypeStruct((), "int32"))
        except Exception:  # a function of other arguments
            return False
    return getattr(value, "shape", ()) == ()


def _selections(tx: Any, params: Any) -> list:
    """Return the parameters that masks and labels of `tx` select, for the shapes `params`."""
    found: list = []
    for name, _, closure in _walk(tx.update):
        if name == "effjax.with_full_paths":
            params = closure["put_in"](params)
        if name in _SELECTORS and callable(closure[_SELECTORS[name]]):
            found.append(_select(closure[_SELECTORS[name]], params))
    return [jax.tree.flatten(tree) for tree in found]


def _select(selector: Any, params: Any) -> Any:
    """Return the mask or the labels for the shapes `params`."""
    found = [selector]
    if callable(selector):
        jax.eval_shape(lambda params: found.append(selector(params)), params)
    return found[-1]


def check_selections(tx: Any, params: Sequence[Any], name: str) -> None:
    """Check that each mask and label of an optimizer selects a parameter.

    Args:
        tx: an optax.GradientTransformation.
        params: all trees of parameters that it gets.
        name: what they are, for the error.

    Raises:
        ValueError: for a mask that is nowhere True, or a label of a transformation that no
            parameter has.
    """
    paths = [
        f"{jax.tree_util.keystr(path)}"
        for tree in params
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    for kind, _, closure in _walk(tx.update) if paths else ():
        if kind not in _SELECTORS:
            continue
        selector = closure[_SELECTORS[kind]]
        if (getattr(selector, "__module__", None) or "").partition(".")[0] == "optax":
            continue  # of an optimizer of optax, such as muon, which may find none
        found: set = set()
        for tree in params:
            found |= {*jax.tree.leaves(_select(selector, shapes_of(tree)))}
        if kind == "optax.masked":
            missing = [] if any(found) else ["a mask that is nowhere True"]
        else:
            unused = [label for label in closure["transforms"] if label not in found]
            missing = [f"the label {label!r}, which no parameter has" for label in unused]
        if missing:
            examples = ", ".join([*paths[:2], *paths[2:][-1:]])
            raise ValueError(
                f"`tx` has {missing[0]}, so that a part of it would do nothing. Masks and labels "
                f"get {name} with paths such as {examples}. Correct them, or remove this part."
            )
