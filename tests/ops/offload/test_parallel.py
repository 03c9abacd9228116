"""Offloading over eight devices: values, memory kinds and collectives."""

import jax
import jax.numpy as jnp
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
)
from tests.tiers import vary

BATCH = 32
LAYER_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 2 * WIDTH)


def inputs():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def split(w):
    return [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]


def run(context, apply, w, spec, host=False, platform="cpu"):
    """Return (loss, gradients of w and x, the collectives of the program)."""
    is_mapped = context not in ("auto", "explicit")
    mean = (lambda a: lax.pmean(a, "i")) if is_mapped else (lambda a: a)
    has_types = context != "shard_map without types"

    def local(w, x):
        if has_types and context != "pmap":
            return jax.value_and_grad(lambda w, x: mean(loss(apply(w, x))), (0, 1))(w, x)
        # Each device has the gradient of its own loss. Average on the device.
        value, (dw, dx) = jax.value_and_grad(lambda w, x: loss(apply(w, x)), (0, 1))(w, x)
        dw = mean(to_device(dw))
        return mean(value), (to_host(dw) if host else dw, dx / 8)

    if context == "pmap":
        mapped = jax.pmap(local, axis_name="i", in_axes=(None, 0))
        value, (dw, dx) = mapped(w, inputs().reshape(8, -1, WIDTH))
        first = jax.tree.map(lambda a: a[0], dw)
        return (value[0], (first, dx.reshape(BATCH, WIDTH))), []
    mesh = mesh_of((8,), ("i",), AxisType.Explicit if context == "explicit" else AxisType.Auto)
    fun = local
    if is_mapped:
        specs = {"in_specs": (P(), P("i")), "out_specs": (P(), (P(), P("i")))}
        fun = jax.shard_map(local, mesh=mesh, check_vma=has_types, **specs)
    with jax.set_mesh(mesh), trace_for_platform(platform):
        # The vectors are whole on each device.
        place = lambda a: jax.device_put(a, on(mesh, spec if a.ndim > 2 else P(), host))  # noqa: E731
        w, x = jax.tree.map(place, w), jax.device_put(inputs(), on(mesh, P("i")))
        dw = jax.tree.map(lambda a: a.sharding, w)
        program = jax.jit(fun, out_shardings=(None, (dw, None))).lower(w, x).compile()
        results = program(w, x)
    return results, collectives(program.as_text())


FROZEN = {"trainable": {"a": True, "b": False, "c": True}}


@vary(
    ("context", "form", "spec", "options", "platform"),
    [
        ("auto", "stack", P(None, "i"), {"policy": "everything"}, "cpu"),
        ("explicit", "stack", P(), {"num_microbatches": 2}, "cpu"),
        ("explicit", "list", P(), {"num_microbatches": 2, "policy": "dots"}, "tpu"),
        ("shard_map", "stack", P(), {"key": KEY, "policy": "everything"}, "cpu"),
        ("shard_map", "list", P(), {"key": KEY, "num_microbatches": 2, "policy": "dots"}, "tpu"),
        ("shard_map without types", "stack", P(), {"num_microbatches": 2}, "cpu"),
        ("pmap", "stack", P(), {"policy": "everything"}, "cpu"),
        ("explicit", "stack", P(), FROZEN, "cpu"),
        ("shard_map", "stack", P(), FROZEN, "cpu"),
    ],
)
def test_gradients_over_devices(context, form, spec, options, platform):
    """Gathers and sums move one layer at a time, never a stack, and no rows."""
    options = {"policy": "recomputed", "key": None, "num_microbatches": 1, **options}
    plain = lambda w, x: in_memory(layer, w, x, options["key"], options["num_microbatches"])  # noqa: E731
    want, _ = run("auto" if context == "explicit" else context, plain, params(), P())
    if "trainable" in options:
        want[1][0]["b"] = jnp.zeros_like(params()["b"])
    w, host = params() if form == "stack" else split(params()), context != "pmap"
    where = {"params_in": "host" if host else "device"}

    def apply(w, x):
        more = {**options, **where, "policy": POLICIES[options["policy"]]}
        if form == "stack":
            return offload_scan(layer, w, x, **more)
        return offload_sequential([layer] * LAYERS, w, x, **more)

    (value, (dw, dx)), operations = run(context, apply, w, spec, host, platform)
    assert kinds(dw) == {"pinned_host" if host else "device"}
    if form == "list":
        dw = jax.tree.map(lambda *a: np.stack([np.asarray(b) for b in a]), *dw)
    assert_close((value, (dw, dx)), want, 1e-5, 1e-6)
    if context != "shard_map without types":  # there the caller averages the stack
        assert all(c.bytes <= LAYER_BYTES for c in operations)
    if spec == P():
        assert {c.kind for c in operations} <= {"all-reduce"}
    if context == "shard_map" and "trainable" not in options:  # each gradient is reduced once
        reduced = sum(c.bytes * c.count for c in operations)
        assert reduced == sum(a.nbytes for a in jax.tree.leaves(params())) + 4


@vary("way", ["types", "jit", "explicit", "no types"])
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
    assert_close(got, jax.jit(jax.grad(in_memory))(one), 1e-5, 1e-6)
    assert kinds(got) == {"pinned_host"}


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
    assert_close(*results, 1e-5, 1e-6)
    assert results[0][1].shape == (LAYERS, 2, BATCH // 2)


def test_rejects_microbatches_that_split_the_rows_of_a_device():
    mesh = mesh_of((2, 4), ("i", "j"), AxisType.Explicit)
    by_both = jax.device_put(inputs(), on(mesh, P(("i", "j"))))
    differently = {name: jax.device_put(inputs(), on(mesh, P(name))) for name in ("i", "j")}
    w = {"w": np.ones(2)}
    for x, count, match in (
        (by_both, 8, "32 rows are split over 8 devices"),
        (differently, 2, r"\['i'\] is split over 2 and \['j'\] over 4"),
    ):
        options = {"params_in": "device", "num_microbatches": count}
        run = jax.jit(lambda x, options=options: offload_scan(lambda w, x, key: x, w, x, **options))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=match):
            run(x)


def test_host_init_over_mesh():
    mesh = mesh_of((8,), ("i",))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    w = host_init(init, keys, shardings=on(mesh, P(None, "i")))
    assert_close(w, params(), 1e-5, 1e-6)
    assert {a.sharding.spec for a in jax.tree.leaves(w)} == {P(None, "i")}
    assert kinds(w) == {"pinned_host"}
    specs = {"a": P(), "b": P(None, "i"), "c": P()}
    by_leaf = {name: on(mesh, spec, host=True) for name, spec in specs.items()}
    w = host_init(init, keys, shardings=by_leaf)
    assert {name: a.sharding.spec for name, a in w.items()} == specs
