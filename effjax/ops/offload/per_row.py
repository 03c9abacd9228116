"""Optimizers that treat the rows of a parameter separately."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

# Transformations whose update of an element depends on no other element of the parameter, by the
# package and the name of the function that makes them. A wrong name would change results without an
# error; a missing one costs memory. Updates are told apart by their code, which a decorator such as
# functools.wraps cannot pretend to be. tests/ops/offload/test_per_row.py compares each with the
# update of whole matrices.
SEPARATE = {
    "optax": {
        "add_decayed_weights", "add_noise", "identity", "scale", "scale_by_adam", "scale_by_lion",
        "scale_by_rms", "scale_by_schedule", "trace",
    },
    "effjax": {"scale_by_adam_8bit", "stochastic_rounding"},
}  # fmt: skip
# Transformations of others, which they close over.
WRAPPERS = {
    "optax": {"chain", "masked", "partition", "with_extra_args_support"},
    "effjax": {"in_float32"},
}


def find_mixing(tx: Any) -> str | None:
    """Return the first transformation in `tx` that may mix rows, or None if there is none."""
    return next((name for name, kind, _ in _walk(tx.update) if kind == "unknown"), None)


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


def _walk(update: Any) -> Iterator[tuple[str, str, dict]]:
    """Yield (name, kind, closure) of each transformation in an update function."""
    owner = getattr(update, "__self__", None)
    if owner is not None:
        yield from _walk_multi_steps(update, owner)
        return
    code, space = getattr(update, "__code__", None), getattr(update, "__globals__", {})
    package = space.get("__name__", "").partition(".")[0]
    name = code.co_qualname.partition(".")[0] if code else type(update).__name__
    closure = dict(inspect.getclosurevars(update).nonlocals) if code else {}
    full_name = f"{package}.{name}" if package else name
    if name in WRAPPERS.get(package, ()):
        wrapped = [inner for value in closure.values() for inner in _transformations(value)]
        yield full_name, "wrapper" if wrapped else "unknown", closure
        for inner in wrapped:
            yield from _walk(inner)
    elif name in SEPARATE.get(package, ()) and all(map(_is_number, closure.values())):
        yield full_name, "separate", closure
    else:
        yield full_name, "unknown", closure


def _walk_multi_steps(update: Any, owner: Any) -> Iterator[tuple[str, str, dict]]:
    kind = type(owner)
    is_own = kind.__module__.partition(".")[0] == "optax" and kind.__name__ == "MultiSteps"
    if is_own and update.__func__ is kind.update:
        # Whether a step is skipped may depend on all rows; by default none is.
        skip = getattr(owner._should_skip_update_fn, "__code__", None)
        if skip and skip.co_qualname.startswith("MultiSteps.__init__.<locals>"):
            yield from _walk(owner._opt.update)
            return
    yield f"{kind.__module__.partition('.')[0]}.{kind.__name__}", "unknown", {}


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

    def select(fun: Callable) -> None:
        jax.eval_shape(lambda params: found.append(fun(params)), params)

    for name, _, closure in _walk(tx.update):
        key = {"optax.masked": "mask", "optax.partition": "param_labels"}.get(name)
        if key is not None and callable(closure[key]):
            select(closure[key])
    return [jax.tree.flatten(tree) for tree in found]
