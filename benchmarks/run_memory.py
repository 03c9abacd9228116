"""Resident memory of a training run on the CPU, by phase, and what the planner expects of it.

On a CPU, all arrays are in the memory of the process. A run is expected to need the bytes of
`host_phases`, with the temporaries of the compiled step, and those of its process: the resident
memory of a run of a tiny model in the same phase. The process itself is thus measured, and the
large model is not.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from effjax.convert import save_checkpoint
from effjax.models import DecoderConfig, init_decoder
from effjax.train.checkpoint import Checkpoints
from effjax.train.host_memory import host_phases
from effjax.train.run_directory import RunDirectory
from effjax.train.text import tiny
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.task import TextTask, prepare

from .results import Bars, Result, Size

Row = dict[str, Any]
# The shapes of HuggingFaceTB/SmolLM2-135M.
SMOLLM2 = DecoderConfig(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
TINY, LARGE = "tiny", "SmolLM2-135M"
PLACES = "device", "host"
STEPS = 3
BATCH = 4, 64  # sequences and their tokens
SETTLE_SECONDS = 1.0  # XLA frees the temporaries of a step after its results are ready


def write_model(folder: Path, model: DecoderConfig | None) -> None:
    """Write a model with random weights, the tiny one by default, and rows to train it on."""
    if model is None:
        tiny.write_checkpoint(folder)
    else:
        tokenizer = tiny.train_tokenizer()
        save_checkpoint(folder, *init_decoder(model, jax.random.key(0)), model.to_json())
        tiny.write_tokenizer(folder, tokenizer)
    tiny.write_rows(folder / "rows.jsonl")


def peak_resident_bytes() -> int:
    """Return the most resident memory of this process since the last call."""
    time.sleep(SETTLE_SECONDS)
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def measure_phases(folder: Path, params_in: Any) -> Row:
    """Go through the phases of a run in this process; return their bytes, and those of arrays."""
    length = BATCH[1]
    config = FinetuneConfig(
        checkpoint=str(folder), data=[str(folder / "rows.jsonl")], max_length=length,
        batch_size=BATCH[0], steps=STEPS, params_in=params_in,
    )  # fmt: skip
    task = prepare(config)
    resident = {}
    peak_resident_bytes()
    state = jax.block_until_ready(task.initial_state())
    state_bytes = sum(a.nbytes for a in jax.tree.leaves(state))
    resident["loading"] = peak_resident_bytes()
    run = RunDirectory.create(folder / "run", task.describe(), True)
    step, batches, key = task.make_step(), task.batches(0), jax.random.key(0)
    with Checkpoints(run.checkpoints) as checkpoints:
        for _ in range(STEPS):
            state, loss = step(state, next(batches), key)
            jax.block_until_ready(loss)
        time.sleep(SETTLE_SECONDS)
        resident["step"] = peak_resident_bytes()
        checkpoints.save(STEPS, state, score=(0.0,))
        checkpoints.wait()
        resident["saving"] = peak_resident_bytes()
        state = None
        _, state = checkpoints.restore_first_intact(task.shapes(), [STEPS], print)
        jax.block_until_ready(state)
        resident["restoring"] = peak_resident_bytes()
        task.finish(state, run)
        resident["export"] = peak_resident_bytes()
    temp_bytes = _temp_bytes(task)
    return {"state_bytes": state_bytes, "temp_bytes": temp_bytes, "resident_bytes": resident}


def _temp_bytes(task: TextTask) -> int:
    args = task.shapes(), next(task.batches(0)), jax.random.key(0)
    step = jax.jit(task.learner.train_step(), donate_argnums=0).lower(*args).compile()
    memory: Any = step.memory_analysis()
    return memory.temp_size_in_bytes


def measure(folder: Path, params_in: str) -> Row:
    """Return `measure_phases` of a new process."""
    command = [sys.executable, "-m", __name__, str(folder), params_in]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def expect(measured: Row, process: Mapping[str, int]) -> dict[str, int]:
    """Return the expected resident memory of each phase, given that of the process."""
    state = measured["state_bytes"]
    arrays = host_phases((0, state), state + measured["temp_bytes"], copies=False)
    return {phase: process[phase] + size for phase, size in arrays.items()}


def measure_models(models: Mapping[str, DecoderConfig | None]) -> Iterator[Row]:
    """Yield a row for each model and phase; the first model is the tiny one."""
    process: dict[str, int] = {}
    for name, model in models.items():
        for params_in in PLACES:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "model"
                write_model(folder, model)
                measured = measure(folder, params_in)
            process = process or measured["resident_bytes"]
            expected = expect(measured, process)
            for phase, resident in measured["resident_bytes"].items():
                yield {
                    "name": f"{name}, params in {params_in}, {phase}",
                    "model": name,
                    "params_in": params_in,
                    "phase": phase,
                    "state_bytes": measured["state_bytes"],
                    "temp_bytes": measured["temp_bytes"],
                    "resident_bytes": resident,
                    "expected_bytes": expected[phase],
                    "ratio": round(expected[phase] / resident, 3),
                }


def run(size: Size) -> Iterator[Result]:
    large = SMOLLM2
    if size == "small":
        large = dataclasses.replace(SMOLLM2, num_hidden_layers=2, vocab_size=2048)
    yield Result(
        "run_memory",
        "resident memory of a run on the CPU and the expected one",
        {"batch": BATCH},
        list(measure_models({TINY: None, LARGE: large})),
        Bars("resident_bytes", "resident memory [GB]", unit=1e9),
        ["The process is that of the tiny model in device memory, in the same phase."],
    )


if __name__ == "__main__":
    print(json.dumps(measure_phases(Path(sys.argv[1]), sys.argv[2])))
