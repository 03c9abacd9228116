"""The search for the largest batch size, and steps whose batch is split over devices."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.memory import MaxBatch, max_batch_size
from effjax.memory.devices import find_target
from effjax.memory.search.batch_size import split_over_devices
from tests.memory.conftest import f32

pytestmark = pytest.mark.usefixtures("numbers_are_steps")

# 1000 bytes on the device and on the host.
SMALL: Any = dict(
    target=dataclasses.replace(find_target("h200"), memory_bytes=1000),
    memory_fraction=1.0,
    host_memory_bytes=1000,
)


def linear(batch):
    """Return a program with two rows of 4 kB per example."""
    return lambda x: x + 1, f32(batch, 1024)


@pytest.mark.parametrize(
    ("size", "options", "largest"),
    [
        (lambda batch: (3 * batch + 10, 0), {}, 330),
        (lambda batch: (0, 7 * batch), {}, 142),  # the host is full first
        (lambda batch: (3 * batch + 10, 0), {"multiple_of": 48, "start": np.int16(4000)}, 288),
        (lambda batch: (3 * batch + 10, 0), {"num_devices": 8}, 328),
        (lambda batch: (batch * (1 if batch < 300 else 4), 0), {}, 299),
        (lambda batch: (batch**2, 0), {}, 31),
        (lambda batch: (2000 + batch, 0), {}, 0),
    ],
    ids=["linear", "host", "multiples", "devices", "jump", "square", "none"],
)
def test_search(size, options, largest):
    def step_for_batch(batch):
        assert type(batch) is int  # whatever `start` is
        return ((*size(batch), 1.0),)

    result = max_batch_size(step_for_batch, **SMALL, **options)
    unit = options.get("multiple_of") or options.get("num_devices", 1)
    assert result.batch_size == largest
    assert all(batch % unit == 0 for batch in result.tried) and len(result.tried) <= 20
    assert largest + unit in result.tried or largest == 0
    assert result.plan.fits is (largest > 0)


def test_rejects_wrong_searches():
    with pytest.raises(ValueError, match="`start`"):
        max_batch_size(linear, start=0)
    with pytest.raises(ValueError, match="grows with the batch size"):
        max_batch_size(lambda batch: ((8, 0, 1.0),), **SMALL)


def test_report(capsys, plot, rich_text):
    result = max_batch_size(lambda batch: ((8 * batch, 0, 1.0),), progress=True, **SMALL)
    assert isinstance(result, MaxBatch)
    assert json.loads(json.dumps(result.to_dict()))["tried"]["126"] == 1008
    first, _, *rows = str(result).splitlines()
    assert first.startswith("batch 125: 1.0 kB at the peak fits in 1.0 kB (100% of NVIDIA H200")
    cells = [row.split() for row in rows]
    assert cells[0] == ["batch", "peak", "fits"]
    assert ["125", "1.0", "kB", "yes"] in cells and ["126", "1.0", "kB", "no"] in cells
    none = dataclasses.replace(result, batch_size=0, tried={8: 2**30})
    assert str(none).startswith("no batch fits, not even 8: ")

    _, *lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.endswith("done")]  # without those that start
    pattern = r"batch \d+: \S+ k?B, (fits|too much), \d+\.\d s"
    assert len(lines) == len(result.tried)
    assert all(re.fullmatch(pattern, line) for line in lines), lines

    curves = plot(result).lines[:2]
    assert sum(len(line.get_xdata()) for line in curves) == len(result.tried)
    assert "126" in rich_text(result)


def split_step(batch, num_devices=8):
    return split_over_devices(
        lambda n: (lambda w, x: (x * w).sum(), f32(128), f32(16, n, 128)), num_devices
    )(batch)


def test_split_over_devices():
    _, kernel, x = split_step(64)
    assert kernel.sharding.spec == jax.P() and x.sharding.spec == jax.P(None, "data")
    with pytest.raises(ValueError, match=r"args\[1\] of shape \(16, 4, 128\).*over 8 devices"):
        split_step(4)
    with pytest.raises(ValueError, match="none grows"):
        split_over_devices(lambda n: (jnp.sin, f32(8)), 8)(64)
    # The first batch size to try is divisible by `num_devices`, too.
    result = max_batch_size(lambda n: ((n, 0, 1.0), *split_step(n, 3)[1:]), num_devices=3, **SMALL)
    assert result.batch_size == 999
