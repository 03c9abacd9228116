"""Planned memory and modelled time of offloaded steps with 24 bits and with Muon."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from effjax.models import DecoderConfig

from .language_model_table import (
    LLAMA_70B,
    MACHINES,
    MLP_CHUNK,
    QWEN3_8B,
    Form,
    abstract_step,
    make_row,
    plan_cached,
)
from .measure import need_compiler
from .results import Bars, Result, Size


class Case(NamedTuple):
    """A step: the optimizer is one of `language_model_table.OPTIMIZERS`."""

    name: str
    config: DecoderConfig
    optimizer: str
    length: int
    gpu: str


CASES = (
    Case("Qwen3-8B, AdamW", QWEN3_8B, "float32", 32768, "H100"),
    Case("Qwen3-8B, Muon", QWEN3_8B, "Muon", 32768, "H100"),
    Case("Llama-3.3-70B, 24 bits", LLAMA_70B, "24 bits, 8-bit", 4096, "GH200"),
)


def plan_cases(cases: Sequence[Case], cache: Path | None = None) -> Result:
    """Plan the steps, compiled for the GPUs on which they are to run."""
    rows = []
    for case in cases:
        machine = next(m for m in MACHINES if m.name == case.gpu)
        form = Form("host", MLP_CHUNK if case.length > MLP_CHUNK else None)
        step = abstract_step(case.config, case.length, case.optimizer, form)
        planned = plan_cached(step, machine.target, machine.host_bytes, cache)
        row = make_row(machine, case.config, case.length, case.optimizer, form, planned)
        per_parameter = row["planned_host_bytes"] / row["parameters"]
        name = f"{case.name}, {case.length} tokens, {case.gpu}"
        rows.append(row | {"name": name, "host_bytes_per_parameter": round(per_parameter, 3)})
    return Result(
        "optimizers_offload",
        "offloaded steps with a master copy of 24 bits and with Muon, planned",
        {"batch_size": 1},
        rows,
        Bars("planned_host_bytes", "planned host memory of a step [GB]", unit=1e9),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    cases: Sequence[Case] = CASES
    if size == "small":
        small = dataclasses.replace(QWEN3_8B, vocab_size=16384, num_hidden_layers=2)
        cases = [case._replace(config=small, length=1024) for case in CASES[:2]]
    yield plan_cases(cases)
