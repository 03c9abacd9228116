"""Plans of programs for TPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import plan
from effjax.memory.devices import find_target
from tests.memory.conftest import f32, is_line_of
from tests.memory.test_plan import abstract_mesh, layers, on_host
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

pytestmark = needs_tpu_compiler

GIB = 2**30
TPUS = ("v5e", "v4", "v5p", "v6e", "tpu7x")


def network(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return jnp.mean(x**2)


@vary("target", TPUS)
def test_plan(target):
    rows, width, classes = 2048, 512, 12
    kernels, x = [f32(width, width), f32(width, classes)], f32(rows, width)
    p = plan(jax.grad(network), kernels, x, target=target)
    assert p.target.platform == "tpu" and p.memory_fraction == 1.0 and p.fits
    # Arrays of 12 columns are stored as 12 rows, which take the memory of 16.
    padded = 4 * width * 16
    assert p.device.arguments == 4 * width * width + padded + 4 * rows * width
    assert 0 <= p.device.outputs - (4 * width * width + padded) <= 1024  # and a table of addresses
    (last,) = [b for b in p.peak_buffers if b.kind == "argument" and b.shape == "f32[512,12]"]
    assert (last.bytes, last.padding) == (padded, padded - 4 * width * classes)
    assert p.padding_bytes >= 2 * last.padding
    outputs = [b for b in p.peak_buffers if b.kind == "output"]
    # Some compilers copy a result into its layout at the end, for no line of the program.
    assert all(is_line_of(__file__, b.source) or b.operation == "copy" for b in outputs)
    assert any(is_line_of(__file__, b.source) for b in outputs)
    # A product counts on a TPU, which makes it a convolution, as two FLOPs of each of its numbers.
    products = 2 * rows * width * (2 * width + 3 * classes)
    assert p.step_time.total_flops == pytest.approx(products, rel=0.01)
    live = sum(b.bytes for b in p.peak_buffers)
    assert 0.99 * live <= p.peak_device_bytes - p.device.generated_code <= 1.05 * live


@pytest.mark.exhaustive
def test_optimization_level_of_jax():
    """The compiler does what it would do for the program in this process, and cached plans too."""

    def loss(x, kernel):
        for _ in range(3):
            x = jnp.tanh(lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.sum(x)

    def planned():
        return plan(jax.grad(loss), f32(8, 64, 32, 32), f32(64, 64, 3, 3), target="v5e")

    best = planned()
    jax.config.update("jax_optimization_level", "O1")
    try:
        quick = planned()
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert best.device.temporaries < quick.device.temporaries
    assert best.device.generated_code > quick.device.generated_code


@pytest.mark.exhaustive
def test_refused_program():
    # 20 GiB of arguments and results do not fit in 15.75 GiB.
    p = plan(lambda x: x + 1, f32(10 * 2**18, 1024), target="v5e")
    assert not p.fits and p.refusal and "DOES NOT FIT" in str(p)
    assert (p.device.arguments, p.device.outputs) == (10 * GIB, 10 * GIB)
    assert p.peak_device_bytes >= 20 * GIB
    assert [(b.kind, b.bytes) for b in p.peak_buffers[:2]] == [
        ("argument", 10 * GIB), ("output", 10 * GIB),
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_devices_of_v4():
    # A chip is one device.
    # 20 GiB of arguments and results fit in a chip's memory, but not in half of it.
    p = plan(lambda x: x + 1, f32(10 * 2**18, 1024), target="v4")
    assert p.fits and p.peak_device_bytes >= 20 * GIB
    x = f32(4096, 128, sharding=NamedSharding(abstract_mesh(4), P("x")))
    p = plan(lambda x: x.sum(0), x, target="v4")
    assert p.num_devices == 4 and p.device.arguments == 4 * 4096 * 128 // 4
    assert [(c.kind, c.bytes, c.count) for c in p.collectives] == [("all-reduce", 512, 1)]
    assert is_line_of(__file__, p.collectives[0].source)


@pytest.mark.exhaustive
def test_host_memory_and_time_of_a_loop():
    """The compiler does not state how often a loop runs."""
    matrix = 4 * 1024 * 1024
    p = plan(layers, on_host(16, 1024, 1024), f32(1024, 1024), target="v5e")
    assert (p.host.arguments, p.host.outputs) == (16 * matrix, 16 * matrix)
    assert p.device.arguments == matrix and p.host_memory_bytes == 48 * 10**9
    time = p.step_time
    for direction in ("to_device", "to_host"):
        moved = sum(t.bytes * t.count for t in p.transfers if t.direction == direction)
        assert moved == 16 * matrix
    assert (time.to_device_bytes, time.to_host_bytes) == (16 * matrix, 16 * matrix)
    assert time.total_flops == pytest.approx(16 * 2 * 1024**3, rel=0.01)
    assert not time.unknown_loops and not time.unknown_kernels
    assert "XLA_PJRT_GPU" not in str(p)


def test_topologies():
    for target, topologies in {
        "v5e": {1: "1x1", 2: "2x2", 4: "2x2", 8: "2x4", 256: "16x16"},
        "v4": {1: "1x1x1", 2: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
        "tpu7x": {1024: "8x8x8"},
    }.items():
        for num_devices, shape in topologies.items():
            assert find_target(target).topology(num_devices) == f"{target}:{shape}"
    for target, num_devices in (("v5e", 512), ("v4", 1024)):
        with pytest.raises(ValueError, match=rf"`num_devices` \(={num_devices}\)"):
            plan(network, [f32(8, 8)], f32(8, 8), target=target, num_devices=num_devices)
