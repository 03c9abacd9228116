"""What each result of a program depends on, and what it draws random numbers from."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal

from .compiled import jaxprs_in
from .trees import is_key


class Random(NamedTuple):
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


def dependencies(jaxpr: Any, inputs: list[set], random: Random) -> list[set]:
    """For each output the union of the sets of the inputs that it depends on.

    What is drawn on the way is noted in `random`.
    """
    known: dict = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v):
        return set() if isinstance(v, Literal) else known.get(v, set())

    for eqn in jaxpr.eqns:
        deps = _of_equation(eqn, [read(v) for v in eqn.invars], random)
        known.update(zip(eqn.outvars, deps, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _of_equation(eqn: Any, deps: list[set], random: Random) -> list[set]:
    if eqn.primitive.name == "cond":
        which, *deps = deps
        branches = [dependencies(branch.jaxpr, deps, random) for branch in eqn.params["branches"]]
        return [which.union(*results) for results in zip(*branches, strict=True)]
    inner = list(_inner(eqn))
    if eqn.primitive.name not in ("scan", "while") and len(inner) == 1:
        if len(inner[0].invars) == len(deps) and len(inner[0].outvars) == len(eqn.outvars):
            return dependencies(inner[0], deps, random)
    union = set().union(*deps)  # more than there may be, never less
    for jaxpr in inner:
        dependencies(jaxpr, [union] * len(jaxpr.invars), random)
    if not inner:
        random.note(eqn, deps)
    return [union] * len(eqn.outvars)


def _inner(eqn: Any) -> Iterator[Any]:
    """The programs in the parameters of an equation."""
    return (getattr(found, "jaxpr", found) for found in jaxprs_in(eqn.params))
