"""The checks of long runs, killed runs and CUDA machine code."""

import importlib.resources
import json
from pathlib import Path

import pytest

from benchmarks.checks import fp8_losses, sass, soak
from effjax import native
from effjax.train.text.tiny import write_checkpoint

needs_tools = pytest.mark.skipif(
    not (native.is_available("cuda") and sass.has_tools()),
    reason="no CUDA kernels, or no cuobjdump: pip install '.[test]'",
)


@pytest.mark.exhaustive
def test_nothing_grows_over_many_steps(tmp_path, capsys):
    # Allocators still grow in so few steps; docs/measured has 20,000.
    assert soak.main(["--steps", "120", "--max-mib", "20", "--json", str(tmp_path)]) == 0
    assert "compilations: 0, file descriptors: 0" in capsys.readouterr().out
    record = json.loads((tmp_path / "soak.json").read_text())
    first, *_, last = record["rows"]
    assert record["steps"] == last["step"] == 120 and last["loss"] < first["loss"]


def test_soak_reports_growth():
    growth = {"bytes_per_step": 2000.0, "compilations": 0, "descriptors": 0}
    assert soak.has_grown(growth, 1.0) and not soak.has_grown(growth, 2.0)
    assert soak.has_grown(growth | {"compilations": 1}, 2.0)
    assert soak.has_grown(growth | {"descriptors": 1}, 2.0)


@pytest.mark.exhaustive
def test_losses_of_8_bit_products(tmp_path, monkeypatch):
    """Each dtype has a run of each seed, and finished runs are not repeated."""
    write_checkpoint(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--steps", "3", "--json", str(tmp_path)]
    assert fp8_losses.main([*arguments, "--seeds", "1"]) == 0
    rows = json.loads((tmp_path / "fp8_losses.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == list(fp8_losses.FORMS)
    losses = [row["losses"] for row in rows]
    assert all(len(each) == 3 for each in losses) and len({each[0] for each in losses}) == 3
    monkeypatch.setattr(fp8_losses, "train", None)
    assert fp8_losses.main([*arguments, "--seeds", "1"]) == 0


@pytest.mark.exhaustive
@needs_tools
def test_kernels_are_within_their_budgets(tmp_path, capsys):
    with importlib.resources.as_file(native._file("cuda")) as library:
        assert sass.main([str(library), "--json", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cuda_sass.json").read_text())["rows"]
    names = {row["name"] for row in rows}
    assert names == sass.kernel_names()
    assert "columns, bfloat16" in capsys.readouterr().out
    measured = Path(__file__).parents[2] / "docs" / "measured" / "planned"
    recorded = json.loads((measured / "cuda_sass.json").read_text())["rows"]
    assert names == {row["name"] for row in recorded}


LOOP = """
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;      /* 0x0 */
        /*0010*/              @P0  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.64 R8, desc[UR4][R12.64] ;
        /*0030*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0040*/                   FMUL R20, R7.reuse, R9 ;
        /*0050*/                   LDG.E R16, desc[UR4][R12.64] ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R20 ;
        /*0070*/              @!P0 BRA 0x10 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
"""


def test_instructions_of_a_loop():
    code = sass.parse_instructions(LOOP)
    assert len(code) == 10 and sass.find_loops(code) == [(1, 7)]
    assert sass.count_loads_in_flight(code[1:8]) == 2  # the third starts after R7 is read
    counts = sass.count_instructions(sass.Kernel("columns", "float32", 4, 32), code)
    share = round(2 / 32, 1)  # the first instruction and EXIT
    assert counts["loop_instructions"] == 7 and counts["sample_instructions"] == share
    assert counts["per_pack"] == 7.1 and counts["loads_in_flight"] == 2


@pytest.mark.parametrize(
    "adds", [["RED.E.ADD.F32.FTZ.RN.STRONG.GPU"] * 4, ["REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"]]
)
def test_packs_of_a_gradient(adds):
    """From sm_90 on, one instruction adds four numbers; the count per pack is for all of them."""
    names = ["LDG.E.128", "FMUL", *4 * adds]
    lines = ["IADD3 R4, R8", *(f"{name} R4, R8" for name in names)]  # the outer loop begins first
    lines += ["@P0 BRA 0x10", "@P0 BRA 0x0", "EXIT"]
    text = "\n".join(f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    kernel = sass.Kernel("gradients", "float32", 4, 32)
    counts = sass.count_instructions(kernel, sass.parse_instructions(text))
    assert counts["loop_instructions"] == len(names) + 1
    assert counts["adds_per_pack"] == len(4 * adds)


def test_exceeded_budgets():
    row = dict(
        name="gradients, float32, sm_90", per_pack=121, budget=120, loads_in_flight=3,
        spilled_bytes=8, adds_per_pack=16,
    )  # fmt: skip
    assert len(sass.find_faults([row])) == 4
    good = row | dict(per_pack=120, loads_in_flight=4, spilled_bytes=0, adds_per_pack=4)
    assert not sass.find_faults([good])
    assert not sass.find_faults([good | dict(name="gradients, float32, sm_80", adds_per_pack=16)])
    assert len(sass.find_missing([good])) == len(sass.kernel_names()) - 1


NESTED = """
        /*0000*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0010*/                   LDS.128 R8, [R5] ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E R14, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.128 R16, desc[UR4][R2.64] ;
        /*0050*/                   FMUL R20, R14, R9 ;
        /*0060*/                   REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R20 ;
        /*0070*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R20 ;
        /*0080*/              @!P0 BRA 0x20 ;
        /*0090*/                   LDS.128 R8, [R5] ;
        /*00a0*/              @!P0 BRA 0x90 ;
        /*00b0*/                   IADD3 R2, R2, 0x1, RZ ;
        /*00c0*/              @!P1 BRA 0x10 ;
        /*00d0*/                   EXIT ;
        /*00e0*/              @!P1 BRA 0x10 ;
"""


def test_instructions_of_nested_loops():
    """Loops without the marker, and branches behind the last exit, do not count."""
    spec = sass.Spec("RED", 1, lambda v: (2, 4), {"float32": 1}, loads=None)
    code = sass.parse_instructions(NESTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sass.KERNELS, "nested", spec)
        counts = sass.count_instructions(sass.Kernel("nested", "float32", 4, 32), code)
    assert counts["loop_instructions"] == round(7 / (5 / 4), 1)  # five numbers are added
    assert counts["sample_instructions"] == round(3 / 2 + 2 / 4, 1)
    assert counts["adds_per_pack"] == round(2 / (5 / 4), 1)
    assert sass.count_loads_in_flight(code[2:9]) == 3
    assert sass.count_loads_in_flight(code[2:9], "LDG.E.128") == 2
