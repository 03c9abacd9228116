"""Whether an optimizer treats every parameter and layer on its own, read from its program."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .compiled import jaxprs_in
from .trees import is_key

_NOT_OWN = (
    "`tx` does not treat every parameter on its own: the update of params{name} depends on the "
    "gradients of {others}. Layers are updated one after the other: leave such a transformation "
    "out, and to clip by the global norm pass `clip_norm`."
)
_SAME_NOISE = (
    "`tx` draws random numbers {where}, which would be the same ones in every layer. A key in its "
    "state gets the number of the layer: keep it there, as optax.add_noise does."
)


def check_per_leaf(tx: Any, params: Any) -> set[int]:
    """Checks that an optimizer can be applied layer by layer.

    Args:
        tx: an optax.GradientTransformation.
        params: those of one layer, or their shapes.

    Returns:
        Which leaves of its state are PRNG keys.

    Raises:
        ValueError: if the update of a parameter depends on another one's gradient, or what is drawn
            does not come from a key in the state, and so is the same in every layer.
    """
    initial, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    closed, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    names, updated = _names(params), _names(updates)
    states = [("state", j) for j in range(len(jax.tree.leaves(state)))]
    own = [{i} for i in range(len(names))]
    found = _Random([], [])
    outputs = _dependencies(closed.jaxpr, [*own, *({s} for s in states), *own], found)
    # What each entry of the state depends on, after any number of steps.
    of_state = dict(zip(states, outputs[len(updated) :], strict=True))
    for _ in states:
        of_state = {state: _through(deps, of_state) for state, deps in of_state.items()}
    for name, deps in zip(updated, outputs, strict=False):
        deps = _through(deps, of_state)
        others = [names[i] for i in sorted(d for d in deps if isinstance(d, int))]
        if others not in ([], [name]):
            raise ValueError(_NOT_OWN.format(name=name, others=", ".join(others)))
    keys = _keys(jax.tree.leaves(state), found)
    at_first = _Random([], [])
    _dependencies(initial.jaxpr, [set()] * len(initial.jaxpr.invars), at_first)
    if at_first.draws:
        raise ValueError(_SAME_NOISE.format(where="when it is initialized"))
    for deps in [*found.draws, *(of_state["state", j] for j in keys)]:
        if not any(("state", j) in _through(deps, of_state) for j in keys):
            raise ValueError(_SAME_NOISE.format(where="from a key that is not in its state"))
    return keys


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _through(deps: set, of_state: dict) -> set:
    """`deps` and what the state that is among them depends on."""
    return deps.union(*(of_state[d] for d in deps if d in of_state))


class _Random(NamedTuple):
    """What a program draws from: the inputs that each draw and each old-style key depend on."""

    draws: list[set]
    raw_keys: list[tuple[set, int]]  # with the size of such a key

    def note(self, eqn: Any, deps: list[set]) -> None:
        if eqn.primitive.name == "random_wrap":
            self.raw_keys.append((deps[0], eqn.invars[0].aval.shape[-1]))
        takes, gives = (any(map(_has_keys, vs)) for vs in (eqn.invars, eqn.outvars))
        if takes and not gives and eqn.primitive.name != "random_unwrap":
            self.draws.append(set().union(*deps))


def _has_keys(v: Any) -> bool:
    return hasattr(v.aval, "dtype") and is_key(v.aval)


def _keys(state: list, found: _Random) -> set[int]:
    """Those leaves that are keys: by their type, or as uint32 from which a key is made."""

    def is_raw(j: int, a: Any) -> bool:
        return a.dtype == jnp.uint32 and any(
            ("state", j) in deps and a.shape[-1:] == (size,) for deps, size in found.raw_keys
        )

    return {j for j, a in enumerate(state) if is_key(a) or is_raw(j, a)}


def _dependencies(jaxpr: Any, inputs: list[set], found: _Random) -> list[set]:
    """For each output the union of the sets of the inputs that it depends on."""
    known: dict = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v):
        return set() if isinstance(v, Literal) else known.get(v, set())

    for eqn in jaxpr.eqns:
        deps = _of_equation(eqn, [read(v) for v in eqn.invars], found)
        known.update(zip(eqn.outvars, deps, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _of_equation(eqn: Any, deps: list[set], found: _Random) -> list[set]:
    if eqn.primitive.name == "cond":
        which, *deps = deps
        branches = [_dependencies(branch.jaxpr, deps, found) for branch in eqn.params["branches"]]
        return [which.union(*results) for results in zip(*branches, strict=True)]
    inner = list(_inner(eqn))
    if eqn.primitive.name not in ("scan", "while") and len(inner) == 1:
        if len(inner[0].invars) == len(deps) and len(inner[0].outvars) == len(eqn.outvars):
            return _dependencies(inner[0], deps, found)
    union = set().union(*deps)  # more than there may be, never less
    for jaxpr in inner:
        _dependencies(jaxpr, [union] * len(jaxpr.invars), found)
    if not inner:
        found.note(eqn, deps)
    return [union] * len(eqn.outvars)


def _inner(eqn: Any) -> Iterator[Any]:
    """The programs in the parameters of an equation."""
    return (getattr(found, "jaxpr", found) for found in jaxprs_in(eqn.params))
