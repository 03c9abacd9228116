"""Plans of programs whose bytes are known by hand."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import Collective, PlanError, Transfer, _compile, list_targets, plan
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive

pytestmark = needs_gpu_compiler

HERE = os.path.basename(__file__)
MATRIX = 4 * 1024 * 1024  # bytes of a float32 [1024, 1024]


def f32(*shape, **options):
    return jax.ShapeDtypeStruct(shape, jnp.float32, **options)


def line_of(source):
    name, _, line = os.path.basename(source).partition(":")
    assert name == HERE and int(line) > 0, source
    return int(line)


def matmuls(a, b):
    return jnp.tanh(a @ b) @ b


@functools.cache
def matmul_plan():
    return plan(matmuls, f32(1024, 1024), f32(1024, 1024))


def conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_matmul():
    p = matmul_plan()
    assert (p.device.arguments, p.device.outputs) == (2 * MATRIX, MATRIX)
    assert p.device.temporaries == MATRIX  # tanh(a @ b), the only intermediate
    assert (p.device.aliased, p.device.generated_code, p.constant_bytes) == (0, 0, 0)
    assert p.peak_device_bytes == p.device.total == 4 * MATRIX
    assert p.host.total == 0 and p.collectives == () and p.transfers == ()
    assert p.num_devices == 1 and p.target.name == "h200"
    assert "ENTRY" in p.hlo


def test_buffers_at_the_peak():
    buffers = matmul_plan().peak_buffers
    assert sorted(b.kind for b in buffers) == ["argument", "argument", "output", "temporary"]
    assert all(b.bytes == MATRIX and b.shape == "f32[1024,1024]" for b in buffers)
    assert {b.operation for b in buffers if b.kind == "argument"} == {"a", "b"}
    line = matmuls.__code__.co_firstlineno + 1
    made = [b for b in buffers if b.kind != "argument"]
    assert [line_of(b.source) for b in made] == [line, line]
    assert all("dot_general" in b.operation or "tanh" in b.operation for b in made)


def test_a_plan_in_words_and_pictures():
    p = matmul_plan()
    text = str(p)
    assert "16.8 MB at the peak fits in 113.5 GB (75% of NVIDIA H200" in text
    assert "f32[1024,1024]" in text and HERE in text
    record = json.loads(json.dumps(p.to_dict()))
    assert record["peak_device_bytes"] == 4 * MATRIX and record["fits"] is True
    assert record["target"]["memory_bytes"] == p.target.memory_bytes
    assert len(record["peak_buffers"]) == 4 and "hlo" not in record

    console = pytest.importorskip("rich.console").Console(width=150, record=True, quiet=True)
    console.print(p)
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = p.plot(most=3)
    assert len(ax.get_yticklabels()) == 3
    assert [text.get_text() for text in ax.texts] == ["4.2 MB"] * 3
    matplotlib.pyplot.close(ax.figure)
    small = dataclasses.replace(p.peak_buffers[0], shape="f32[1]", bytes=4)
    ax = dataclasses.replace(p, peak_buffers=(*p.peak_buffers, small)).plot()
    assert len(ax.get_yticklabels()) == 4  # no bar that cannot be seen
    matplotlib.pyplot.close(ax.figure)


def test_donation():
    p = plan(lambda x: x + 1, f32(1024, 256), donate_argnums=0)
    assert p.device.aliased == p.device.total == MATRIX // 4
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert plan(jitted, f32(1024, 256)).device == p.device
    assert "donate" not in str(p)


def test_a_hint_where_nothing_is_donated():
    hint = "hint: nothing is donated; where results replace arguments (donate_argnums), 4.2 MB of"
    assert hint in str(matmul_plan())
    other = [dataclasses.replace(b, shape=f"{b.kind}[]") for b in matmul_plan().peak_buffers]
    assert "donate" not in str(dataclasses.replace(matmul_plan(), peak_buffers=tuple(other)))
    on_host = dataclasses.replace(matmul_plan().host, arguments=10**9, outputs=10**9)
    text = str(dataclasses.replace(matmul_plan(), host=on_host))
    assert "4.2 MB of device memory and 1.0 GB of host memory would be saved" in text


def test_fits():
    p = plan(jnp.sin, f32(2**20), target="l4", memory_fraction=0.001)
    assert p.available_bytes == int(0.001 * 22 * 2**30)
    assert p.peak_device_bytes == 2 * 4 * 2**20 and p.fits
    p = plan(jnp.sin, f32(2**33), target="l4")
    assert not p.fits and "DOES NOT FIT" in str(p)


def test_constants_are_counted():
    table = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    p = plan(lambda x: x @ table, f32(512, 512))
    counted = p.constant_bytes + p.device.arguments  # newer JAX passes large ones as arguments
    assert counted == 2 * table.nbytes
    assert p.peak_device_bytes >= 3 * table.nbytes


def test_double_precision_and_static_arguments():
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((512, 512), jnp.float64)
        p = plan(lambda x, n: x * n, x, 3, static_argnums=1)
    assert p.device.arguments == p.device.outputs == 8 * 512 * 512


def test_convolution_and_its_gradient():
    def loss(x, kernel):
        return jnp.sum(jnp.sin(conv(jnp.sin(conv(x, kernel)), kernel)))

    p = plan(jax.grad(loss, (0, 1)), f32(8, 32, 32, 64), f32(3, 3, 64, 64))
    assert "__cudnn$conv" in p.hlo
    maps = 4 * 8 * 32 * 32 * 64  # bytes of one feature map
    assert maps <= p.device.temporaries <= 8 * maps


@pytest.mark.exhaustive
def test_checkpoint_saves_memory():
    # Four wide layers: recomputing each from its narrow input keeps no wide activation.
    # XLA's CPU backend removes the barriers that this needs and shows the same bytes for both.
    def loss(kernels, x, checkpoint):
        def layer(x, k):
            return x + jnp.sin(jnp.sin(x @ k) ** 2) @ k.T

        for k in kernels:
            x = (jax.checkpoint(layer) if checkpoint else layer)(x, k)
        return jnp.sum(x)

    kernels, x = [f32(64, 1024)] * 4, f32(4096, 64)
    plain, recomputed = (
        plan(jax.grad(lambda k, x, c=c: loss(k, x, c)), kernels, x) for c in (False, True)
    )
    wide = 4 * 4096 * 1024
    assert plain.device.temporaries >= 4 * wide
    assert recomputed.device.temporaries <= plain.device.temporaries / 2
    assert sum(b.bytes >= wide and b.kind == "temporary" for b in plain.peak_buffers) >= 4
    for p in (plain, recomputed):  # what is live explains the temporary bytes
        live = sum(b.bytes for b in p.peak_buffers if b.kind == "temporary")
        assert 0.95 * p.device.temporaries <= live <= p.device.temporaries


ONE = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
ON_HOST = NamedSharding(ONE, P(), memory_kind="pinned_host")
LAYER = 4 * 256 * 256


def test_host_arguments_stream_in():
    def layers(w, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)), None

        return jax.lax.scan(layer, x, w)[0]

    p = plan(layers, f32(16, 256, 256, sharding=ON_HOST), f32(256, 256))
    assert (p.host.arguments, p.host.outputs, p.host.temporaries) == (16 * LAYER, 0, 0)
    assert p.device.arguments == p.device.outputs == LAYER
    assert [(t.direction, t.shape, t.bytes, t.count) for t in p.transfers] == [
        ("to_device", "f32[1,256,256]", LAYER, 16)
    ]
    line_of(p.transfers[0].source)
    assert not any(b.bytes == 16 * LAYER and b.kind == "argument" for b in p.peak_buffers)


def test_results_stream_out():
    def layers(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), jax.device_put(x, jax.memory.Space.Host)

        return jax.lax.scan(layer, x, w)

    p = plan(layers, f32(16, 256, 256), f32(256, 256))
    assert p.host.outputs == 16 * LAYER
    streamed = [t for t in p.transfers if t.count == 16]
    assert [(t.direction, t.shape, t.bytes) for t in streamed] == [
        ("to_host", "f32[1,256,256]", LAYER)
    ]
    assert isinstance(streamed[0], Transfer)


def all_reduce(size):
    return [("all-reduce", size, 1)]


def found(p):
    return [(c.kind, c.bytes, c.count) for c in p.collectives]


def test_eight_devices_by_in_shardings():
    p = plan(lambda x: x.sum(0), f32(4096, 128), num_devices=8, in_shardings=P("data"))
    assert p.num_devices == 8 and p.device.arguments == 4 * 4096 * 128 // 8
    assert found(p) == all_reduce(512)
    assert isinstance(p.collectives[0], Collective)
    line_of(p.collectives[0].source)
    assert "each of 8" in str(p) and "all-reduce" in str(p)


def test_eight_devices_by_a_mesh_without_devices():
    mesh = AbstractMesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    x = f32(4096, 128, sharding=NamedSharding(mesh, P("rows")))
    p = plan(lambda x: x.sum(0), x)
    assert p.num_devices == 8 and found(p) == all_reduce(512)


@pytest.mark.parametrize("check_vma", [False, True])
def test_eight_devices_by_shard_map(mesh8, check_vma):
    f = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"),
        mesh=mesh8, in_specs=P("data"), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    p = plan(f, f32(4096, 128), num_devices=8)
    assert p.device.arguments == 4 * 4096 * 128 // 8 and found(p) == all_reduce(512)


def test_collectives_of_every_kind_in_a_loop(mesh8):
    def body(x, _):  # x: f32[128] of one device
        x = jax.lax.all_gather(x, "data", tiled=True)
        x = jax.lax.psum_scatter(jnp.sin(x), "data", tiled=True)
        x = jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])
        return jax.lax.all_to_all(jnp.cos(x), "data", 0, 0, tiled=True), None

    f = jax.shard_map(
        lambda x: jax.lax.scan(body, x, length=5)[0], mesh=mesh8, in_specs=P("data"),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    kinds = {kind: (size, count) for kind, size, count in found(plan(f, f32(1024)))}
    assert kinds == {
        "all-gather": (4096, 5), "reduce-scatter": (4096, 5), "collective-permute": (512, 5),
        "all-to-all": (512, 5),
    }  # fmt: skip


PLAIN = "h200", "l4"


@pytest.mark.parametrize(
    "target", [name if name in PLAIN else exhaustive(name) for name in list_targets()]
)
def test_every_target_compiles(target):
    p = plan(lambda x: jnp.tanh(x @ x), f32(256, 256), target=target)
    assert p.target.name == target and p.device.arguments == 4 * 256 * 256


def test_a_target_of_ones_own(tmp_path):
    path = tmp_path / "mine.txtpb"
    text = matmul_plan().target.config.replace(str(151_397_597_184), str(2**30))
    path.write_text(text.replace("NVIDIA H200 141GB HBM3e", "Mine"))
    p = plan(lambda x: x + 1, f32(128), target=path)
    assert (p.target.name, p.target.description, p.target.memory_bytes) == ("mine", "Mine", 2**30)
    path.write_text("platform_name: 'CUDA'")
    with pytest.raises(ValueError, match="no device_memory_size"):
        plan(jnp.sin, f32(8), target=path)


def test_compiler_options():
    fused, split = (
        plan(lambda x: jnp.tanh(x + 1) * 2, f32(64), compiler_options=options)
        for options in (None, {"xla_disable_hlo_passes": "priority-fusion"})
    )
    assert fused.hlo != split.hlo


def test_the_process_keeps_its_backend():
    """Of a process with its own backend, and of one that has none yet."""
    before = jax.devices()
    matmul_plan()
    assert jax.devices() == before
    np.testing.assert_array_equal(jax.jit(jnp.add)(1, jnp.arange(3)), [1, 2, 3])

    code = """
import jax, jax.numpy as jnp
from jax._src import xla_bridge
from effjax.memory import plan
x = jax.ShapeDtypeStruct((8,), jnp.float32)
assert plan(lambda x: x + 1, x, in_shardings=jax.P("data"), num_devices=2).num_devices == 2
assert set(xla_bridge._backends) <= {"cpu"}, xla_bridge._backends
assert jax.device_count() == 1
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_nothing_in_the_current_folder_is_run(tmp_path, monkeypatch):
    for name in ("numpy", "jax", "sitecustomize", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    for entry in ("", str(tmp_path)):  # `python -c` has the one first, `python -m` the other
        monkeypatch.setattr("sys.path", [entry, *sys.path])
        matmul_plan()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"`target` \(='h300'\) is neither one of h200, h100", {"target": "h300"}),
        (r"`memory_fraction` \(=0\)", {"memory_fraction": 0}),
        (r"`memory_fraction` \(=1.5\)", {"memory_fraction": 1.5}),
        (r"`num_devices` \(=0\)", {"num_devices": 0}),
        (r"`num_devices` is 8 but the program spans 1", {"num_devices": 8}),
    ],
)
def test_bad_input(match, options):
    with pytest.raises(ValueError, match=match):
        plan(lambda x: x + 1, f32(8), **options)


def test_options_of_jit_for_a_jitted_function():
    with pytest.raises(ValueError, match="`donate_argnums` given for a function that is jitted"):
        plan(jax.jit(lambda x: x + 1), f32(8), donate_argnums=0)


def test_what_the_compiler_says():
    unknown = lambda x: jax.ffi.ffi_call("no_such_kernel", f32(8))(x)  # noqa: E731
    with pytest.raises(PlanError, match="cannot be compiled for NVIDIA H200.*no_such_kernel"):
        plan(unknown, f32(8))
    with pytest.raises(PlanError, match="No such compile option: 'xla_no_such_flag'"):
        plan(jnp.sin, f32(8), compiler_options={"xla_no_such_flag": 1})


def test_a_compiler_that_dies(monkeypatch):
    monkeypatch.setattr(_compile.sys, "executable", "/bin/false")
    with pytest.raises(PlanError, match="ended with exit code 1: it said nothing"):
        plan(jnp.sin, f32(8))


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(_compile, "_PLUGINS", ("jax_plugins.no_such_plugin",))
    with pytest.raises(PlanError, match=r'pip install "effjax\[plan\]"'):
        plan(jnp.sin, f32(8))


def test_arguments_that_are_not_used_count():
    """What else is on the device is planned for by passing it."""
    found = plan(
        lambda x, average: x + 1, *(jax.ShapeDtypeStruct((n,), "float32") for n in (64, 2**20))
    )
    assert found.device.arguments == 4 * (64 + 2**20)


def test_calls_back_to_python():
    def step(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(PlanError, match="calls back to Python"):
        plan(step, jax.ShapeDtypeStruct((4,), "float32"))


@pytest.mark.parametrize("devices", [8, 16])
def test_an_operator_that_splits_itself(mesh8, devices):
    """Its rule is a function of this process, and without devices JAX does not ask it."""
    mesh = mesh8 if devices == 8 else AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    x = f32(16, 4, 4, 2, sharding=NamedSharding(mesh, P("data")))
    offset = f32(16, 4, 4, 18, sharding=NamedSharding(mesh, P("data")))
    conv = lambda x, offset: effjax.deform_conv2d(x, offset, jnp.ones((3, 3, 2, 2)), padding=1)  # noqa: E731
    with pytest.raises(PlanError, match="plan the step inside jax.shard_map"):
        plan(conv, x, offset)
    mapped = jax.shard_map(conv, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert plan(mapped, x, offset).num_devices == devices
