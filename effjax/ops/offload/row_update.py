"""Optimizer updates of parameters in host memory, the rows of large ones in chunks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from .._common.arguments import describe
from .._common.sharding import explicit_axes, explicit_spec, reshape
from .backends import barrier, mark_host_slices
from .host_init import init_in_place, place_state, state_space
from .mixing import check_per_leaf, find_owners, find_state_keys
from .optimizer import apply_optimizer, fold_state_keys
from .placement import Space, put, space_of
from .trees import Tree, count_row_shards, shapes_of

# The rows of a parameter, its gradient and its state that are on the device at a time.
CHUNK_BYTES = 64 * 2**20
WHOLE_UPDATE = "update_whole_parameter"  # in the names of operations
_TILE = 32  # rows; the largest tile of a TPU
UpdateRows = Callable[[Any, Any], bool]  # (path, leaf), see `offload_train_step`


class LargeLeaf(NamedTuple):
    """A parameter that is updated on its own, in chunks of rows or whole.

    A chunk is `size` rows of each of `shards` equal parts of the rows, so that devices over which
    the rows are sharded exchange none.
    """

    index: int
    state: list[int]  # the leaves of the optimizer's state that belong to it
    in_rows: bool
    shards: int = 1
    size: int = 0
    num_rows: int = 0  # of each shard


class RowPlan(NamedTuple):
    """Static description of the update of a pytree of parameters, one large parameter at a time."""

    params: Tree  # shapes
    state: Tree  # shapes
    keys: set[int]  # the leaves of the state that are PRNG keys
    large: dict[int, LargeLeaf]

    @property
    def small(self) -> tuple[list[int], list[int]]:
        """The leaves of params, and of the state, that belong to no large parameter."""
        of_large = {k for leaf in self.large.values() for k in leaf.state}
        leaves, state = jax.tree.leaves(self.params), jax.tree.leaves(self.state)
        return (
            [j for j in range(len(leaves)) if j not in self.large],
            [k for k in range(len(state)) if k not in of_large],
        )


def has_huge_array(params: Tree) -> bool:
    """Return True if an array is too large to be updated whole, together with its module."""
    return any(_num_bytes(a) > 8 * CHUNK_BYTES for a in jax.tree.leaves(params))


def plan_rows(tx: Any, params: Tree, update_rows: UpdateRows | None) -> RowPlan:
    """Choose the large parameters, and the chunks of those that `update_rows` selects.

    Raises:
        ValueError: if tx does not treat every parameter separately, or if `update_rows` selects a
            large parameter whose state has not a row for each of its rows.
        TypeError: if `update_rows` does not return a bool.
    """
    shapes = shapes_of(params)
    plan = RowPlan(shapes, jax.eval_shape(tx.init, shapes), set(), {})
    leaves, state = jax.tree.leaves(params), jax.tree.leaves(plan.state)
    if not leaves:
        return plan
    check_per_leaf(tx, shapes)
    plan = plan._replace(keys=find_state_keys(tx, shapes))
    selected, owners = select_rows(update_rows, params), find_owners(tx, shapes)
    # An entry of several parameters, such as a norm for logging, needs all of them at a time.
    shared = [k for k, owner in enumerate(owners) if len(owner) > 1]
    for j, a in enumerate(leaves):
        of_leaf = [k for k, owner in enumerate(owners) if owner == {j}]
        num_bytes = 2 * _num_bytes(a) + sum(_num_bytes(state[k]) for k in of_leaf)
        if not a.ndim or num_bytes <= CHUNK_BYTES:
            continue
        if j in selected:
            leaf = _split_rows(a, j, of_leaf, num_bytes)
            _check_rows(tx, plan, leaf, shared)
            plan.large[j] = leaf
        elif not shared:
            plan.large[j] = LargeLeaf(j, of_leaf, in_rows=False)
    return plan


def select_rows(update_rows: UpdateRows | None, params: Tree) -> list[int]:
    """Return the indices of the parameters that `update_rows` selects."""
    selected = []
    for j, (path, a) in enumerate(jax.tree_util.tree_leaves_with_path(shapes_of(params))):
        answer = update_rows is not None and update_rows(path, a)
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(
                f"`update_rows` must return a bool, not {describe(answer)}, for "
                f"{jax.tree_util.keystr(path)}."
            )
        selected += [j] if answer else []
    return selected


def check_selects(update_rows: UpdateRows | None, trees: Sequence[Tree]) -> None:
    """Raise ValueError if `update_rows` is given, but selects no parameter of these trees."""
    if update_rows is not None and not any(select_rows(update_rows, tree) for tree in trees):
        names = [name for tree in trees for name in _leaf_names(tree)]
        listed = ", ".join(names[:3]) + (", …" if names[3:] else "")
        raise ValueError(
            "`update_rows` must select a parameter that is trained and in host memory, not none "
            f"of {listed or 'them, because there are none'}."
        )


def _leaf_names(tree: Tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _split_rows(a: jax.Array, j: int, state: list[int], num_bytes: int) -> LargeLeaf:
    """Return the chunks of a parameter that takes `num_bytes` with its gradient and state."""
    shards = _count_shards(a)
    num_rows = a.shape[0] // shards
    size = max(CHUNK_BYTES * a.shape[0] // (num_bytes * shards), 1)
    size = min(size - size % _TILE if size > _TILE else size, num_rows)
    return LargeLeaf(j, state, True, shards, size, num_rows)


def _check_rows(tx: Any, plan: RowPlan, leaf: LargeLeaf, shared: list[int]) -> None:
    """Raise ValueError unless the optimizer's state for a chunk is a chunk of the state."""
    leaves, structure = jax.tree.flatten(plan.params)
    num_rows, *shape = leaves[leaf.index].shape
    # The shape for other numbers of rows tells rows from an axis of the same length, such as that
    # of a factored moment of a square matrix.
    size = leaf.shards * leaf.size
    leaves[leaf.index] = jax.ShapeDtypeStruct((size, *shape), leaves[leaf.index].dtype)
    of_chunk = jax.eval_shape(tx.init, structure.unflatten(leaves))
    has_same_parts = jax.tree.structure(of_chunk) == jax.tree.structure(plan.state)
    for k in [*shared, *leaf.state]:
        entry = jax.tree.leaves(plan.state)[k].shape
        is_row = has_same_parts and entry[:1] == (num_rows,) and num_rows < 2**31  # as indices
        if k in shared or not is_row or jax.tree.leaves(of_chunk)[k].shape != (size, *entry[1:]):
            raise ValueError(
                f"`update_rows` must return False for {_leaf_names(plan.params)[leaf.index]} of "
                f"shape {(num_rows, *shape)}: the optimizer's state{_leaf_names(plan.state)[k]} of "
                f"shape {entry} does not consist of one row for each row of it."
            )


def _num_bytes(a: Any) -> int:
    return a.size * getattr(a.dtype, "itemsize", 0)


def _count_shards(a: jax.Array) -> int:
    """Return a number of parts of the rows such that each part is on one device.

    On a mesh with Auto axes, the rows may be sharded over any of them.
    """
    if explicit_axes(a):
        return count_row_shards([a])
    mesh = jax.typeof(a).sharding.mesh
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    devices = math.prod(size for size, kind in sizes if kind == AxisType.Auto)
    return math.gcd(a.shape[0], devices)


def init_rows(tx: Any, params: Tree, owners: Tree, update_rows: UpdateRows | None) -> Tree:
    """Return the state of an optimizer for parameters in host memory.

    Arrays are in host memory, scalars on the device. `owners` are parameters as in `place_state`,
    frozen ones included. Raises the errors of `plan_rows`, before a step is compiled.
    """
    plan_rows(tx, params, update_rows)

    def run(params: Tree) -> Tree:
        state = jax.tree.map(jnp.asarray, tx.init(put(params, Space.Device)))
        return jax.tree.map(lambda a: put(a, state_space(a.ndim, Space.Host)), state)

    return init_in_place(run, params, lambda shapes: place_state(shapes, owners))


def update_params(
    tx: Any, plan: RowPlan, params: Tree, state: Tree, grads: Tree, key_offset: int
) -> tuple[Tree, Tree]:
    """Return the parameters and the state after a step of tx, in their memory.

    Args:
        tx: the optimizer.
        plan: the result of `plan_rows` for the optimizer, or for one that tx extends by operations
            on each element.
        params: the parameters, in host memory.
        state: the state of the optimizer, in host memory except for scalars.
        grads: the gradients, in any memory.
        key_offset: chunk i uses the PRNG keys of the state folded with the number key_offset + i.
    """
    leaves, structure = jax.tree.flatten(params)
    entries, state_structure = jax.tree.flatten(state)
    grads = structure.flatten_up_to(grads)
    small, small_state = plan.small
    # All updates see the old values of the state that belongs to no parameter, such as counts.
    common = put({k: entries[k] for k in small_state}, Space.Device)

    def apply(w: dict, s: dict, g: dict, i: Any = None) -> tuple[list, list]:
        return _apply(tx, plan, w, common | s, g, i)

    now = put([{j: a[j] for j in small} for a in (leaves, grads)], Space.Device)
    new, new_state = apply(now[0], {}, now[1])
    small_results = [new[j] for j in small], [new_state[k] for k in small_state]
    for j, leaf in plan.large.items():
        old = [leaves[j], *(entries[k] for k in leaf.state)]

        def run(operands: Sequence[jax.Array], i: Any, leaf: LargeLeaf = leaf) -> list:
            w, *s, g = operands
            new, new_state = apply(
                {leaf.index: w}, dict(zip(leaf.state, s, strict=True)), {leaf.index: g}, i
            )
            return [new[leaf.index], *(new_state[k] for k in leaf.state)]

        if leaf.in_rows:
            result = _run_chunks(run, leaf, old, grads[j], key_offset)
        else:
            with jax.named_scope(WHOLE_UPDATE):
                result = run(put([*old, grads[j]], Space.Device), None)
                result = [put(b, space_of(a)) for a, b in zip(old, result, strict=True)]
        # Otherwise XLA could update all large parameters at the same time.
        (leaves[j], *result), grads = barrier((result, grads))
        for k, a in zip(leaf.state, result, strict=True):
            entries[k] = a
    for old, indices, results in zip((leaves, entries), plan.small, small_results, strict=True):
        for k, a in zip(indices, results, strict=True):
            old[k] = put(a, space_of(old[k]))
    return structure.unflatten(leaves), state_structure.unflatten(entries)


def _apply(
    tx: Any, plan: RowPlan, params: dict, state: dict, grads: dict, i: Any
) -> tuple[list, list]:
    """Apply the optimizer with zeros, which have no effect, for the arrays that are not given."""

    def fill(shapes: Tree, given: dict) -> Tree:
        leaves, structure = jax.tree.flatten(shapes)
        zeros = (jnp.zeros(a.shape, a.dtype) for a in leaves)
        return structure.unflatten([given.get(k, zero) for k, zero in enumerate(zeros)])

    now = fill(plan.state, state)
    if i is not None:
        now = fold_state_keys(now, plan.keys, i)
    new = apply_optimizer(tx, fill(plan.params, params), now, fill(plan.params, grads))
    return jax.tree.leaves(new[0]), jax.tree.leaves(new[1])


# Chunks of rows. The loop works on views [shards, rows, ...] of the arrays.


def _run_chunks(
    run: Any, leaf: LargeLeaf, old: list, grad: jax.Array, key_offset: int
) -> list[jax.Array]:
    """Return the new values of a large parameter and its state: ``run(rows, i)`` of each chunk."""
    views, size = [_as_view(a, leaf.shards) for a in old], leaf.size
    grad = _as_view(grad, leaf.shards)
    num_chunks, rest = leaf.num_rows // size, leaf.num_rows % size

    def fetch(views: list, i: Any, count: int = size) -> list:
        parts = [lax.dynamic_slice_in_dim(a, i * size, count, 1) for a in [*views, grad]]
        return [_from_view(a) for a in put(parts, Space.Device)]

    def store(views: list, rows: list, i: Any) -> list:
        new = [_as_view(a, leaf.shards) for a in run(rows, key_offset + i)]
        return [
            lax.dynamic_update_slice_in_dim(a, put(b, space_of(a)), i * size, 1)
            for a, b in zip(views, new, strict=True)
        ]

    # The next chunk is read before this one is written, or XLA would copy the whole array. The
    # last chunk is outside of the loop, so that all indices are linear in the loop counter.
    def body(carry, _):
        i, views, now = carry
        views, ahead = barrier((views, fetch(views, i + 1)))
        return (i + 1, store(views, now, i), ahead), None

    start = mark_host_slices()
    carry = start, views, fetch(views, start)
    (i, views, now), _ = lax.scan(body, carry, None, length=num_chunks - 1)
    views = store(views, now, i)
    if rest:
        views = store(views, fetch(views, i + 1, rest), i + 1)
    return [_from_view(a) for a in views]


def _as_view(a: jax.Array, shards: int) -> jax.Array:
    rows, *spec = explicit_spec(a)
    shape = shards, a.shape[0] // shards, *a.shape[1:]
    return reshape(a, shape, (rows, None, *spec))


def _from_view(a: jax.Array) -> jax.Array:
    rows, _, *spec = explicit_spec(a)
    return reshape(a, (a.shape[0] * a.shape[1], *a.shape[2:]), (rows, *spec))
