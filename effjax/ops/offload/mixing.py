"""The parts of a model that an optimizer combines: parameters or layers."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .backends import nested_jaxprs
from .optimizer import with_value
from .trees import check_same_shapes, is_key

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
    names = [f"params{jax.tree_util.keystr(path)}" for path in program.param_paths]
    if mixed := program.find_mixed():
        i, others, place = mixed
        _raise_mixed("parameter", names[i], [names[j] for j in others], place)
    # Trace two layers too, with two arrays per parameter. This fails for optimizers that select
    # parameters by path; then skip the check.
    with contextlib.suppress(_TraceError):
        if mixed := _trace(tx, jax.tree.map(lambda a: [a, a], params)).find_mixed():
            i, _, place = mixed
            _raise_mixed("layer", names[i // 2], ["other layers"], place)
    _check_noise(program)


def find_state_keys(tx: Any, params: Any) -> set[int]:
    """Return the indices of the leaves of the state that are PRNG keys."""
    return set() if params is None else _trace(tx, params).find_keys()


def find_owners(tx: Any, params: Any) -> list[set[int]]:
    """Return the parameters on which each leaf of the state depends after any number of steps."""
    of_state = _trace(tx, params).state_dependencies()
    return [{d for d in deps if isinstance(d, int)} for deps in of_state]


def _raise_mixed(unit: str, name: str, others: list[str], place: str) -> None:
    listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    if place:
        reason = f"the update of {name} uses {place}, which also depends on {listed}"
    else:
        reason = f"the update of {name} depends on {listed}"
    raise ValueError(
        f"`tx` must treat every {unit} separately, but {reason}. Layers are updated one at a time. "
        "Remove this transformation, or use an optimizer with separate state for each parameter, "
        "such as optax.adamw. To clip by the global norm pass `clip_norm`; to skip steps that are "
        "not finite, use effjax.offload_train_step with skip_nonfinite=True."
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
