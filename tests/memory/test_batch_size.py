"""The search for the largest batch size, and steps whose batch is split over devices."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.memory import MaxBatch, max_batch_size, plan
from effjax.memory.search.batch_size import split_over_devices
from tests.memory.conftest import f32
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler


def linear(batch):
    """Return a program with two rows of 4 kB per example."""
    return lambda x: x + 1, f32(batch, 1024)


def fraction(rows):
    """Return the fraction of an L4's memory that holds a number of examples."""
    return rows * 8192 / (22 * 2**30)


@pytest.fixture
def fake_plans(matmul_plan, monkeypatch):
    """Replace compilation by a function from the batch size to bytes, for the search alone.

    A step is `(bytes, batch)`; there is memory for 1000 bytes on the device and on the host.
    """

    def plan_of(step, batch, *, num_devices=1):
        device, host = step(batch)
        none = dataclasses.replace(matmul_plan.device, arguments=0, outputs=0, temporaries=0)
        target = dataclasses.replace(matmul_plan.target, memory_bytes=1000)
        return dataclasses.replace(
            matmul_plan,
            device=dataclasses.replace(none, arguments=device),
            host=dataclasses.replace(none, arguments=host),
            target=target, memory_fraction=1.0, host_memory_bytes=1000, num_devices=num_devices,
        )  # fmt: skip

    monkeypatch.setattr(sys.modules["effjax.memory.search.batch_size"], "plan", plan_of)


@pytest.mark.exhaustive
def test_compiled_programs():
    result = max_batch_size(linear, start=999, target="l4", memory_fraction=fraction(1000.5))
    assert result.batch_size == 1000
    assert result.plan.fits and result.plan.peak_device_bytes == 1000 * 8192
    assert result.tried[1001] == 1001 * 8192 and len(result.tried) <= 5


@pytest.mark.parametrize(
    ("size", "options", "largest"),
    [
        (lambda batch: (3 * batch + 10, 0), {}, 330),
        (lambda batch: (0, 7 * batch), {}, 142),  # the host is full first
        (lambda batch: (3 * batch + 10, 0), {"multiple_of": 48, "start": 4000}, 288),
        (lambda batch: (3 * batch + 10, 0), {"num_devices": 8}, 328),
        (lambda batch: (batch * (1 if batch < 300 else 4), 0), {}, 299),
        (lambda batch: (batch**2, 0), {}, 31),
        (lambda batch: (2000 + batch, 0), {}, 0),
    ],
    ids=["linear", "host", "multiples", "devices", "jump", "square", "none"],
)
def test_search(fake_plans, size, options, largest):
    result = max_batch_size(lambda batch: (size, batch), **options)
    unit = options.get("multiple_of") or options.get("num_devices", 1)
    assert result.batch_size == largest
    assert all(batch % unit == 0 for batch in result.tried) and len(result.tried) <= 20
    assert largest + unit in result.tried or largest == 0
    assert result.plan.fits is (largest > 0)


def test_steps_that_are_split_over_devices(fake_plans):
    """The first batch size to try is divisible by `num_devices`, too."""

    def step_for_batch(batch):
        return lambda n: (n, 0), f32(batch, 4)

    def size_of(batch):
        step = split_over_devices(step_for_batch, 3)
        return step(batch)[0], batch

    assert max_batch_size(size_of, num_devices=3).batch_size == 999


def test_start_of_numpy(fake_plans):
    """The step gets Python integers."""
    tried = []
    max_batch_size(lambda batch: tried.append(batch) or (lambda n: (n, 0), batch), start=np.int8(8))
    assert {type(batch) for batch in tried} == {int} and tried[0] == 8


def test_rejects_wrong_searches(fake_plans):
    with pytest.raises(ValueError, match="`start`"):
        max_batch_size(linear, start=0)
    with pytest.raises(ValueError, match="memory grows with the batch size"):
        max_batch_size(lambda batch: (lambda _: (8, 0), batch))


def test_report(fake_plans, capsys, plot, rich_text):
    result = max_batch_size(lambda batch: (lambda n: (8 * n, 0), batch), progress=True)
    assert isinstance(result, MaxBatch)
    assert json.loads(json.dumps(result.to_dict()))["tried"]["126"] == 1008
    first, _, *rows = str(result).splitlines()
    assert first.startswith("batch 125: 1.0 kB at the peak fits in 1.0 kB (100% of NVIDIA H200")
    cells = [row.split() for row in rows]
    assert cells[0] == ["batch", "peak", "fits"]
    assert ["125", "1.0", "kB", "yes"] in cells and ["126", "1.0", "kB", "no"] in cells
    none = dataclasses.replace(result, batch_size=0, tried={8: 2**30})
    assert str(none).startswith("no batch fits, not even 8: ")

    first, *lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.endswith("done")]  # without those that start
    assert first.startswith("finding the largest batch: seconds for") and len(lines) == len(
        result.tried
    )
    pattern = r"batch \d+: \S+ k?B, (fits|too much), \d+\.\d s"
    assert all(re.fullmatch(pattern, line) for line in lines), lines

    curves = plot(result).lines[:2]
    assert sum(len(line.get_xdata()) for line in curves) == len(result.tried)
    assert "126" in rich_text(result)


def test_split_over_devices():
    step = split_over_devices(lambda n: (lambda w, x: (x * w).sum(), f32(128), f32(16, n, 128)), 8)
    _, kernel, x = step(64)
    assert kernel.sharding.spec == jax.P() and x.sharding.spec == jax.P(None, "data")
    with pytest.raises(ValueError, match=r"args\[1\] of shape \(16, 4, 128\).*over 8 devices"):
        step(4)
    with pytest.raises(ValueError, match="none grows"):
        split_over_devices(lambda n: (jnp.sin, f32(8)), 8)(64)


@pytest.mark.exhaustive
def test_plan_of_a_split_step():
    step = split_over_devices(lambda n: (lambda w, x: (x * w).sum(), f32(128), f32(16, n, 128)), 8)
    result = plan(*step(64))
    assert result.num_devices == 8
    assert result.device.arguments == 4 * (128 + 16 * 64 // 8 * 128)
    assert [c.kind for c in result.collectives] == ["all-reduce"]
