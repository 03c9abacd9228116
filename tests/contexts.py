"""Contexts: ways of running one operator, most over eight devices, with the same global gradients.

An operator under test is ``op(params, batch, axis_name) -> (y, aux)``: `batch` is a dict of arrays
with a leading batch axis that holds at least ``x`` and ``w`` (weights of the loss, of y's shape),
aux is the same on every device.
A context returns ``(loss, aux, dparams, dx)`` of the mean loss over the whole batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import native

DEVICES = 8


def local_loss(y, w):
    return jnp.mean(jnp.sin(y) * w + 0.3 * y * y)


def value_and_grads(op, params, batch, axis_name, reduce=lambda loss: loss):
    def loss(params, x):
        y, aux = op(params, {**batch, "x": x}, axis_name)
        return reduce(local_loss(y, batch["w"])), aux

    (value, aux), (dparams, dx) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        params, batch["x"]
    )
    return value, aux, dparams, dx


def single_device(op, params, batch):
    return jax.jit(lambda p, b: value_and_grads(op, p, b, None))(params, batch)


def mesh_of(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def jit_global(kind, op, params, batch):
    with jax.set_mesh(mesh := mesh_of((DEVICES,), ("i",), kind)):
        return single_device(op, *_place(mesh, params, batch))


def jit_explicit_arrays(op, params, batch):
    """Run without `jax.set_mesh`; the mesh is known from the types of the arguments."""
    return single_device(op, *_place(mesh_of((DEVICES,), ("i",), AxisType.Explicit), params, batch))


def _place(mesh, params, batch):
    params = jax.device_put(params, NamedSharding(mesh, P()))
    return params, jax.device_put(batch, NamedSharding(mesh, P("i")))


def _two_batches(batch):
    """Stack a batch and the same batch with its examples in reverse order."""
    return jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), batch)


def vmap_over_batches(op, params, batch):
    run = jax.vmap(lambda p, b: value_and_grads(op, p, b, None), (None, 0))
    value, aux, dparams, dx = jax.jit(run)(params, _two_batches(batch))
    mean = functools.partial(jax.tree.map, lambda a: a.mean(0))
    return mean(value), mean(aux), mean(dparams), (dx[0] + dx[1, ::-1]) / 2


def scan_of_checkpoint(op, params, batch):
    """Differentiate a scan over batches, each recomputed in the backward pass."""
    batches = _two_batches(batch)

    def loss(params, x):
        def body(total, batch):
            y, aux = op(params, batch, None)
            return total + local_loss(y, batch["w"]) / 2, aux

        value, aux = lax.scan(jax.checkpoint(body), 0.0, {**batches, "x": x})
        return value, jax.tree.map(lambda a: a[0], aux)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, aux), (dparams, dx) = jax.jit(run)(params, batches["x"])
    return value, aux, dparams, dx[0] + dx[1, ::-1]


def exported(op, params, batch):
    """Export the gradients for a batch of any size, and run what comes back from the bytes."""

    def run(params, batch):
        return value_and_grads(op, params, batch, None)

    def with_any_size(a):
        return jax.ShapeDtypeStruct((n, *a.shape[1:]), jnp.asarray(a).dtype)

    (n,) = export.symbolic_shape("n")
    args, structure = jax.tree.flatten((params, jax.tree.map(with_any_size, batch)))
    flat = jax.jit(lambda *args: jax.tree.leaves(run(*structure.unflatten(args))))
    program = export.export(flat, disabled_checks=native.export_checks())(*args)
    results = export.deserialize(program.serialize()).call(*jax.tree.leaves((params, batch)))
    return jax.tree.structure(jax.eval_shape(run, params, batch)).unflatten(results)


def _per_device(op, params, batch):
    """Return the mean of the gradients of the local losses, as under pmap and vmap."""
    loss, aux, dparams, dx = value_and_grads(op, params, batch, "i")
    return lax.pmean(loss, "i"), aux, lax.pmean(dparams, "i"), dx / DEVICES


def _split(batch):
    # JAX arrays, because custom_vjp fails on NumPy arrays from a vmap inside jit.
    return jax.tree.map(lambda a: jnp.asarray(a).reshape(DEVICES, -1, *a.shape[1:]), batch)


def _join(result):
    loss, aux, dparams, dx = result
    first = functools.partial(jax.tree.map, lambda a: a[0])
    return first(loss), first(aux), first(dparams), dx.reshape(-1, *dx.shape[2:])


def pmap(op, params, batch):
    run = jax.pmap(functools.partial(_per_device, op), axis_name="i", in_axes=(None, 0))
    return _join(run(params, _split(batch)))


def vmap_of_grad(op, params, batch):
    run = jax.vmap(functools.partial(_per_device, op), axis_name="i", in_axes=(None, 0))
    return _join(jax.jit(run)(params, _split(batch)))


def grad_of_vmap(between, op, params, batch):
    """Differentiate outside vmap; with `between`=jit, JAX runs custom rules without vmap's axis."""

    def loss(params, x):
        def one(x, batch):
            y, aux = op(params, {**batch, "x": x}, "i")
            return local_loss(y, batch["w"]), aux

        losses, aux = jax.vmap(one, axis_name="i")(x, split)
        return losses.mean(), jax.tree.map(lambda a: a[0], aux)

    split = _split(batch)
    run = jax.value_and_grad(between(loss), argnums=(0, 1), has_aux=True)
    (value, aux), (dparams, dx) = jax.jit(run)(params, split["x"])
    return value, aux, dparams, dx.reshape(batch["x"].shape)


def in_scan(f):
    """Return the function in a scan of length 1."""
    return lambda *args: jax.tree.map(
        lambda a: a[0], lax.scan(lambda c, _: (c, f(*args)), None, None, length=1)[1]
    )


def grad_of_shard_map(check_vma, names, op, params, batch):
    """Differentiate a loss that shard_map reduces."""
    mesh = mesh_of((4, 2) if len(names) == 2 else (DEVICES,), names)

    def local(params, batch):
        y, aux = op(params, batch, names)
        return lax.pmean(local_loss(y, batch["w"]), names), aux

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(names)), out_specs=(P(), P()), check_vma=check_vma
    )
    run = jax.value_and_grad(
        lambda p, x: mapped(p, {**batch, "x": x}), argnums=(0, 1), has_aux=True
    )
    (value, aux), (dparams, dx) = jax.jit(run)(params, batch["x"])
    return value, aux, dparams, dx


def _shard_map(inner, op, params, batch, check_vma=True):
    out_specs = (P(), P(), P(), P("i"))
    mapped = jax.shard_map(
        functools.partial(inner, op),
        mesh=mesh_of((DEVICES,), ("i",)),
        in_specs=(P(), P("i")),
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return jax.jit(mapped)(params, batch)


def shard_map_of_grad(op, params, batch):
    """Differentiate inside shard_map; gradients of replicated parameters are reduced."""
    return _shard_map(
        lambda *a: value_and_grads(*a, "i", lambda loss: lax.pmean(loss, "i")), op, params, batch
    )


def shard_map_of_grad_unchecked(op, params, batch):
    """Differentiate inside shard_map with check_vma=False; the caller reduces the gradients."""
    return _shard_map(_per_device, op, params, batch, check_vma=False)


def shard_map_varying_params(op, params, batch):
    """Differentiate with parameters cast to varying; the caller reduces their gradients."""

    def inner(op, params, batch):
        params = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params)
        return _per_device(op, params, batch)

    return _shard_map(inner, op, params, batch)


CONTEXTS = {
    "jit_auto": functools.partial(jit_global, AxisType.Auto),
    "jit_explicit": functools.partial(jit_global, AxisType.Explicit),
    "pmap": pmap,
    "vmap_of_grad": vmap_of_grad,
    "grad_of_vmap": functools.partial(grad_of_vmap, lambda loss: loss),
    "grad_of_jit_of_vmap": functools.partial(grad_of_vmap, jax.jit),
    "grad_of_shard_map": functools.partial(grad_of_shard_map, True, ("i",)),
    "grad_of_shard_map_unchecked": functools.partial(grad_of_shard_map, False, ("i",)),
    "grad_of_shard_map_two_axes": functools.partial(grad_of_shard_map, True, ("i", "j")),
    "shard_map_of_grad": shard_map_of_grad,
    "shard_map_of_grad_unchecked": shard_map_of_grad_unchecked,
    "shard_map_varying_params": shard_map_varying_params,
}


def gradients_with_parameters_of_each_device(op, params, batch, how):
    """Differentiate the sum of all losses, where each device has different parameters."""
    factors = 1 + np.arange(DEVICES) / DEVICES
    params = jax.tree.map(lambda p: np.multiply.outer(factors, p), params)

    def total(params, x):
        if how == "vmap":
            one = lambda p, b: local_loss(op(p, b, "i"), b["w"])  # noqa: E731
            return jax.vmap(one, axis_name="i")(params, _split({**batch, "x": x})).sum()

        def local(params, batch):
            y = op(jax.tree.map(lambda p: p[0], params), batch, "i")
            return lax.psum(local_loss(y, batch["w"]), "i")

        mesh = mesh_of((DEVICES,), ("i",))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P())
        return mapped(params, {**batch, "x": x})

    return jax.jit(jax.grad(total, argnums=(0, 1)))(params, batch["x"])


def assert_trees_close(got, want, tolerance):
    """Assert that leaves differ by at most `tolerance` times the largest reference value."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for a, b in zip(got_leaves, want_leaves, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-300)
        )
