"""The instructions of the CUDA kernels, and how they are counted."""

import importlib.resources
import json
from pathlib import Path

import pytest

from effjax import native
from effjax.bench import sass
from effjax.bench.sass import Instruction

needs_tools = pytest.mark.skipif(
    not (native.available("cuda") and sass.has_tools()),
    reason="no CUDA kernels, or no cuobjdump: pip install 'effjax[test]'",
)


@needs_tools
def test_kernels_are_within_their_budgets(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sass.py"])
    with importlib.resources.as_file(native._file("cuda")) as library:
        sass.main(library, json=tmp_path)
    rows = json.loads((tmp_path / "deform_conv_sass.json").read_text())["rows"]
    assert {row["name"] for row in rows} == {f"{of}, {dtype}" for of, dtype in sass.BUDGETS}
    assert "columns, bfloat16" in capsys.readouterr().out
    recorded = Path(__file__).parents[2] / "docs" / "measured" / "planned" / "deform_conv_sass.json"
    names = {row["name"] for row in json.loads(recorded.read_text())["rows"]}
    assert names == {row["name"] for row in rows}


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


def test_counting():
    code = [Instruction(int(at, 16), *rest) for at, *rest in sass._LINE.findall(LOOP)]
    assert len(code) == 10 and sass.loops(code) == [(1, 7)]
    assert sass.loads_in_flight(code[1:8]) == 2  # the third begins after R7 is used
    found = sass.count(sass.Kernel("columns", "float32", 4, 32), code)
    assert found == {
        "in_the_loop": 7, "of_samples": round(2 / 32, 1), "a_pack": 7.1, "loads_in_flight": 2,
    }  # fmt: skip


def test_faults():
    row = dict(name="columns, float32", a_pack=121, budget=120, loads_in_flight=3, spilled_bytes=8)
    assert len(sass.faults([row])) == 3
    assert not sass.faults([row | dict(a_pack=120, loads_in_flight=4, spilled_bytes=0)])
