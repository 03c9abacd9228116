"""Plans of programs whose bytes are known."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import Comparison, PlanError, plan
from effjax.memory.devices import find_target
from effjax.memory.read.hlo import Collective, Transfer
from effjax.memory.render import format_seconds
from effjax.memory.results import format_step
from tests.memory.conftest import f32, is_line_of, matmuls
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler

MATRIX = 4 * 1024 * 1024  # bytes of a float32 [1024, 1024]
HOST_MEMORY_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
GIB = 2**30


def test_bytes_and_buffers(matmul_plan):
    p = matmul_plan
    assert (p.device.arguments, p.device.outputs) == (2 * MATRIX, MATRIX)
    assert p.device.temporaries == MATRIX  # tanh(a @ b), the only intermediate
    assert (p.device.aliased, p.device.generated_code, p.constant_bytes) == (0, 0, 0)
    assert p.peak_device_bytes == p.device.total == 4 * MATRIX
    assert p.host.total == 0 and p.collectives == () and p.transfers == ()
    assert p.num_devices == 1 and p.target.name == "h200" and "ENTRY" in p.hlo

    buffers = p.peak_buffers
    assert sorted(b.kind for b in buffers) == ["argument", "argument", "output", "temporary"]
    assert all(b.bytes == MATRIX and b.shape == "f32[1024,1024]" for b in buffers)
    assert {b.operation for b in buffers if b.kind == "argument"} == {"a", "b"}
    file, line = matmuls.__code__.co_filename, matmuls.__code__.co_firstlineno + 1
    made = [b for b in buffers if b.kind != "argument"]
    assert [b.source for b in made] == [f"{file}:{line}"] * 2
    assert all("dot_general" in b.operation or "tanh" in b.operation for b in made)


def test_report(matmul_plan, rich_text):
    text = str(matmul_plan)
    assert "16.8 MB at the peak fits in 113.5 GB (75% of NVIDIA H200" in text
    assert "f32[1024,1024]" in text and "conftest.py" in text
    assert "16.8 MB" in rich_text(matmul_plan)
    record = json.loads(json.dumps(matmul_plan.to_dict()))
    assert record["peak_device_bytes"] == 4 * MATRIX and record["fits"] is True
    assert set(record["target"]) == {"name", "description", "memory_bytes"}
    assert len(record["peak_buffers"]) == 4 and "hlo" not in record

    p = dataclasses.replace(matmul_plan, target=find_target("l4"), memory_fraction=0.001)
    assert p.available_bytes == int(0.001 * 22 * GIB) and p.fits
    p = dataclasses.replace(p, memory_fraction=0.0001)
    assert not p.fits and "DOES NOT FIT" in str(p) and p.share > 1


@pytest.mark.parametrize("unknown", [{"unknown_loops": 1}, {"unknown_kernels": {"flash": 2}}])
def test_time_of_unknown_work_is_a_lower_bound(matmul_plan, unknown):
    time = dataclasses.replace(matmul_plan.step_time, **unknown)
    bound = dataclasses.replace(matmul_plan, step_time=time)
    assert time.is_lower_bound and not matmul_plan.step_time.is_lower_bound
    texts = str(bound), str(Comparison({"bound": bound})), format_step(time)
    assert all(f"≥ {format_seconds(time.seconds)}" in text for text in texts)
    assert "≥" not in str(matmul_plan)


def test_plot(matmul_plan, plot):
    ax = plot(matmul_plan, most=3)
    assert len(ax.get_yticklabels()) == 3
    assert [text.get_text() for text in ax.texts] == ["4.2 MB"] * 3
    assert ax.get_xlabel().endswith("[MB]")  # the unit of the labels
    assert [round(bar.get_width(), 1) for bar in ax.patches] == [4.2] * 3
    small = dataclasses.replace(matmul_plan.peak_buffers[0], shape="f32[1]", bytes=4)
    more = dataclasses.replace(matmul_plan, peak_buffers=(*matmul_plan.peak_buffers, small))
    assert len(plot(more).get_yticklabels()) == 4  # no bar that is too short to see


def test_donation_hint(matmul_plan):
    assert "(donate_argnums), 4.2 MB of" in str(matmul_plan)
    other = [dataclasses.replace(b, shape=f"{b.kind}[]") for b in matmul_plan.peak_buffers]
    assert "donate" not in str(dataclasses.replace(matmul_plan, peak_buffers=tuple(other)))
    on_host = dataclasses.replace(matmul_plan.host, arguments=10**9, outputs=10**9)
    text = str(dataclasses.replace(matmul_plan, host=on_host))
    assert "4.2 MB of device memory and 1.0 GB of host memory" in text


def test_donation_unused_arguments_and_compiler_options():
    # The fusion of tanh and the product is disabled. Unused arguments count: they occupy memory.
    p = plan(
        lambda x, unused: jnp.tanh(x + 1) * 2,
        f32(1024, 256), f32(2**20), donate_argnums=0,
        compiler_options={"xla_disable_hlo_passes": "priority-fusion"},
    )  # fmt: skip
    assert p.device.aliased == p.device.outputs == MATRIX // 4
    assert p.device.arguments == MATRIX // 4 + 4 * 2**20
    assert "donate" not in str(p)
    assert "wrapped_add" in p.hlo and "wrapped_tanh" in p.hlo


def test_constants_static_arguments_and_float64():
    table = np.random.default_rng(0).normal(size=(512, 512))
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((512, 512), jnp.float64)
        p = plan(lambda x, n: x @ table * n, x, 3, static_argnums=1)
    assert p.device.outputs == table.nbytes == 8 * 512 * 512
    # Newer JAX versions pass large constants as arguments.
    assert p.constant_bytes + p.device.arguments == 2 * table.nbytes
    assert p.peak_device_bytes >= 3 * table.nbytes


def abstract_mesh(devices, axis="x"):
    return AbstractMesh((devices,), (axis,), axis_types=(AxisType.Auto,))


def on_host(*shape, devices=1):
    sharding = NamedSharding(abstract_mesh(devices), P(), memory_kind="pinned_host")
    return f32(*shape, sharding=sharding)


def layers(w, x):
    """Move the kernel of each layer to the device, and its input to the host."""

    def layer(x, w):
        y = jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device))
        return y, jax.device_put(x, jax.memory.Space.Host)

    return jax.lax.scan(layer, x, w)


def test_host_arguments_and_results_stream():
    matrix = 4 * 256 * 256
    p = plan(layers, on_host(16, 256, 256), f32(256, 256))
    assert (p.host.arguments, p.host.outputs) == (16 * matrix, 16 * matrix)
    assert p.device.arguments == matrix
    streamed = [t for t in p.transfers if t.count == 16]
    assert sorted((t.direction, t.shape, t.bytes) for t in streamed) == [
        ("to_device", "f32[1,256,256]", matrix), ("to_host", "f32[1,256,256]", matrix),
    ]  # fmt: skip
    assert all(isinstance(t, Transfer) and is_line_of(__file__, t.source) for t in streamed)
    assert not any(b.bytes == 16 * matrix and b.kind == "argument" for b in p.peak_buffers)


def test_pinned_host_memory_limit(matmul_plan, monkeypatch):
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "1")
    host = dataclasses.replace(matmul_plan.host, arguments=GIB)
    p = dataclasses.replace(matmul_plan, num_devices=2, host=host, host_memory_bytes=None)
    assert p.peak_host_bytes == 2 * GIB and p.fits
    assert "2.1 GB of pinned host" in str(p) and f"{HOST_MEMORY_VARIABLE}=2" in str(p)
    p = dataclasses.replace(p, host_memory_bytes=GIB)
    assert not p.fits
    assert "2.1 GB of pinned host memory DOES NOT FIT in 1.1 GB" in str(p)
    record = p.to_dict()
    assert (record["peak_host_bytes"], record["host_memory_bytes"]) == (2 * GIB, GIB)


def counts(p):
    return {c.kind: (c.bytes, c.count) for c in p.collectives}


def test_in_shardings():
    """Plan for more devices than there are, and leave JAX's backends as they were."""
    x, devices = f32(4096, 128), jax.devices()
    backends = set(xla_bridge._backends)
    p = plan(lambda x: x.sum(0), x, num_devices=16, in_shardings=P("data"))
    assert set(xla_bridge._backends) == backends and jax.devices() == devices
    assert p.num_devices == 16 and p.device.arguments == 4 * 4096 * 128 // 16
    assert counts(p) == {"all-reduce": (512, 1)}
    assert isinstance(p.collectives[0], Collective)
    assert is_line_of(__file__, p.collectives[0].source)
    assert "each of 16" in str(p) and "all-reduce" in str(p)


def test_collectives_in_a_loop(mesh8):
    def body(x, _):  # x: f32[128] of one device
        x = jax.lax.all_gather(x, "data", tiled=True)
        x = jax.lax.psum_scatter(jnp.sin(x), "data", tiled=True)
        x = jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])
        return jax.lax.all_to_all(jnp.cos(x), "data", 0, 0, tiled=True), None

    f = jax.shard_map(
        lambda x: jax.lax.scan(body, x, length=5)[0], mesh=mesh8, in_specs=P("data"),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    assert counts(plan(f, f32(1024))) == {
        "all-gather": (4096, 5), "reduce-scatter": (4096, 5), "collective-permute": (512, 5),
        "all-to-all": (512, 5),
    }  # fmt: skip


def test_target_file(tmp_path):
    path = tmp_path / "mine.txtpb"
    text = find_target("h200").config.replace(str(151_397_597_184), str(GIB))
    path.write_text(text.replace("NVIDIA H200 141GB HBM3e", "Mine"))
    target = find_target(path)
    assert (target.name, target.description, target.memory_bytes) == ("mine", "Mine", GIB)
    path.write_text("platform_name: 'CUDA'")
    with pytest.raises(ValueError, match="device_memory_size"):
        find_target(str(path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="`target` .*pipe.*not a regular file"):
        find_target(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"`memory_bytes` \(=-1\)"):
        dataclasses.replace(target, memory_bytes=-1)
    with pytest.raises(TypeError, match="`config` must be a string"):
        dataclasses.replace(target, config=path)


@pytest.mark.parametrize(
    ("error", "match", "function", "options"),
    [
        (ValueError, r"`target` \(='h300'\).*h200, h100", jnp.sin, {"target": "h300"}),
        (ValueError, "`memory_fraction`", jnp.sin, {"memory_fraction": 1.5}),
        (TypeError, "no argument `fraction`", jnp.sin, {"fraction": 0.5}),
        (ValueError, "`host_memory_bytes`", jnp.sin, {"host_memory_bytes": 0}),
        (ValueError, "`num_devices`", jnp.sin, {"num_devices": 8}),
        (ValueError, "`donate_argnums`", jax.jit(jnp.cos), {"donate_argnums": 0}),
        (PlanError, "H200.*no_such_flag", jnp.sin, {"compiler_options": {"no_such_flag": True}}),
        (PlanError, "callbacks to Python", functools.partial(jax.debug.print, "{}"), {}),
    ],
)
def test_rejects(error, match, function, options):
    with pytest.raises(error, match=match):
        plan(function, f32(8), **options)


@pytest.mark.exhaustive
def test_kernel_that_the_compiler_does_not_know():
    other = lambda x: jax.ffi.ffi_call("my_kernel", f32(2, 1024))(x + 1)  # noqa: E731
    result = plan(other, f32(1024))
    assert result.device.outputs == 2 * 4096 and result.device.temporaries == 4096
    assert "my_kernel" in str(result.step_time.unknown_kernels)


def deform_conv(mesh):
    arguments = [
        f32(16, 4, 4, channels, sharding=NamedSharding(mesh, P("data"))) for channels in (2, 18)
    ]
    kernel = jnp.ones((3, 3, 2, 2))
    return lambda x, offset: effjax.deform_conv2d(x, offset, kernel, padding=1), arguments


@pytest.mark.parametrize("devices", [8, 16])
def test_rejects_operators_with_a_partitioning_rule(mesh8, devices):
    conv, arguments = deform_conv(mesh8 if devices == 8 else abstract_mesh(16, "data"))
    with pytest.raises(PlanError, match="Explicit.*shard_map"):
        plan(conv, *arguments)


@pytest.mark.exhaustive
def test_operators_with_a_partitioning_rule():
    """What the error message advises: over explicit axes, and in shard_map."""
    conv, arguments = deform_conv(AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,)))
    result = plan(conv, *arguments)
    assert result.num_devices == 4 and not result.collectives
    assert result.device.outputs == 4 * (4 * 4 * 4 * 2)  # float32 [4, 4, 4, 2]: a quarter
    mesh = abstract_mesh(16, "data")
    conv, arguments = deform_conv(mesh)
    mapped = jax.shard_map(conv, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert plan(mapped, *arguments).num_devices == 16
