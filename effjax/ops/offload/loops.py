"""The loops of offloading, also where JAX is asked for its next form of loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._common.sharding import cast_to_varying
from .placement import put, read, write
from .trees import Tree, is_key


def scan(
    body: Callable, carry: Tree, xs: Tree = None, *,
    length: int | None = None, reverse: bool = False, differentiated: bool = False,
) -> tuple[Tree, Tree]:  # fmt: skip
    """``lax.scan``, with arrays on the host in `carry` and among the results.

    With ``jax_scan3``, as far as it is in jax 0.12.0, lax.scan moves such arrays to the device,
    ignores `reverse` and has no gradient. This has one if it is to be `differentiated`: there it is
    no loop, and may differ in the last bit.
    """
    if not getattr(jax.config, "jax_scan3", False):
        return lax.scan(body, carry, xs, length=length, reverse=reverse)
    count = jax.tree.leaves(xs)[0].shape[0] if length is None else length
    if differentiated:
        return _unrolled(body, carry, xs, count)
    return _while(body, carry, xs, count, reverse)


def _unrolled(body: Callable, carry: Tree, xs: Tree, length: int) -> tuple[Tree, Tree]:
    results = []
    for i in range(length):
        carry, result = body(carry, jax.tree.map(lambda a, i=i: a[i], xs))
        results.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)


def _while(body: Callable, carry: Tree, xs: Tree, length: int, reverse: bool) -> tuple[Tree, Tree]:
    implementations = []  # of the keys among the results

    def results(i):
        found = body(carry, read(xs, i))[1]
        keys = filter(is_key, jax.tree.leaves(found))
        implementations.extend(map(jax.random.key_impl, keys))
        return found

    closed, shapes = jax.make_jaxpr(results, return_shape=True)(jnp.int32(0))
    rest = iter(implementations)
    buffers = [_empty(a, length, next(rest) if is_key(a) else None) for a in closed.out_avals]

    def step(state):
        done, carry, buffers = state
        i = length - 1 - done if reverse else done
        carry, result = body(carry, read(xs, i))
        return done + 1, carry, write(buffers, jax.tree.leaves(result), i)

    state = jnp.int32(0), carry, buffers
    _, carry, buffers = lax.while_loop(lambda state: state[0] < length, step, state)
    return carry, jax.tree.unflatten(jax.tree.structure(shapes), buffers)


def _empty(kind: Any, length: int, key_impl: Any) -> jax.Array:
    """[length, ...], of this type else, for a loop to write."""
    if key_impl is None:
        zero = jnp.zeros((), kind.dtype)
    else:
        zero = jax.random.key(0, impl=key_impl)
    zero = put(cast_to_varying(zero, kind.manual_axis_type.varying), kind.memory_space)
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec(None, *kind.sharding.spec))
    return lax.broadcast(zero, (length, *kind.shape), out_sharding=sharding)
