"""Memory and schedule of offloaded programs, compiled for a GPU without one."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import (
    OffloadState,
    host_init,
    linear_cross_entropy,
    memory,
    offload_jit,
    offload_scan,
    offload_sequential,
    offload_train_step,
    stream_update,
)
from effjax.ops.offload import backends, row_update
from tests.ops.offload.stacks import POLICIES, is_low_rank, layer, loss, low_rank_layer
from tests.ops.offload.steps import every_row
from tests.programs import needs_gpu_compiler, needs_tpu_compiler

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


def assert_bytes_close(a, b, tolerance=0.01):
    assert abs(a - b) <= tolerance * max(a, b), (a, b)


def plan(fun, *args, **options):
    """Return the plan of a program that computes nothing on the host's processor."""
    program = memory.plan(fun, *args, **options)
    assert "host_compute" not in program.hlo and '_xla_compute_type="host"' not in program.hlo
    return program


@functools.cache
def gradients(num_layers, policy="recomputed"):
    def run(w, x):
        return loss(offload_scan(layer, w, x, key=jax.random.key(0), policy=POLICIES[policy]))

    return plan(jax.grad(run, (0, 1)), stacked(num_layers), shape(BATCH, WIDTH))


@pytest.mark.exhaustive
def test_device_holds_few_of_many_layers():
    program = gradients(16)
    # Two layers, the gradient of one, and the intermediate values of one layer.
    assert program.device.temporaries <= 3 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert program.device.outputs <= BOUNDARY_BYTES + SMALL  # the gradient of x
    assert_bytes_close(program.host.outputs, 16 * LAYER_BYTES)
    assert_bytes_close(program.host.temporaries, 16 * BOUNDARY_BYTES)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [("dots", 3, 3), ("everything", 5.5, 7.5)],  # tanh has one or two more
)
def test_residuals_are_in_host_memory(policy, least, most):
    """Bounds are multiples of a layer's input; a copy of its parameters would add 8."""
    program = gradients(32, policy)
    assert least - 0.01 <= program.host.temporaries / (32 * BOUNDARY_BYTES) <= most + 0.01
    # The residuals of all layers would be at least three boundaries for each.
    assert program.device.temporaries <= 3 * LAYER_BYTES + 32 * BOUNDARY_BYTES


def dense(w, x, key):
    return jnp.tanh(x @ w)


def test_device_memory_of_scan_does_not_grow_with_depth():
    run = jax.grad(lambda w, x: loss(offload_scan(dense, w, x)), (0, 1))
    w = shape(32, WIDTH, WIDTH, host=True)
    program = plan(run, w, shape(BATCH, WIDTH))
    # Two layers, the gradient of one, and the intermediate values of one layer.
    assert program.peak_device_bytes <= 3 * 4 * WIDTH * WIDTH + 10 * BOUNDARY_BYTES
    assert_bytes_close(program.host.temporaries, 32 * BOUNDARY_BYTES)


def test_gradients_of_sequential_leave_the_device_before_the_next_slices():

    def run(w, x):
        return jnp.sum(offload_sequential([dense] * len(w), w, x))

    def plan_gradients(count):
        return plan(jax.grad(run), [shape(WIDTH, WIDTH, host=True)] * count, shape(BATCH, WIDTH))

    few, many = plan_gradients(3), plan_gradients(6)
    assert_bytes_close(few.peak_device_bytes, many.peak_device_bytes)
    assert many.peak_device_bytes <= 4 * 4 * WIDTH * WIDTH + 6 * BOUNDARY_BYTES


@pytest.mark.exhaustive
def test_gradients_of_shared_array_are_added_on_the_device():
    """XLA would add them on the host's processor."""
    w, v = ({k: shape(*a.shape[1:], host=True) for k, a in stacked(1).items()} for _ in range(2))

    def run(w, v, x):
        return loss(offload_sequential([layer] * 3, [w, v, w], x))

    program = plan(jax.grad(run, (0, 1)), w, v, shape(BATCH, WIDTH))
    assert program.host.arguments == program.host.outputs == 2 * LAYER_BYTES
    assert program.host.temporaries <= LAYER_BYTES + 3 * BOUNDARY_BYTES
    assert program.device.temporaries <= 5 * LAYER_BYTES + 16 * BOUNDARY_BYTES


@pytest.mark.exhaustive
def test_update_and_host_init_hold_one_layer_on_the_device():
    keys = jax.ShapeDtypeStruct((16,), jax.random.key(0).dtype, sharding=shardings()[1])

    def make(key):
        return {"a": jax.random.normal(key, (WIDTH, 2 * WIDTH))}

    initialized = plan(functools.partial(host_init, make), keys)
    assert initialized.device.temporaries <= 3 * 4 * WIDTH * 2 * WIDTH
    assert initialized.device.outputs <= SMALL
    assert_bytes_close(initialized.host.outputs, 16 * 4 * WIDTH * 2 * WIDTH)
    stream = stream_update(optax.sgd(0.1))
    w = {"a": shape(16, WIDTH, 2 * WIDTH, host=True)}
    updated = plan(offload_jit(lambda w, grads: stream.update(grads, stream.init(w), w)[0]), w, w)
    assert updated.host.aliased == updated.host.outputs and updated.host.temporaries <= SMALL
    assert updated.device.temporaries <= 6 * 4 * WIDTH * 2 * WIDTH


def loops(hlo):
    """Return the instructions (name, type) of each loop that loads kernels and multiplies."""
    for body in re.findall(r"^%[\w.\-]+ \(.*?\{\n(.*?)^\}", hlo, re.S | re.M):
        instructions = re.findall(r"^ *(?:ROOT )?%([\w.\-]+) = (.*)", body, re.M)
        names = [name for name, _ in instructions]
        loads = any(name.startswith("dynamic-slice-start") for name in names)
        if loads and any(is_product(name) for name in names):
            yield instructions


def is_product(name):
    return "gemm" in name or "cublas" in name


@pytest.mark.exhaustive
def test_next_slice_is_loaded_during_matrix_products():
    # The forward loop, the first turn of the backward pass, and its other turns but the last, which
    # loads no parameters.
    kernel = rf"\[(1,)+({WIDTH},{2 * WIDTH}|{2 * WIDTH},{WIDTH})\]"
    bodies = list(loops(gradients(16).hlo))
    assert len(bodies) == 3
    for body in bodies:
        events = []
        for name, kind in body:
            if is_product(name):
                events.append("gemm")
            elif match := re.match("dynamic-slice-(start|done)", name):
                events += [match[1]] if re.search(kernel, kind) else []
        assert events[:4] == ["start"] * 2 + ["gemm"] * 2
        assert events.count("done") == 2


@pytest.mark.exhaustive
def test_input_of_slice_leaves_during_matrix_products():
    """In the forward loop, neither loads nor products wait for the input to arrive on the host."""
    stored = "dynamic-update-slice-done"
    bodies = [[name for name, _ in body] for body in loops(gradients(16).hlo)]
    stores = [[i for i, n in enumerate(names) if n.startswith(stored)] for names in bodies]
    # The loops of the backward pass store the gradients of several parameters.
    names, (left,) = next(pair for pair in zip(bodies, stores, strict=True) if len(pair[1]) == 1)
    assert not any(name.startswith("dynamic-slice-start") for name in names[left:])
    assert not any(is_product(name) for name in names[left:])


@pytest.mark.exhaustive
def test_reversed_slices_have_correct_offsets():
    """Before openxla/xla#46308, XLA annotates reversed copies with ascending offsets."""
    text = gradients(16).hlo
    pattern = r'"byte_offset":"(\d+)","byte_stride":"(-?\d+)"'
    copies = {(int(offset), int(stride)) for offset, stride in re.findall(pattern, text)}
    slices = 4 * WIDTH * 2 * WIDTH
    if backends.host_slices_are_wrong():
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
    assert counted_up == backends.host_slices_are_wrong()


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
    program = plan(offload_jit(run, donate=False), w, x, num_devices=8)
    sums = [c for c in program.collectives if c.kind == "all-reduce"]
    assert all(c.bytes <= LAYER_BYTES for c in sums)
    assert_bytes_close(sum(c.bytes * c.count for c in sums), 16 * LAYER_BYTES)
    assert {c.kind for c in program.collectives} == {"all-reduce"}
    # The reduction needs one more gradient of a layer, as one array, and a part of another one.
    assert program.device.temporaries < gradients(16).device.temporaries + 1.25 * LAYER_BYTES


# Training steps.

ADAM, SGD = optax.adam(1e-3), optax.sgd(1e-3)
KEY = jax.random.key(0)


def embed(others, batch, key):
    return batch @ others


def head(others, x, batch, key):
    return loss(x)


def on_device(tree):
    return jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), tree)


def make_state(tx, w, others, trained=None):
    """Return the shapes of a state; moments are in the memory of their parameters."""
    trained = w if trained is None else trained

    def place(state, tree, ndim_of_counts):
        kinds = {a.sharding.memory_kind for a in jax.tree.leaves(tree)}
        on_host = kinds == {"pinned_host"}
        return jax.tree.map(
            lambda a: shape(*a.shape, host=on_host and a.ndim > ndim_of_counts, dtype=a.dtype),
            state,
        )

    if isinstance(w, list):
        layers_state = [place(jax.eval_shape(tx.init, a), a, 0) for a in trained]
    else:
        layers_state = place(jax.eval_shape(jax.vmap(tx.init), trained), w, 1)
    return OffloadState(w, others, layers_state, place(jax.eval_shape(tx.init, others), others, 0))


def plan_step(
    tx, w, others, batch, embed=embed, layer=layer, head=head, trained=None, target="h100",
    **options,
):  # fmt: skip
    _, step = offload_train_step(embed, layer, head, tx, **options)
    state = make_state(tx, w, others, trained)
    return plan(offload_jit(step), state, batch, KEY, target=target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse_update", [True, False])
def test_train_step_updates_state_in_place(fuse_update):
    """Parameters and both moments are aliased; the host also holds the inputs of the slices."""
    program = plan_step(
        ADAM, stacked(24), shape(8, WIDTH), shape(BATCH, 8), fuse_update=fuse_update,
        clip_norm=None if fuse_update else 1.0,
    )  # fmt: skip
    # Two of 24 layers, with two moments and a gradient each, and copies.
    assert program.device.temporaries <= 10 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert_bytes_close(program.host.aliased, 3 * 24 * LAYER_BYTES)
    assert program.host.aliased == program.host.arguments == program.host.outputs
    gradients = 0 if fuse_update else 24 * LAYER_BYTES
    assert_bytes_close(program.host.temporaries, 24 * BOUNDARY_BYTES + gradients)
    assert program.device.outputs <= 3 * 4 * 8 * WIDTH + SMALL


@pytest.mark.exhaustive
@pytest.mark.skipif(backends.host_slices_are_wrong(), reason="would be slower")
def test_each_loop_copies_a_slice_once():
    """The loaded slice is copied to its place in the carry, but not the one that it replaces."""
    program = plan_step(ADAM, stacked(16), shape(8, WIDTH), shape(BATCH, 8))
    kernel = rf"f32\[1,({WIDTH},{2 * WIDTH}|{2 * WIDTH},{WIDTH})\]\S* copy\("
    counts = [sum(bool(re.match(kernel, a)) for _, a in body) for body in loops(program.hlo)]
    assert max(counts) == 2, counts  # of two kernels


@pytest.mark.exhaustive
def test_fused_update_on_the_device_saves_the_gradients():
    """Only the state, the inputs of the layers and a few layers remain."""
    others, batch = shape(8, WIDTH), shape(BATCH, 8)
    ours = plan_step(ADAM, on_device(stacked(32)), others, batch, params_in="device")
    assert ours.host.total == 0
    state_bytes = 3 * 32 * LAYER_BYTES  # parameters and two moments
    assert ours.device.aliased >= state_bytes
    rest = 32 * BOUNDARY_BYTES + 8 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert ours.peak_device_bytes <= state_bytes + rest


@pytest.mark.exhaustive
def test_no_copies_without_prefetch():
    program = plan_step(ADAM, stacked(24), shape(8, WIDTH), shape(BATCH, 8), prefetch=0)
    assert program.device.temporaries <= 8 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert program.host.temporaries <= 1.01 * 24 * BOUNDARY_BYTES


VOCABULARY = 32 * WIDTH


@pytest.mark.exhaustive
def test_microbatches_reduce_memory_of_large_head():
    """The logits of all rows are never on the device."""

    def run_head(others, x, batch, key):
        logits = x @ others["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    rows = 8 * BATCH
    others = {"in": shape(8, WIDTH), "head": shape(WIDTH, VOCABULARY)}
    batch = {"x": shape(rows, 8), "labels": shape(rows, dtype="int32")}
    program = plan_step(
        SGD, stacked(4), others, batch, num_microbatches=4, head=run_head,
        embed=lambda others, batch, key: batch["x"] @ others["in"],
    )  # fmt: skip
    logits, parameters = 4 * rows * VOCABULARY, 4 * WIDTH * VOCABULARY
    assert program.peak_device_bytes <= 3 * logits / 4 + 3 * parameters + 2**26 < 2 * logits


def quantized(num_layers):
    here = functools.partial(shape, host=True)
    return {
        "kernel": here(num_layers, WIDTH, 2 * WIDTH, dtype="int8"),
        "scale": here(num_layers, 1, 2 * WIDTH),
        "out": here(num_layers, 2 * WIDTH, WIDTH, dtype="bfloat16"),
        "low": {"down": here(num_layers, WIDTH, 8), "up": here(num_layers, 8, 2 * WIDTH)},
    }


def bytes_of(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse_update", [True, False])
def test_frozen_parameters_have_no_gradients_moments_or_copies(fuse_update):
    w = quantized(16)
    program = plan_step(
        ADAM, w, shape(8, WIDTH), shape(BATCH, 8), layer=low_rank_layer, fuse_update=fuse_update,
        trained={**jax.tree.map(lambda a: None, w), "low": w["low"]}, trainable=is_low_rank,
    )  # fmt: skip
    low, inputs = bytes_of(w["low"]), 16 * BOUNDARY_BYTES
    assert (
        program.host.total <= bytes_of(w) + 4 * low + inputs
    )  # moments and gradients, and a spare
    assert program.device.temporaries <= 3 * bytes_of(w) / 16 + 16 * BOUNDARY_BYTES + LAYER_BYTES


@pytest.mark.exhaustive
def test_frozen_parameters_have_no_gradients_in_scan():
    w, x = quantized(16), shape(BATCH, WIDTH)

    def run(low, w, x):
        return loss(offload_scan(low_rank_layer, {**w, "low": low}, x, trainable=is_low_rank))

    program = plan(offload_jit(jax.grad(run), donate=False), w["low"], w, x)
    assert program.host.total <= bytes_of(w) + 3 * bytes_of(w["low"]) + 16 * BOUNDARY_BYTES


# Lists of layers.


def plan_list_step(w, target, fuse_update):
    return plan_step(
        ADAM, w, shape(), shape(32, 1024), lambda others, batch, key: batch * others,
        [dense] * len(w), lambda others, x, batch, key: jnp.sum(x), target=target,
        fuse_update=fuse_update,
    )  # fmt: skip


def plan_list_update(w, target):
    stream = stream_update(ADAM, stacked=False)
    step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both)))
    return plan(step, (w, make_state(ADAM, w, shape()).layers_state), w, target=target)


@needs_tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("run", "target", "layers_on_device"),
    [
        (functools.partial(plan_list_step, fuse_update=True), "h100", 3),
        (functools.partial(plan_list_step, fuse_update=True), "v5e", 2),
        (functools.partial(plan_list_step, fuse_update=False), "v5e", 2),
        (plan_list_update, "h100", 2.6),
        (plan_list_update, "v5e", 2.6),
    ],
)
def test_device_holds_few_of_six_layers_of_a_list(run, target, layers_on_device):
    program = run([shape(1024, 1024, host=True)] * 6, target)
    # With its gradient and two moments, a layer takes 16 MiB.
    assert program.device.temporaries <= layers_on_device * 16 * 2**20
    # The residuals of each layer, and a copy of the parameters of the last.
    residuals = 6 * 32 * 4096 + 4 * 1024 * 1024 if run is not plan_list_update else 0
    if target == "h100":
        assert program.host.temporaries <= 1.01 * (residuals + SMALL)


# Other parameters in host memory.

TABLE_BYTES = 4 * VOCABULARY * WIDTH


def plan_others(**options):
    others = {
        "table": shape(VOCABULARY, WIDTH, host=True),
        "head": shape(WIDTH, VOCABULARY, host=True),
    }
    return plan_step(
        ADAM, stacked(4), others, shape(BATCH, dtype="int32"),
        lambda others, batch, key: others["table"][batch],
        head=lambda others, x, batch, key: linear_cross_entropy(x, others["head"], batch).mean(),
        others_in="host", fuse_update=False, num_microbatches=4, **options,
    )  # fmt: skip


@pytest.mark.exhaustive
def test_device_holds_chunks_of_the_state():
    """The device holds two gradients, and no array is twice in host memory."""
    program = plan_others(update_rows=every_row)
    assert program.peak_device_bytes <= 2 * TABLE_BYTES + 4 * row_update.CHUNK_BYTES
    state_bytes = 6 * TABLE_BYTES + 12 * LAYER_BYTES
    assert program.host.total <= state_bytes + 4 * LAYER_BYTES + 5 * BOUNDARY_BYTES
    assert program.host.aliased >= 0.99 * state_bytes
    assert "update_rows" not in program.report().note


@pytest.mark.exhaustive
def test_plan_says_what_update_rows_saves():
    """Two gradients, and the parameter and the moments of one table; the next one is loaded."""
    program = plan_others()
    assert 8 * TABLE_BYTES <= program.peak_device_bytes <= 9 * TABLE_BYTES
    # Newer JAX updates the other table last, and the hint counts the one that is loaded next, too.
    assert re.search(
        r"hint: f32\[\d+,\d+\] is updated whole.*`update_rows` saves up to (805.3|939.5) MB",
        str(program),
    )


def test_initial_state_is_streamed():
    others = {"table": shape(VOCABULARY, WIDTH, host=True)}
    init = lambda w: row_update.init_rows(ADAM, w, w, None)  # noqa: E731
    program = plan(offload_jit(init, donate=False), others)
    assert program.peak_device_bytes <= 1.01 * TABLE_BYTES
    assert program.host.temporaries == 0
