"""Whether an optimizer treats every parameter and layer on its own, read from its program."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .checks import check_alike
from .dependencies import Random, dependencies
from .trees import is_key

_NOT_OWN = (
    "`tx` does not treat every {one} on its own: {found}. Layers are updated one after the other: "
    "leave such a transformation out, or take an optimizer whose state is each parameter's own, "
    "such as optax.adamw; to clip by the global norm pass `clip_norm`."
)
_SAME_NOISE = (
    "`tx` draws random numbers {where}, which would be the same ones in every layer. A key in its "
    "state gets the number of the layer: keep it there, as optax.add_noise does."
)


class _Failed(ValueError):
    """Of an optimizer that cannot be applied."""


def check_per_leaf(tx: Any, params: Any) -> set[int]:
    """Checks that an optimizer can be applied layer by layer.

    Args:
        tx: an optax.GradientTransformation.
        params: those of one layer, or their shapes.

    Returns:
        Which leaves of its state are PRNG keys.

    Raises:
        ValueError: if tx fails for such parameters; if the update of a parameter depends on
            another one, or on another layer, with where they meet; or if what is drawn does not
            come from a key in the state, and so is the same in every layer.
    """
    program = _trace(tx, params)
    names = [f"params{jax.tree_util.keystr(p)}" for p in program.params]
    if mixed := program.mixed():
        i, others, place = mixed
        _refuse("parameter", names[i], [names[j] for j in others], place)
    # Two layers, where the optimizer does not insist on the paths of one.
    with contextlib.suppress(_Failed):
        if mixed := _trace(tx, jax.tree.map(lambda a: [a, a], params)).mixed():
            i, _, place = mixed
            _refuse("layer", names[i // 2], ["other layers"], place)
    _check_noise(program)
    return program.keys()


def _refuse(one: str, name: str, others: list[str], place: str) -> None:
    on = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    if place:
        found = f"{place} depends on {name} and on {on}, and the update of {name} on it"
    else:
        found = f"the update of {name} depends on {on}"
    raise ValueError(_NOT_OWN.format(one=one, found=found))


class _Program(NamedTuple):
    """What an optimizer's results depend on: i is parameter i or its gradient, ("state", j) entry j
    of its state."""

    params: list[tuple]  # paths
    state: list[tuple[tuple, Any]]  # paths and types
    at_first: list[set]  # the state, as it is made
    updates: list[set]
    after: list[set]  # the state, after a step
    random_at_first: Random
    random: Random

    def of_state(self) -> list[set]:
        """What the state depends on after any number of steps."""
        old, new = [], [a | b for a, b in zip(self.at_first, self.after, strict=True)]
        while old != new:
            old, new = new, [_through(deps, new) for deps in new]
        return new

    def mixed(self) -> tuple[int, list[int], str] | None:
        """(a parameter, others that its update depends on, the entry of the state where they meet)

        None if there is no such parameter; "" if they meet in no entry that is not one's own.
        """
        of_state = self.of_state()
        for i, deps in enumerate(self.updates):
            deps = _through(deps, of_state)
            if others := sorted(d for d in deps if isinstance(d, int) and d != i):
                return i, others, next(filter(None, map(self._place, _entries(deps))), "")
        return None

    def _place(self, j: int) -> str:
        """The name of an entry of the state in which parameters meet; "" if they do not."""
        path, _ = self.state[j]
        of_one = any(path[len(path) - len(p) :] == p for p in self.params)
        met = [d for d in self.at_first[j] | self.after[j] if isinstance(d, int)]
        return "" if of_one or len(met) < 2 else f"state{jax.tree_util.keystr(path)}"

    def keys(self) -> set[int]:
        """Those entries that are keys: by their type, or as uint32 from which a key is made."""

        def is_raw(j: int, a: Any) -> bool:
            return a.dtype == jnp.uint32 and any(
                ("state", j) in deps and a.shape[-1:] == (size,)
                for deps, size in self.random.raw_keys
            )

        return {j for j, (_, a) in enumerate(self.state) if is_key(a) or is_raw(j, a)}


def _entries(deps: set) -> list[int]:
    return sorted(d[1] for d in deps if isinstance(d, tuple))


def _through(deps: set, of_state: list[set]) -> set:
    """`deps` and what the state that is among them depends on."""
    return deps.union(*(of_state[j] for j in _entries(deps)))


def _check_noise(program: _Program) -> None:
    """Raises ValueError if what is drawn would be the same in every layer."""
    keys, of_state = program.keys(), program.of_state()
    if program.random_at_first.draws:
        raise ValueError(_SAME_NOISE.format(where="when it is initialized"))
    for deps in [*program.random.draws, *(of_state[j] for j in keys)]:
        if not keys & set(_entries(_through(deps, of_state))):
            raise ValueError(_SAME_NOISE.format(where="from a key that is not in its state"))


def _trace(tx: Any, params: Any) -> _Program:
    init, state = _traced("init(params)", tx.init, params)
    update, result = _traced("update(grads, state, params)", tx.update, params, state, params)
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Failed(f"`tx`.update must return (updates, state), not {result!s:.300}.")
    try:
        check_alike("tx.update(...)[0]", result[0], "the parameters", params)
        check_alike("tx.update(...)[1]", result[1], "the state", state)
    except ValueError as error:
        raise _Failed(str(error)) from None
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    entries = jax.tree_util.tree_leaves_with_path(state)
    own, of_state = [{i} for i in range(len(paths))], [{("state", j)} for j in range(len(entries))]
    random_at_first, random = Random([], []), Random([], [])
    at_first = dependencies(init.jaxpr, own, random_at_first)
    results = dependencies(update.jaxpr, [*own, *of_state, *own], random)
    updates, after = results[: len(own)], results[len(own) :]
    return _Program(paths, entries, at_first, updates, after, random_at_first, random)


def _traced(what: str, method: Any, *args: Any) -> tuple[Any, Any]:
    """(program, the shapes of its results)"""
    try:
        return jax.make_jaxpr(method, return_shape=True)(*args)
    except Exception as error:  # whatever optimizers raise
        raise _Failed(
            f"`tx`.{what} failed for the parameters of one layer. An optimizer that needs more "
            f"than these arguments cannot be offloaded. {type(error).__name__}: {error!s:.500}"
        ) from error
