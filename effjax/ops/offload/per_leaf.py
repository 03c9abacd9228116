"""Whether an optimizer treats every parameter on its own, read from its program."""

from typing import Any

import jax
from jax.extend.core import Literal


def check_per_leaf(tx: Any, params: Any) -> None:
    """Raises ValueError unless the update of a parameter depends on no other one's gradient.

    tx: an optax.GradientTransformation; params: those of one layer, or their shapes.
    """
    state = jax.eval_shape(tx.init, params)
    closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    states = [("state", j) for j in range(len(jax.tree.leaves(state)))]
    own = [{i} for i in range(len(leaves))]
    outputs = _dependencies(closed.jaxpr, [*own, *({s} for s in states), *own])
    # What each entry of the state depends on, after any number of steps.
    updates, _ = shapes
    updated = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(updates)
    ]
    of_state = dict(zip(states, outputs[len(updated) :], strict=True))
    for _ in states:
        of_state = {state: _through(deps, of_state) for state, deps in of_state.items()}
    for name, deps in zip(updated, outputs, strict=False):
        deps = _through(deps, of_state)
        others = [names[i] for i in sorted(d for d in deps if isinstance(d, int))]
        if others not in ([], [name]):
            raise ValueError(
                f"`tx` does not treat every parameter on its own: the update of params{name} "
                f"depends on the gradients of {', '.join(others)}. Layers are updated one after "
                "the other: leave such a transformation out, and to clip by the global norm pass "
                "`clip_norm`."
            )


def _through(deps: set, of_state: dict) -> set:
    """`deps` and what the state that is among them depends on."""
    return deps.union(*(of_state[d] for d in deps if d in of_state))


def _dependencies(jaxpr: Any, inputs: list[set]) -> list[set]:
    """For each output the union of the sets of the inputs that it depends on."""
    known: dict = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v):
        return set() if isinstance(v, Literal) else known.get(v, set())

    for eqn in jaxpr.eqns:
        known.update(
            zip(eqn.outvars, _of_equation(eqn, [read(v) for v in eqn.invars]), strict=True)
        )
    return [read(v) for v in jaxpr.outvars]


def _of_equation(eqn: Any, deps: list[set]) -> list[set]:
    if eqn.primitive.name == "cond":
        which, *deps = deps
        branches = [_dependencies(branch.jaxpr, deps) for branch in eqn.params["branches"]]
        return [which.union(*results) for results in zip(*branches, strict=True)]
    for name in ("jaxpr", "call_jaxpr"):
        inner = eqn.params.get(name)
        inner = getattr(inner, "jaxpr", inner)
        if eqn.primitive.name not in ("scan", "while") and hasattr(inner, "eqns"):
            if len(inner.invars) == len(deps) and len(inner.outvars) == len(eqn.outvars):
                return _dependencies(inner, deps)
    return [set().union(*deps)] * len(eqn.outvars)  # more than there may be, never less
