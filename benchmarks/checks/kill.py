"""Training runs that are killed again and again and resumed must end with the same bits.

`python -m benchmarks.checks.kill` fine-tunes a tiny language model, kills it (SIGKILL) at random
moments, half of them inside a save, and compares its end with that of a run that was not killed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effjax.train.checkpoint import Checkpoints
from effjax.train.run_directory import RunDirectory
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.task import prepare
from effjax.train.text.tiny import write_checkpoint, write_rows

OPTIONS = [
    *("--max-length", "32", "--batch-size", "8", "--param-dtype", "float32"),
    *("--steps", "60", "--report-every", "10", "--checkpoint-every", "2"),
]
TIMING = {"seconds", "tokens_per_second"}
START_TIMEOUT = 600.0  # seconds
KILLS = 4  # of each run


class Kill(NamedTuple):
    """One SIGKILL: the moment it hit ("start", "save" or "step"), and the seconds before it."""

    moment: str
    seconds: float


class Trial(NamedTuple):
    """A run that was killed several times, compared with one that was not."""

    kills: list[Kill]
    same_parameters: bool
    same_metrics: bool

    @property
    def is_same(self) -> bool:
        return self.same_parameters and self.same_metrics

    def __str__(self) -> str:
        words = {True: "equal", False: "DIFFER"}
        kills = ", ".join(f"{kill.seconds:.1f} s ({kill.moment})" for kill in self.kills)
        return (
            f"killed after {kills}: parameters {words[self.same_parameters]}, "
            f"metrics {words[self.same_metrics]}"
        )


def start(out: Path, options: Sequence[str]) -> subprocess.Popen:
    """Start the run, or resume it if it exists."""
    exists = (out / "config.json").exists()
    arguments = ["--resume", str(out)] if exists else [*options, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "effjax", "finetune", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_saving(out: Path) -> bool:
    """Return True if Orbax is writing a checkpoint, under a temporary name."""
    folder = out / "checkpoints"
    return folder.is_dir() and any("tmp" in name for name in os.listdir(folder))


def has_checkpoint(out: Path) -> bool:
    return (out / "checkpoints").is_dir() and any((out / "checkpoints").iterdir())


def kill_at(out: Path, options: Sequence[str], moment: str, rng: random.Random) -> Kill | None:
    """Start the run and kill it at "start", "save" or "step".

    Returns:
        The kill, or None if the run ended before.
    """
    # A condition to wait for, and the longest random delay after it in seconds.
    is_reached, delay = {
        "start": (lambda: True, 6.0),
        "save": (lambda: is_saving(out), 0.02),
        "step": (lambda: has_checkpoint(out), 1.0),
    }[moment]
    begin, run = time.monotonic(), start(out, options)
    try:
        while run.poll() is None and not is_reached() and time.monotonic() - begin < START_TIMEOUT:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, delay))
        ended = run.poll() is not None
        if is_saving(out):
            moment = "save"
        elif moment == "save":
            moment = "step"
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        _, errors = run.communicate()
    if ended and run.returncode:
        raise RuntimeError(errors)
    return None if ended else Kill(moment, round(time.monotonic() - begin, 2))


def finish(out: Path, options: Sequence[str]) -> None:
    """Let the run end; raise RuntimeError if it fails."""
    run = start(out, options)
    _, errors = run.communicate(timeout=START_TIMEOUT)
    if run.returncode:
        raise RuntimeError(errors)


def read_end(out: Path) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Return the arrays of the last checkpoint, and the lines of metrics.jsonl without times."""
    run = RunDirectory.find(out)
    task = prepare(FinetuneConfig.from_json(run.read_config()["options"]))
    with Checkpoints(run.checkpoints) as saved:
        state = saved.restore(task.shapes(), saved.steps[-1])
    metrics = [{k: v for k, v in line.items() if k not in TIMING} for line in run.read_metrics()]
    arrays = [
        jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
        for a in jax.tree.leaves(state)
    ]
    return [np.asarray(a) for a in arrays], metrics


def run_trial(
    out: Path, expected: Any, options: Sequence[str], moments: Sequence[str], rng: random.Random
) -> Trial:
    """Kill one run at each of the moments in turn, let it end, and compare it."""
    kills = []
    for moment in moments:
        kill = kill_at(out, options, moment, rng)
        if kill is None:
            break
        kills.append(kill)
    finish(out, options)
    arrays, metrics = read_end(out)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(arrays, expected[0], strict=True))
    return Trial(kills, same, metrics == expected[1])


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return 1 if one ends differently."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trials", type=int, default=5, help="Number of runs.")
    parser.add_argument("--json", type=Path, help="File for the results.")
    options = parser.parse_args(argv)
    rng, trials = random.Random(0), []
    with tempfile.TemporaryDirectory(prefix="effjax-kill-") as name:
        folder = Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        base = folder / "base"
        write_checkpoint(base)
        write_rows(base / "rows.jsonl")
        run_options = [str(base), "--data", str(base / "rows.jsonl"), *OPTIONS]
        finish(folder / "whole", run_options)
        expected = read_end(folder / "whole")
        for i in range(options.trials):
            moments = rng.choices(["save", "save", "step", "start"], k=KILLS)
            trial = run_trial(folder / str(i), expected, run_options, moments, rng)
            trials.append(trial)
            print(f"trial {i + 1}, {trial}")
    if options.json is not None:
        options.json.write_text(json.dumps([t._asdict() for t in trials], indent=1) + "\n")
    return int(not all(trial.is_same for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
