import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import Comparison, compare, data_parallel, max_batch_size, plan, plan_all
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {"once": lambda x: x + 1, "thrice": lambda x: jnp.stack([x, x + 1, x + 2])}


def test_compare():
    found = compare(PROGRAMS, f32(1024), target="a100-40", memory_fraction=0.5)
    assert isinstance(found, Comparison) and list(found) == ["once", "thrice"]
    alone = plan(PROGRAMS["once"], f32(1024), target="a100-40", memory_fraction=0.5)
    # But for the lines that called it, which the HLO names.
    assert dataclasses.replace(found["once"], hlo="") == dataclasses.replace(alone, hlo="")
    assert found["thrice"].peak_device_bytes == 4096 * (1 + 3)
    lines = str(found).splitlines()
    assert len(lines) == 3 and "2.000" in lines[2] and "1.000" in lines[1]
    assert set(json.loads(json.dumps(found.to_dict()))) == {"once", "thrice"}


def test_compare_in_pictures(capsys):
    matplotlib = pytest.importorskip("matplotlib")
    rich = pytest.importorskip("rich")
    matplotlib.use("agg")
    found = compare(PROGRAMS, f32(1024), progress=True)
    ax = found.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["once", "thrice"]
    widths = sum(bar.get_width() for bars in ax.containers for bar in bars)
    assert widths == pytest.approx(4096 * (2 + 4) / 1e9)
    matplotlib.pyplot.close(ax.figure)
    rich.print(found)
    out, err = capsys.readouterr()
    assert "thrice" in out
    first, *lines = err.splitlines()
    assert first == "compiling, 2 in all …" and len(lines) == 2
    assert all(re.fullmatch(r"(once|thrice): \S+ kB at the peak, \d+\.\d s", x) for x in lines)


@pytest.mark.exhaustive
def test_programs_with_arguments_of_their_own():
    found = plan_all({"few": (jnp.sin, f32(256)), "many": (jnp.sin, f32(1024))}, target="l4")
    assert [p.peak_device_bytes for p in found.values()] == [2 * 4 * 256, 2 * 4 * 1024]


def test_nothing_to_compare():
    with pytest.raises(ValueError, match="`programs` is empty"):
        compare({}, f32(8))


def linear(batch):
    """Two rows of 4 kB an example."""
    return lambda x: x + 1, f32(batch, 1024)


def available(rows):
    """The fraction of an L4's memory that holds so many examples."""
    return rows * 8192 / (22 * 2**30)


@functools.cache
def largest():
    return max_batch_size(linear, target="l4", memory_fraction=available(1000.5))


def test_max_batch_size_is_exact():
    found = largest()
    assert found.batch_size == 1000
    assert found.plan.fits and found.plan.peak_device_bytes == 1000 * 8192
    assert found.tried[1001] == 1001 * 8192 and len(found.tried) <= 5
    assert json.loads(json.dumps(found.to_dict()))["tried"]["1001"] == 1001 * 8192


def test_the_largest_batch_in_words_and_pictures(capsys):
    first, _, *rows = str(largest()).splitlines()
    assert first.startswith("batch 1000: 8.2 MB at the peak fits in 8.2 MB (0% of NVIDIA L4)")
    cells = [row.split() for row in rows]
    assert cells[0] == ["batch", "peak", "fits"]
    assert ["1000", "8.2", "MB", "yes"] in cells and ["1001", "8.2", "MB", "no"] in cells
    none = dataclasses.replace(largest(), batch_size=0, tried={8: 2**30})
    assert str(none).startswith("no batch fits, not even 8: ")

    matplotlib, rich = pytest.importorskip("matplotlib"), pytest.importorskip("rich")
    matplotlib.use("agg")
    ax = largest().plot()
    assert sum(len(line.get_xdata()) for line in ax.lines[:2]) == len(largest().tried)
    matplotlib.pyplot.close(ax.figure)
    rich.print(largest())
    assert "1001" in capsys.readouterr().out


def test_a_batch_that_is_split_over_devices():
    step = data_parallel(lambda n: (lambda w, x: (x * w).sum(), f32(128), f32(16, n, 128)), 8)
    _, kernel, x = step(64)
    assert kernel.sharding.spec == jax.P() and x.sharding.spec == jax.P(None, "data")
    found = plan(*step(64))
    assert found.num_devices == 8
    assert found.device.arguments == 4 * (128 + 16 * 64 // 8 * 128)
    assert [c.kind for c in found.collectives] == ["all-reduce"]
    with pytest.raises(ValueError, match=r"args\[1\] of shape \(16, 4, 128\).*over 8 devices"):
        step(4)
    with pytest.raises(ValueError, match="none grows with the batch"):
        data_parallel(lambda n: (jnp.sin, f32(8)), 8)(64)


def test_max_batch_size_of_several_devices():
    step = data_parallel(linear, 8)
    found = max_batch_size(step, start=80, target="l4", memory_fraction=available(10.5))
    assert found.batch_size == 80 and all(batch % 8 == 0 for batch in found.tried)


@pytest.mark.exhaustive
def test_max_batch_size_in_multiples(capsys):
    options = dict(target="l4", memory_fraction=available(1000.5), multiple_of=48)
    found = max_batch_size(linear, start=4000, progress=True, **options)
    assert found.batch_size == 48 * (1000 // 48)
    assert all(batch % 48 == 0 for batch in found.tried)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "finding the largest batch …" and len(lines) == len(found.tried)
    said = r"batch \d+: \S+ [kM]B, (fits|too much), \d+\.\d s"
    assert all(re.fullmatch(said, line) for line in lines), lines


@pytest.mark.exhaustive
def test_max_batch_size_of_memory_with_a_jump():
    def jumps(batch):
        wide = 1024 if batch < 300 else 4096
        return lambda x: x + 1, f32(batch, wide)

    found = max_batch_size(jumps, target="l4", memory_fraction=available(1000.5))
    assert found.batch_size == 299 and 300 in found.tried


def test_no_batch_fits():
    found = max_batch_size(linear, target="l4", memory_fraction=available(0.5))
    assert found.batch_size == 0 and not found.plan.fits and min(found.tried) == 1


def test_bad_searches():
    with pytest.raises(ValueError, match="`start`"):
        max_batch_size(linear, start=0)
    with pytest.raises(ValueError, match="does its memory grow"):
        max_batch_size(lambda batch: (lambda x: x + 1, f32(8)), target="l4")
