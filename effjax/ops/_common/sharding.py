"""Array types under jit, vmap, pmap and shard_map.

Inside ``shard_map(check_vma=True)`` the type of an array lists the mesh axes over which its value
*varies*. A cotangent must have the type of its primal. Where it varies over more axes, it must be
summed over them: this sum is the gradient all-reduce of data-parallel training. Under pmap, vmap
and ``check_vma=False`` types do not list axes, and the caller reduces the gradients.

On a mesh with Explicit axes, the type of an array contains its sharding.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisNames = tuple[Hashable, ...]

AnyMesh = Mesh | AbstractMesh


def varying_axes(tree: Any) -> frozenset:
    """Return the mesh axes over which any array of a pytree varies, according to its type."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def manual_axes() -> frozenset:
    """Return the mesh axes that an enclosing shard_map has mapped."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.manual_axes)


def cast_to_varying(x: jax.Array, axes: frozenset = frozenset()) -> jax.Array:
    """Cast x to vary over `axes`, and over the axes over which its type is reduced."""
    # The transpose of the last cast sums over the added axes.
    kind = jax.typeof(x).manual_axis_type
    # A reduced type asks for an unreduced gradient, which the transpose of this cast returns.
    if kind.reduced:
        x = lax.pcast(x, tuple(kind.reduced), to="varying")
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(tree: Any) -> Any:
    """Cast every array of a pytree to vary over the union of their axes."""
    union = varying_axes(tree)
    return jax.tree.map(lambda x: cast_to_varying(x, union), tree)


def sum_cotangent(ct: jax.Array, primal: jax.Array) -> jax.Array:
    """Cast a cotangent to the type of its primal; sum over axes where only the cotangent varies."""
    extra = tuple(sorted(varying_axes(ct) - varying_axes(primal), key=str))
    return cast_to_varying(lax.psum(ct, extra) if extra else ct, varying_axes(primal))


def zeros(shape: Sequence[int], dtype: Any, like: jax.Array) -> jax.Array:
    """Return zeros that vary as `like` does; the carry of a loop must have the results' type."""
    return cast_to_varying(jnp.zeros(shape, dtype), varying_axes(like))


def explicit_axes(x: jax.Array) -> tuple:
    """Return the Explicit axes of the mesh in the type of x."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def explicit_spec(x: jax.Array) -> tuple:
    """Return the mesh axes of each array axis of x; None for an axis that is not sharded."""
    spec = jax.typeof(x).sharding.spec
    return *spec, *[None] * (jnp.ndim(x) - len(spec))


def reshape(x: jax.Array, shape: Sequence[int], spec: Sequence) -> jax.Array:
    """Reshape x; on a mesh with Explicit axes, the result has the sharding `spec`."""
    if not explicit_axes(x):
        return x.reshape(shape)
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return lax.reshape(x, shape, out_sharding=sharding)


def shard_like_features(p: jax.Array, x: jax.Array, features: Sequence[int]) -> jax.Array:
    """On a mesh with Explicit axes, shard p as the axes `features` of x."""
    if not explicit_axes(x):
        return p
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(*(sharding.spec[a] for a in features))
    return jax.sharding.reshard(p, NamedSharding(sharding.mesh, spec))


def as_axis_names(axis_name: Hashable | Sequence[Hashable] | None) -> AxisNames:
    """Return `axis_name` (one name, several, or None) as a tuple."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    # JAX would take a number for the position of an array axis.
    is_name = [not (n is None or isinstance(n, (int, float, complex))) for n in names]
    if not all(is_name) or len(set(names)) != len(names):
        raise ValueError(f"`axis_name` (={axis_name!r}) must be a name or several different names.")
    return names


def with_auto_axes_over_batch(fun: Callable, x: jax.Array) -> Callable:
    """On a mesh with Explicit axes, leave the sharding inside ``fun(x, ...)`` to XLA.

    The first result has the sharding of x except for its last axis; the second is replicated.
    """
    if not explicit_axes(x):
        return fun
    batch = PartitionSpec(*jax.typeof(x).sharding.spec[:-1])
    return with_auto_axes(fun, x, (batch, PartitionSpec()))


def with_auto_axes(fun: Callable, x: jax.Array, out_sharding: Any) -> Callable:
    """On the Explicit axes of the mesh of x, leave the sharding inside `fun` to XLA."""
    # The loops and slices inside an operator have no single correct sharding type. XLA's
    # partitioner chooses one.
    axes = explicit_axes(x)
    if not axes:
        return fun

    def run(*args):
        # jit does not require jax.set_mesh, but auto_axes does.
        with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
            return jax.sharding.auto_axes(fun, axes=axes, out_sharding=out_sharding)(*args)

    return run


def run_per_device(fun: Callable, x: jax.Array, mesh: AnyMesh | None = None) -> Callable:
    """On a mesh with Explicit axes, run ``fun(arrays, parameters) -> y`` on each device's batch.

    `arrays` and y have a batch axis that is sharded as that of x; the parameters are replicated.
    The transpose sums the gradients of the parameters once. If the axes are Auto, which x does not
    show, the batch is sharded over all axes of `mesh`, if it is given.
    """
    axes = explicit_axes(x)
    if not axes:
        if mesh is None or mesh.size == 1 or manual_axes():
            return fun
        batch = PartitionSpec(mesh.axis_names)
        specs = batch, PartitionSpec()
        return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=batch)
    sharding = jax.typeof(x).sharding
    batch = PartitionSpec(sharding.spec[0])

    def run(arrays, parameters):
        # jit does not require jax.set_mesh, but reshard and shard_map do.
        with jax.sharding.use_abstract_mesh(sharding.mesh):
            specs = batch, PartitionSpec()
            arrays, parameters = (
                jax.tree.map(lambda a, spec=spec: jax.sharding.reshard(a, spec), tree)
                for tree, spec in zip((arrays, parameters), specs, strict=True)
            )
            mapped = jax.shard_map(fun, in_specs=specs, out_specs=batch, axis_names=set(axes))
            return mapped(arrays, parameters)

    return run
