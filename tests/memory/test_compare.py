import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import Comparison, compare, max_batch_size, plan
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
    assert "thrice" in capsys.readouterr().out


def test_nothing_to_compare():
    with pytest.raises(ValueError, match="`programs` is empty"):
        compare({}, f32(8))


def linear(batch):
    """Two rows of 4 kB an example."""
    return lambda x: x + 1, f32(batch, 1024)


def available(rows):
    """The fraction of an L4's memory that holds so many examples."""
    return rows * 8192 / (22 * 2**30)


def test_max_batch_size_is_exact():
    found = max_batch_size(linear, target="l4", memory_fraction=available(1000.5))
    assert found.batch_size == 1000
    assert found.plan.fits and found.plan.peak_device_bytes == 1000 * 8192
    assert found.tried[1001] == 1001 * 8192 and len(found.tried) <= 5
    assert json.loads(json.dumps(found.to_dict()))["tried"]["1001"] == 1001 * 8192


def test_max_batch_size_in_multiples():
    options = dict(target="l4", memory_fraction=available(1000.5), multiple_of=48)
    found = max_batch_size(linear, start=4000, progress=True, **options)
    assert found.batch_size == 48 * (1000 // 48)
    assert all(batch % 48 == 0 for batch in found.tried)


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
