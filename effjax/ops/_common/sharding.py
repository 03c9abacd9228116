"""What every operator needs to be right under jit, vmap, pmap and shard_map.

Inside ``shard_map(check_vma=True)`` the type of an array says over which mesh axes its value
*varies*. The cotangent of an array must have the array's own type, and where it varies over more
axes it must be summed over them: that sum is the gradient all-reduce of data-parallel training.
Under pmap, vmap and ``check_vma=False`` nothing varies as far as the types know, and the caller
reduces the gradients.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .arguments import describe

AxisNames = tuple[Hashable, ...]


def varying_axes(tree: Any) -> frozenset:
    """Return the mesh axes over which any array of a pytree varies, according to its type."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def manual_axes() -> frozenset:
    """The mesh axes that shard_map has mapped here."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.manual_axes)


def cast_to_varying(x: jax.Array, axes: frozenset = frozenset()) -> jax.Array:
    """Casts x to vary over `axes` too; the transpose is the sum over the axes that this adds."""
    kind = jax.typeof(x).manual_axis_type
    if kind.reduced:  # the caller wants this gradient unreduced: the cast's transpose says so
        x = lax.pcast(x, tuple(kind.reduced), to="varying")
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(tree: Any) -> Any:
    """Casts every array of `tree` to vary over the union of all their axes."""
    union = varying_axes(tree)
    return jax.tree.map(lambda x: cast_to_varying(x, union), tree)


def sum_cotangent(ct: jax.Array, primal: jax.Array) -> jax.Array:
    """Gives a cotangent the type of `primal`: sums it over the axes where only it varies."""
    extra = tuple(sorted(varying_axes(ct) - varying_axes(primal), key=str))
    return cast_to_varying(lax.psum(ct, extra) if extra else ct, varying_axes(primal))


def zeros(shape: Sequence[int], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary as `like` does: what a loop that fills them must start from."""
    return cast_to_varying(jnp.zeros(shape, dtype), varying_axes(like))


def explicit_axes(x: jax.Array) -> tuple:
    """The mesh axes over which x's type says how it is sharded."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def shard_like_features(p: jax.Array, x: jax.Array, features: Sequence[int]) -> jax.Array:
    """On a mesh with Explicit axes: shards a parameter as the axes `features` of x are."""
    if not explicit_axes(x):
        return p
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(*(sharding.spec[a] for a in features))
    return jax.sharding.reshard(p, NamedSharding(sharding.mesh, spec))


def as_axis_names(axis_name: Hashable | Sequence[Hashable] | None) -> AxisNames:
    """`axis_name` as a tuple: one name, several, or None for no axis."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for name in names:  # JAX takes a number for a position in an array's shape
        if name is None or isinstance(name, (int, float, complex)) or not _hashable(name):
            raise TypeError(
                f"`axis_name` must be a name or a tuple of names, not {describe(name)}."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"`axis_name` (={axis_name!r}) names an axis twice; name each axis once.")
    return names


def get_axis_sizes(names: AxisNames) -> tuple[int, ...]:
    """How many devices each axis has.

    To be asked for outside of a custom_vjp: to differentiate jit, checkpoint or scan of vmap, JAX
    runs the rules where vmap's axes are known to `psum` and `axis_index` of one name alone.
    """
    try:
        return tuple(int(lax.axis_size(name)) for name in names)
    except NameError:
        shown = names[0] if len(names) == 1 else names
        raise ValueError(
            f"`axis_name` (={shown!r}) is not mapped here. Call this inside pmap, shard_map or "
            "vmap over an axis of that name, or pass None: under plain jit the statistics are of "
            "the whole batch already. A BatchNorm needs its axis in training alone; in evaluation "
            "say model.eval() or use_running_average=True."
        ) from None


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def auto_shard_batch(fun: Callable, x: jax.Array) -> Callable:
    """On a mesh with Explicit axes: leaves ``fun(x, ...) -> (batch, replicated)`` to XLA.

    The first result has x's batch sharding, the second is replicated.
    """
    if not explicit_axes(x):
        return fun
    batch = PartitionSpec(*jax.typeof(x).sharding.spec[:-1])
    return auto_shard(fun, x, (batch, PartitionSpec()))


def auto_shard(fun: Callable, x: jax.Array, out_sharding: Any) -> Callable:
    """On a mesh with Explicit axes, those of x: `fun`, whose results have these shardings.

    Loops and slices inside an operator have no one right sharding type; XLA's partitioner finds
    one.
    """
    axes = explicit_axes(x)
    if not axes:
        return fun

    def run(*args):
        # jit needs no jax.set_mesh for it
        with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
            return jax.sharding.auto_axes(fun, axes=axes, out_sharding=out_sharding)(*args)

    return run


def run_per_device(fun: Callable, x: jax.Array) -> Callable:
    """On a mesh with Explicit axes: runs ``fun(arrays, parameters) -> y`` on each device's batch.

    arrays and y have a batch axis that is sharded as x's is, parameters are on every device whole.
    The transpose sums the gradients of the parameters, once.
    """
    axes = explicit_axes(x)
    if not axes:
        return fun
    sharding = jax.typeof(x).sharding
    batch = PartitionSpec(sharding.spec[0])

    def run(arrays, parameters):
        with jax.sharding.use_abstract_mesh(sharding.mesh):  # jit needs no jax.set_mesh for it
            specs = batch, PartitionSpec()
            arrays, parameters = (
                jax.tree.map(lambda a, spec=spec: jax.sharding.reshard(a, spec), tree)
                for tree, spec in zip((arrays, parameters), specs, strict=True)
            )
            mapped = jax.shard_map(fun, in_specs=specs, out_specs=batch, axis_names=set(axes))
            return mapped(arrays, parameters)

    return run
