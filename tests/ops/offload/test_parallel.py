"""Offloading over eight devices: values, memory kinds and collectives."""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from effjax import (
    host_init,
    offload_scan,
    offload_sequential,
    to_device,
    to_host,
)
from effjax.memory import collectives
from effjax.ops._common.platform import trace_for_platform
from tests.contexts import mesh_of
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_close,
    in_memory,
    init,
    kinds,
    layer,
    loss,
    on,
    params,
    value_and_grads,
)
from tests.tiers import exhaustive

BATCH = 32
LAYER_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 2 * WIDTH)


def inputs():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


@functools.cache
def want():
    return value_and_grads(lambda w, x: in_memory(layer, w, x, None), params(), inputs())


def close(got, expected):
    assert_close(got, expected, rtol=1e-5, atol=1e-6)


def gathered(program):
    """Return the all-gathers, and bytes and count of the all-reduces."""
    operations = collectives(program.as_text())
    gathers = [c for c in operations if c.kind == "all-gather"]
    return gathers, [(c.bytes, c.count) for c in operations if c.kind == "all-reduce"]


@pytest.mark.parametrize(
    ("kind", "spec", "policy"),
    [
        (AxisType.Auto, P(None, "i"), "everything"),
        exhaustive(AxisType.Auto, P(), "recomputed"),
        exhaustive(AxisType.Explicit, P(None, "i"), "recomputed"),
    ],
    ids=str,
)
def test_jit_over_mesh(kind, spec, policy):
    """Gathers and sums move one layer at a time, never a stack."""
    mesh = mesh_of((8,), ("i",), kind)
    with jax.set_mesh(mesh):
        w = {k: on(mesh, P() if k == "c" else spec, host=True) for k in params()}
        w = jax.device_put(params(), w)
        x = jax.device_put(inputs(), on(mesh, P("i")))
        total = lambda w, x: loss(offload_scan(layer, w, x, policy=POLICIES[policy]))  # noqa: E731
        run = jax.jit(jax.value_and_grad(total, (0, 1)))
        program = run.lower(w, x).compile()
        got = program(w, x)
    close(got, want())
    assert kinds(got[1][0]) == {"pinned_host"}
    gathers, reduced = gathered(program)
    if spec == P():
        assert not gathers
    assert all(c.bytes <= LAYER_BYTES for c in gathers)
    assert all(size <= LAYER_BYTES for size, _ in reduced)


@pytest.mark.parametrize(
    ("num_microbatches", "sequential", "dropout", "policy", "platform"),
    [
        (2, False, True, "everything", "cpu"),
        exhaustive(1, True, True, "dots", "cpu"),
        exhaustive(2, True, False, "everything", "cpu"),
        exhaustive(2, True, True, "dots", "tpu"),
    ],
)
def test_shard_map(num_microbatches, sequential, dropout, policy, platform):
    """Each gradient is reduced once, on the device, and nothing is gathered."""
    mesh, key = mesh_of((8,), ("i",)), KEY if dropout else None
    options = {"key": key, "num_microbatches": num_microbatches, "policy": POLICIES[policy]}

    def offloaded(w, x):
        if not sequential:
            return offload_scan(layer, w, x, **options)
        return offload_sequential([layer] * LAYERS, w, x, **options)

    def mapped(apply):
        def local(w, x):
            return jax.value_and_grad(lambda w, x: lax.pmean(loss(apply(w, x)), "i"), (0, 1))(w, x)

        specs = {"in_specs": (P(), P("i")), "out_specs": (P(), (P(), P("i")))}
        return jax.shard_map(local, mesh=mesh, **specs)

    plain = lambda w, x: in_memory(layer, w, x, key, num_microbatches)  # noqa: E731
    expected = jax.jit(mapped(plain))(params(), inputs())
    w = params()
    if sequential:
        w = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]
    w = jax.device_put(w, on(mesh, P(), host=True))
    run = jax.jit(mapped(offloaded), out_shardings=(None, (on(mesh, P(), host=True), None)))
    with trace_for_platform(platform):
        program = run.lower(w, inputs()).compile()
    value, (dw, dx) = program(w, inputs())
    assert kinds(dw) == {"pinned_host"}
    if sequential:
        dw = jax.tree.map(lambda *a: np.stack([np.asarray(b) for b in a]), *dw)
    close((value, (dw, dx)), expected)
    gathers, reduced = gathered(program)
    assert not gathers
    assert sum(b * n for b, n in reduced) == sum(a.nbytes for a in jax.tree.leaves(params())) + 4


@pytest.mark.parametrize("policy", ["recomputed", exhaustive("everything")])
def test_shard_map_without_check_vma(policy):
    """Each device returns the gradient of its own loss; the caller averages on the device."""
    mesh = mesh_of((8,), ("i",))

    def local(w, x):
        value, (dw, dx) = jax.value_and_grad(
            lambda w, x: loss(
                offload_scan(layer, w, x, num_microbatches=2, policy=POLICIES[policy])
            ),
            (0, 1),
        )(w, x)
        dw = to_host(lax.pmean(to_device(dw), "i"))
        return lax.pmean(value, "i"), (dw, dx / 8)

    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), (P(), P("i")))}
    run = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))
    close(run(jax.device_put(params(), on(mesh, P(), host=True)), inputs()), want())


@pytest.mark.parametrize(
    "way", ["types", exhaustive("jit"), exhaustive("explicit"), exhaustive("no types")]
)
def test_shared_array(way):
    """The gradients of an array used by two layers are added on each device."""
    mesh = mesh_of((8,), ("i",), AxisType.Explicit if way == "explicit" else AxisType.Auto)
    one = jax.tree.map(lambda a: a[0], params())
    mean = lambda a: a if way in ("jit", "explicit") else lax.pmean(a, "i")  # noqa: E731

    def grads(w, x):
        run = lambda w: offload_sequential([layer] * 2, [w, w], x)  # noqa: E731
        dw = jax.grad(lambda w: mean(loss(run(w))))(w)
        # Without check_vma each device returns the gradient of its own loss.
        return to_host(lax.pmean(to_device(dw), "i")) if way == "no types" else dw

    if way in ("types", "no types"):
        specs = {"in_specs": (P(), P("i")), "out_specs": P()}
        grads = jax.shard_map(grads, mesh=mesh, check_vma=way == "types", **specs)
    with jax.set_mesh(mesh):
        w = jax.device_put(one, on(mesh, P(), host=True))
        x = jax.device_put(inputs(), on(mesh, P("i")))
        got = jax.jit(grads, out_shardings=on(mesh, P(), host=True))(w, x)
    in_memory = lambda w: loss(layer(w, layer(w, inputs(), None), None))  # noqa: E731
    close(got, jax.jit(jax.grad(in_memory))(one))
    assert kinds(got) == {"pinned_host"}


@pytest.mark.parametrize("policy", ["everything", exhaustive("recomputed")])
def test_pmap_with_device_parameters(policy):
    def local(w, x):
        value, (dw, dx) = jax.value_and_grad(
            lambda w, x: loss(
                offload_scan(layer, w, x, params_in="device", policy=POLICIES[policy])
            ),
            (0, 1),
        )(w, x)
        return lax.pmean(value, "i"), (lax.pmean(dw, "i"), dx / 8)

    run = jax.pmap(local, axis_name="i", in_axes=(None, 0))
    value, (dw, dx) = run(params(), inputs().reshape(8, -1, WIDTH))
    first = jax.tree.map(lambda a: a[0], dw)
    close((value[0], (first, dx.reshape(BATCH, WIDTH))), want())


@pytest.mark.parametrize(
    ("sequential", "policy", "platform"),
    [
        (False, "everything", "cpu"),
        exhaustive(False, "recomputed", "cpu"),
        (True, "recomputed", "cpu"),
        exhaustive(True, "dots", "cpu"),
        exhaustive(True, "recomputed", "tpu"),
    ],
)
def test_microbatches_over_a_mesh_with_explicit_axes(sequential, policy, platform):
    """Each device splits its own rows: no rows move, and the order of the rows is kept."""
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    options = {"num_microbatches": 2, "policy": POLICIES[policy]}

    def apply(w, x):
        if not sequential:
            return offload_scan(layer, w, x, **options)
        w = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]
        return offload_sequential([layer] * LAYERS, w, x, params_in="device", **options)

    with jax.set_mesh(mesh):
        x = jax.device_put(inputs(), on(mesh, P("i")))
        w = jax.device_put(params(), on(mesh, P(), host=not sequential))
        run = jax.jit(jax.value_and_grad(lambda w, x: loss(apply(w, x)), (0, 1)))
        with trace_for_platform(platform):
            program = run.lower(w, x).compile()
        value, (dw, dx) = program(w, x)
    assert dx.sharding.spec[0] == "i"
    close((value, (dw, dx)), want())
    assert {c.kind for c in collectives(program.as_text())} <= {"all-reduce"}


def test_microbatches_on_explicit_axes_are_those_of_shard_map():
    def apply(w, x):
        return offload_scan(
            lambda w, x, key: (layer(w, x, key), x.sum(1)), w, x, num_microbatches=2, has_aux=True
        )

    results = []
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh, run = mesh_of((8,), ("i",), kind), apply
        if kind == AxisType.Auto:
            specs = {"in_specs": (P(), P("i")), "out_specs": (P("i"), P(None, None, "i"))}
            run = jax.shard_map(apply, mesh=mesh, **specs)
        with jax.set_mesh(mesh):
            x = jax.device_put(inputs(), on(mesh, P("i")))
            w = jax.device_put(params(), on(mesh, P(), host=True))
            results.append(jax.device_get(jax.jit(run)(w, x)))
    close(*results)
    assert results[0][1].shape == (LAYERS, 2, BATCH // 2)


def test_rejects_microbatches_that_split_the_rows_of_a_device():
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(inputs(), on(mesh, P("i")))
        w = jax.device_put(params(), on(mesh, P(), host=True))
        with pytest.raises(ValueError, match="32 rows are split over 8 devices"):
            jax.jit(lambda w, x: offload_scan(layer, w, x, num_microbatches=8))(w, x)
    mesh = mesh_of((2, 4), ("i", "j"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = {name: jax.device_put(inputs(), on(mesh, P(name))) for name in ("i", "j")}
        with pytest.raises(ValueError, match=r"\['i'\] is split over 2 and \['j'\] over 4"):
            jax.jit(
                lambda x: offload_scan(
                    lambda w, x, key: x, {"w": np.ones(2)}, x, params_in="device",
                    num_microbatches=2,
                )
            )(x)  # fmt: skip


def test_host_init_over_mesh():
    mesh = mesh_of((8,), ("i",))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    w = host_init(init, keys, shardings=on(mesh, P(None, "i")))
    close(w, params())
    assert {a.sharding.spec for a in jax.tree.leaves(w)} == {P(None, "i")}
    assert kinds(w) == {"pinned_host"}
    by_leaf = {
        "a": on(mesh, P(), host=True),
        "b": on(mesh, P(None, "i"), host=True),
        "c": on(mesh, P(), host=True),
    }
    w = host_init(init, keys, shardings=by_leaf)
    assert {name: a.sharding.spec for name, a in w.items()} == {
        "a": P(), "b": P(None, "i"), "c": P(),
    }  # fmt: skip


@pytest.mark.exhaustive
def test_dropout_does_not_depend_on_mesh():
    mesh = mesh_of((8,), ("i",))
    run = jax.jit(lambda w, x: offload_scan(layer, w, x, key=KEY))
    w = jax.device_put(params(), on(mesh, P(), host=True))
    x = jax.device_put(inputs(), on(mesh, P("i")))
    close(run(w, x), run(to_host(params()), inputs()))
