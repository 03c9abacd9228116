"""Runs that are killed (SIGKILL) again and again, and resumed: do they end with the same bits?"""

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
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..train.checkpoint import Checkpoints
from ..train.lm.config import LMConfig
from ..train.lm.task import prepare
from ..train.run_directory import RunDirectory

OPTIONS = (
    "--layers 2 --width 16 --heads 2 --context 16 --batch-size 8 --steps 60 --report-every 10 "
    "--checkpoint-every 2 --dropout 0.1"
).split()  # fmt: skip
TIMING = {"seconds", "tokens_per_second"}
PATIENCE = 600.0  # seconds that one start may take


class Killed(NamedTuple):
    """When one start was ended: `at` what, and after how many seconds; None: it was not."""

    at: str
    seconds: float


class Trial(NamedTuple):
    """What came of a chain of starts."""

    kills: list[Killed]
    same_parameters: bool
    same_metrics: bool


def start(out: Path, options: Sequence[str]) -> subprocess.Popen:
    """The run begins, or goes on if there is one."""
    begun = (out / "config.json").exists()
    argv = ["--resume", str(out)] if begun else [*options, "--out", str(out)]
    command = [sys.executable, "-m", "effjax", "train", "lm", *argv]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True
    )


def is_saving(out: Path) -> bool:
    """Whether Orbax writes a checkpoint now, under a name for the time."""
    folders = (out / "checkpoints", out / "partway")
    return any("tmp" in name for f in folders if f.is_dir() for name in os.listdir(f))


def kill_once(out: Path, options: Sequence[str], moment: str, rng: random.Random) -> Killed | None:
    """Starts the run, and kills it at a moment: `start`, `save` or `step`.

    Returns:
        None where the run has ended before.
    """
    began, run = time.monotonic(), start(out, options)
    until = {"start": lambda: True, "save": lambda: is_saving(out)}.get(
        moment, lambda: (out / "partway").is_dir() and any((out / "partway").iterdir())
    )
    try:
        while run.poll() is None and not until() and time.monotonic() - began < PATIENCE:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, {"start": 6.0, "save": 0.02}.get(moment, 1.0)))
        ended = run.poll() is not None
        at = "save" if is_saving(out) else moment if moment != "save" else "step"
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        _, said = run.communicate()
    if ended and run.returncode:
        raise RuntimeError(said)
    return None if ended else Killed(at, round(time.monotonic() - began, 2))


def finish(out: Path, options: Sequence[str]) -> None:
    """Lets the run go to its end; raises RuntimeError if it cannot."""
    run = start(out, options)
    _, said = run.communicate(timeout=PATIENCE)
    if run.returncode:
        raise RuntimeError(said)


def final(out: Path) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """All arrays of the last checkpoint, and the lines of metrics.jsonl without times."""
    run = RunDirectory.find(out)
    task = prepare(LMConfig.from_json(run.config["options"]), resume=True)
    with Checkpoints(run.checkpoints, read_only=True) as saved:
        state = saved.restore(task.shapes(), saved.steps[-1])
    lines = [{k: v for k, v in line.items() if k not in TIMING} for line in run.metrics]
    return [np.asarray(a) for a in jax.tree.leaves(state)], lines


def trial(
    out: Path, wanted: Any, options: Sequence[str], moments: Sequence[str], rng: random.Random
) -> Trial:
    """One run, killed at each of the moments in turn, as far as it lives so long."""
    kills = []
    for moment in moments:
        killed = kill_once(out, options, moment, rng)
        if killed is None:
            break
        kills.append(killed)
    finish(out, options)
    arrays, lines = final(out)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(arrays, wanted[0], strict=True))
    return Trial(kills, same, lines == wanted[1])


def show(trials: Sequence[Trial]) -> None:
    table = Table(title="killed and resumed")
    for name in ("trial", "killed after", "inside a save", "parameters", "metrics"):
        table.add_column(name, justify="right")
    words = {True: "equal", False: "DIFFER"}
    for number, one in enumerate(trials, 1):
        seconds = ", ".join(f"{kill.seconds:.1f} s" for kill in one.kills)
        saves = sum(kill.at == "save" for kill in one.kills)
        table.add_row(
            str(number), seconds, f"{saves} of {len(one.kills)}",
            words[one.same_parameters], words[one.same_metrics],
        )  # fmt: skip
    Console().print(table)


def main(
    trials: Annotated[int, typer.Option(help="How many runs.")] = 5,
    kills: Annotated[int, typer.Option(help="How often each is killed.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write it there too.")] = None,
) -> None:
    """Trains a small language model, kills it at random moments, half of them inside a save, and
    compares its end with that of a run that nobody killed."""
    rng, found = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="effjax-kill-") as name:
        folder = Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        finish(folder / "whole", OPTIONS)
        wanted = final(folder / "whole")
        for number in range(trials):
            moments = [rng.choice(["save", "save", "step", "start"]) for _ in range(kills)]
            found.append(trial(folder / f"{number}", wanted, OPTIONS, moments, rng))
    show(found)
    if as_json is not None:
        as_json.write_text(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    if not all(one.same_parameters and one.same_metrics for one in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
