import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import Comparison, PlanError, compare, find_rates
from tests.memory.conftest import f32
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler


def test_compare(capsys):
    # The first program takes the shared argument; the second has an argument of a different shape.
    programs = {
        "one": lambda x: x + 1,
        "three": (lambda x: jnp.stack([x, x + 1, x + 2]), f32(2048)),
    }
    rates = dataclasses.replace(find_rates("a100-40"), memory=1e6)
    result = compare(
        programs, f32(1024), progress=True, target="a100-40", memory_fraction=0.5, rates=rates
    )
    assert isinstance(result, Comparison) and list(result) == ["one", "three"]
    assert result["one"].peak_device_bytes == 4096 * 2
    assert result["three"].peak_device_bytes == 8192 * (1 + 3)
    assert all(p.target.name == "a100-40" and p.memory_fraction == 0.5 for p in result.values())
    assert result["one"].step_seconds == pytest.approx(2 * 4096 / 1e6, rel=0.01)
    lines = str(result).splitlines()
    assert len(lines) == 8 and "1.000" in lines[1] and "4.000" in lines[2]
    assert set(json.loads(json.dumps(result.to_dict()))) == {"one", "three"}

    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("compiling for NVIDIA A100-SXM4-40GB, 2 in all: ")
    # A slow machine adds lines about the programs that are being compiled.
    pattern = re.compile(r"(\d) of 2, (one|three): \S+ kB at the peak, \d+\.\d s")
    assert [match[1] for match in map(pattern.fullmatch, lines) if match] == ["1", "2"]


def test_rendering(matmul_plan, plot, rich_text):
    result = Comparison({"one": matmul_plan, "other": matmul_plan})
    ax = plot(result)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "other"]
    widths = sum(bar.get_width() for bars in ax.containers for bar in bars)
    assert widths == pytest.approx(2 * matmul_plan.peak_device_bytes / 1e6)
    assert ax.get_xlabel().endswith("[MB]")
    assert "other" in rich_text(result)
    assert str(Comparison()) == ""


def test_rejects_wrong_programs():
    with pytest.raises(ValueError, match="`programs`"):
        compare({}, f32(8))
    with pytest.raises(ValueError, match="`args`"):
        compare({"one": (jnp.sin, f32(8))}, f32(8))


def test_a_program_that_cannot_be_compiled():
    kernel = jax.ffi.ffi_call("TopK", f32(8))  # XLA expects that it returns a tuple
    programs = {"top_k": lambda x: kernel(x), "sin": jnp.sin}
    result = compare(programs, f32(8))
    assert list(result) == ["sin"] and list(result.errors) == ["top_k"]
    assert "top_k: the compiler for NVIDIA H200 141GB HBM3e ended with exit" in str(result)
    assert "Check failed" in result.to_dict()["top_k"]["error"]
    with pytest.raises(PlanError, match="ended with exit code"):
        compare({"top_k": programs["top_k"]}, f32(8))
