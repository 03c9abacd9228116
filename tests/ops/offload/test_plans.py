"""Memory and schedule of offloaded programs, compiled for a GPU without one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import (
    OffloadState,
    host_init,
    offload_jit,
    offload_scan,
    offload_sequential,
    offload_train_step,
    stream_update,
)
from effjax.memory import plan
from effjax.ops.offload import compiled
from tests.ops.offload.stacks import POLICIES, key_of, layer, loss
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler
WIDTH, BATCH = 1024, 512
LAYER_BYTES = 4 * (2 * WIDTH * 2 * WIDTH + 2 * WIDTH)
BOUNDARY_BYTES = 4 * BATCH * WIDTH
SMALL = 2**14  # keys, counters, losses


@functools.cache
def shardings():
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
    device = NamedSharding(mesh, P())
    return device.with_memory_kind("pinned_host"), device


def shape(*size, host=False, dtype="float32"):
    return jax.ShapeDtypeStruct(size, dtype, sharding=shardings()[0 if host else 1])


def stacked(num_layers):
    sizes = {"a": (WIDTH, 2 * WIDTH), "b": (2 * WIDTH, WIDTH), "c": (2 * WIDTH,)}
    return {name: shape(num_layers, *size, host=True) for name, size in sizes.items()}


def close(a, b, tolerance=0.01):
    assert abs(a - b) <= tolerance * max(a, b), (a, b)


@functools.cache
def gradients(num_layers, policy="recomputed"):
    def run(w, x):
        return loss(offload_scan(layer, w, x, key=jax.random.key(0), policy=POLICIES[policy]))

    return plan(jax.grad(run, (0, 1)), stacked(num_layers), shape(BATCH, WIDTH))


@pytest.mark.exhaustive
def test_device_holds_few_of_many_layers():
    planned = gradients(16)
    # Two layers, the gradient of one, and the intermediate values of one layer.
    assert planned.device.temporaries <= 3 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert planned.device.outputs <= BOUNDARY_BYTES + SMALL  # the gradient of x
    close(planned.host.outputs, 16 * LAYER_BYTES)
    close(planned.host.temporaries, 16 * BOUNDARY_BYTES)
    assert "host_compute" not in planned.hlo and '_xla_compute_type="host"' not in planned.hlo


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [("dots", 3, 3), ("everything", 5.5, 7.5)],  # tanh has one or two more
)
def test_residuals_are_in_host_memory(policy, least, most):
    """Bounds are multiples of a layer's input; a copy of its parameters would add 8."""
    planned = gradients(32, policy)
    assert least - 0.01 <= planned.host.temporaries / (32 * BOUNDARY_BYTES) <= most + 0.01
    # The residuals of all layers would be at least three boundaries for each.
    assert planned.device.temporaries <= 3 * LAYER_BYTES + 32 * BOUNDARY_BYTES


@functools.cache
def training_step(num_layers, fuse_update):
    tx = optax.adam(1e-3)
    _, step = offload_train_step(
        lambda others, batch, key: batch @ others,
        layer,
        lambda others, x, batch, key: loss(x),
        tx,
        fuse_update=fuse_update,
        clip_norm=None if fuse_update else 1.0,
    )
    w, others = stacked(num_layers), shape(8, WIDTH)
    state = jax.eval_shape(lambda w, o: (jax.vmap(tx.init)(w), tx.init(o)), w, others)
    place = lambda a, host: shape(*a.shape, host=host, dtype=a.dtype)  # noqa: E731
    layers_state = jax.tree.map(lambda a: place(a, a.ndim > 1), state[0])
    others_state = jax.tree.map(lambda a: place(a, False), state[1])
    state = OffloadState(w, others, layers_state, others_state)
    return plan(offload_jit(step), state, shape(BATCH, 8), jax.random.key(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse_update", [True, False])
def test_train_step_updates_state_in_place(fuse_update):
    """Parameters and both moments are aliased; the host also holds the inputs of the slices."""
    planned = training_step(24, fuse_update)
    # Two of 24 layers, with two moments and a gradient each, and copies.
    assert planned.device.temporaries <= 10 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    close(planned.host.aliased, 3 * 24 * LAYER_BYTES)
    assert planned.host.aliased == planned.host.arguments == planned.host.outputs
    gradients = 0 if fuse_update else 24 * LAYER_BYTES
    close(planned.host.temporaries, 24 * BOUNDARY_BYTES + gradients)
    assert planned.device.outputs <= 3 * 4 * 8 * WIDTH + SMALL
    assert "host_compute" not in planned.hlo


@pytest.mark.exhaustive
def test_device_memory_of_sequential_does_not_grow_with_depth():
    def run(w, x):
        options = {"key": jax.random.key(0), "num_microbatches": 2}
        return loss(offload_sequential([layer] * len(w), w, x, **options))

    plans = []
    for number in (3, 6):
        one = {k: shape(*a.shape[1:], host=True) for k, a in stacked(1).items()}
        plans.append(plan(jax.grad(run, (0, 1)), [one] * number, shape(BATCH, WIDTH)))
    close(plans[0].device.temporaries, plans[1].device.temporaries)
    assert plans[1].device.temporaries <= 5 * LAYER_BYTES + 16 * BOUNDARY_BYTES


def test_gradients_of_sequential_leave_the_device_before_the_next_slices():

    def run(w, x):
        return jnp.sum(offload_sequential([lambda w, x, key: jnp.tanh(x @ w)] * len(w), w, x))

    def planned(count):
        return plan(jax.grad(run), [shape(WIDTH, WIDTH, host=True)] * count, shape(BATCH, WIDTH))

    few, many = planned(3), planned(6)
    close(few.peak_device_bytes, many.peak_device_bytes)
    assert many.peak_device_bytes <= 4 * 4 * WIDTH * WIDTH + 6 * BOUNDARY_BYTES


@pytest.mark.exhaustive
def test_gradients_of_shared_array_are_added_on_the_device():
    """XLA would add them on the host's processor."""
    w, v = ({k: shape(*a.shape[1:], host=True) for k, a in stacked(1).items()} for _ in range(2))

    def run(w, v, x):
        return loss(offload_sequential([layer] * 3, [w, v, w], x))

    found = plan(jax.grad(run, (0, 1)), w, v, shape(BATCH, WIDTH))
    assert found.host.arguments == found.host.outputs == 2 * LAYER_BYTES
    assert found.host.temporaries <= LAYER_BYTES + 3 * BOUNDARY_BYTES
    assert found.device.temporaries <= 5 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert "host_compute" not in found.hlo and '_xla_compute_type="host"' not in found.hlo


@pytest.mark.exhaustive
def test_update_and_host_init_hold_one_layer_on_the_device():
    keys = jax.ShapeDtypeStruct((16,), jax.random.key(0).dtype, sharding=shardings()[1])

    def make(key):
        return {"a": jax.random.normal(key, (WIDTH, 2 * WIDTH))}

    initialized = plan(functools.partial(host_init, make), keys)
    assert initialized.device.temporaries <= 3 * 4 * WIDTH * 2 * WIDTH
    assert initialized.device.outputs <= SMALL
    close(initialized.host.outputs, 16 * 4 * WIDTH * 2 * WIDTH)
    stream = stream_update(optax.sgd(0.1))
    w = {"a": shape(16, WIDTH, 2 * WIDTH, host=True)}
    updated = plan(offload_jit(lambda w, grads: stream.update(grads, stream.init(w), w)[0]), w, w)
    assert updated.host.aliased == updated.host.outputs and updated.host.temporaries <= SMALL
    assert updated.device.temporaries <= 6 * 4 * WIDTH * 2 * WIDTH


def loops(hlo):
    """Return the ordered events ("start", "done", "gemm") of loops that load kernels."""
    kernel = rf"\[(1,)+({WIDTH},{2 * WIDTH}|{2 * WIDTH},{WIDTH})\]"
    result = []
    for body in re.findall(r"^%[\w.\-]+ \(.*?\{\n(.*?)^\}", hlo, re.S | re.M):
        events = []
        for name, kind in re.findall(r"^ *(?:ROOT )?%([\w.\-]+) = (.*)", body, re.M):
            if "gemm" in name or "cublas" in name:
                events.append("gemm")
            elif re.match(r"dynamic-slice-(start|done)", name) and re.search(kernel, kind):
                events.append("start" if "start" in name else "done")
        if {"start", "gemm"} <= set(events):
            result.append(events)
    return result


@pytest.mark.exhaustive
def test_next_slice_is_loaded_during_matrix_products():
    # The forward loop, the first turn of the backward pass, and its other turns but the last, which
    # loads no parameters.
    found = loops(gradients(16).hlo)
    assert len(found) == 3
    for events in found:
        assert events[:4] == ["start"] * 2 + ["gemm"] * 2
        assert events.count("done") == 2


@pytest.mark.exhaustive
def test_input_of_slice_leaves_during_matrix_products():
    """In the forward loop, neither loads nor products wait for the input to arrive on the host."""
    body = next(
        body
        for body in re.findall(r"^%[\w.\-]+ \(.*?\{\n(.*?)^\}", gradients(16).hlo, re.S | re.M)
        if "dynamic-slice-start" in body and body.count("dynamic-update-slice-start(") == 0
        and len(re.findall(r"^ *%dynamic-update-slice-start", body, re.M)) == 1
    )  # fmt: skip
    names = re.findall(r"^ *(?:ROOT )?%([\w.\-]+) = ", body, re.M)

    def places(pattern):
        return [j for j, name in enumerate(names) if re.match(pattern, name)]

    (left,) = places("dynamic-update-slice-done")
    assert max(places("dynamic-slice-start")) < left
    assert max(places(".*(gemm|cublas)")) < left


@pytest.mark.exhaustive
def test_reversed_slices_have_correct_offsets():
    """Before openxla/xla#46308, XLA annotates reversed copies with ascending offsets."""
    text = gradients(16).hlo
    pattern = r'"byte_offset":"(\d+)","byte_stride":"(-?\d+)"'
    copies = {(int(offset), int(stride)) for offset, stride in re.findall(pattern, text)}
    slices = 4 * WIDTH * 2 * WIDTH
    if compiled.host_slices_are_wrong():
        assert not copies  # the workaround computes the index
    else:
        assert (0, slices) not in copies and (15 * slices, -slices) in copies
        # The forward pass loads ahead. Copies at a clamped index would lack offset and stride.
        assert (slices, slices) in copies
    without = {"xla_disable_hlo_passes": ""}
    raw = plan(
        jax.grad(lambda w: loss(offload_scan(layer, w, jnp.ones((BATCH, WIDTH))))),
        stacked(16),
        compiler_options=without,
    )
    counted_up = (0, slices) in {
        (int(offset), int(stride)) for offset, stride in re.findall(pattern, raw.hlo)
    }
    assert counted_up == compiled.host_slices_are_wrong()


@pytest.mark.exhaustive
def test_gradients_are_reduced_on_the_devices():
    """Eight devices reduce one layer at a time, before its copy to the host."""
    mesh = jax.make_mesh((8,), ("i",), (AxisType.Auto,))

    def local(w, x):
        return jax.grad(lambda w: jax.lax.pmean(loss(offload_scan(layer, w, x)), "i"))(w)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    w = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host) for k, a in stacked(16).items()}
    x = jax.ShapeDtypeStruct((8 * BATCH, WIDTH), "float32", sharding=NamedSharding(mesh, P("i")))
    found = plan(offload_jit(run, donate=False), w, x, num_devices=8)
    sums = [c for c in found.collectives if c.kind == "all-reduce"]
    assert all(c.bytes <= LAYER_BYTES for c in sums)
    close(sum(c.bytes * c.count for c in sums), 16 * LAYER_BYTES)
    assert {c.kind for c in found.collectives} == {"all-reduce"}
    assert "host_compute" not in found.hlo and '_xla_compute_type="host"' not in found.hlo
    # The reduction needs one more gradient of a layer, as one array, and a part of another one.
    assert found.device.temporaries < gradients(16).device.temporaries + 1.25 * LAYER_BYTES


@pytest.mark.exhaustive
def test_offloading_saves_device_memory():

    def run(w, x):
        def body(x, at):
            w, i = at
            return layer(w, x, key_of(jax.random.key(0), i, 0)), None

        return loss(jax.lax.scan(body, x, (w, jnp.arange(16)))[0])

    w = {name: shape(*a.shape) for name, a in stacked(16).items()}
    in_memory = plan(jax.grad(run, (0, 1)), w, shape(BATCH, WIDTH))
    assert in_memory.peak_device_bytes > 5 * gradients(16).peak_device_bytes
    assert np.isclose(in_memory.host.total, 0)
