"""Damage to any file of a run: resuming it is refused, or ends with the bits of an intact run."""

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from effjax.train.errors import PreemptionError, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from tests.tiers import vary
from tests.train.small import (
    CachedTask,
    RecordedProgress,
    image_task,
    lines_without_times,
    new_run,
)

pytest.importorskip("matplotlib")

STOP = 10  # of 12 steps; there are checkpoints of steps 4, 8 and 10
Damage = tuple[str, Callable[[Path], Any]]  # a description, and a function of the run's directory


class TracedTask(CachedTask):
    """A task that remembers the states that it evaluates."""

    def make_eval(self):
        evaluate = super().make_eval()

        def evaluate_and_remember(state, part):
            self.states[part] = jax.device_get(state)
            return evaluate(state, part)

        self.states: dict[str, Any] = {}
        return evaluate_and_remember


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Stop a run; return its task, its directory, and the end of a run that was not stopped."""
    task: Any = TracedTask(image_task(devices=1, keep=2))
    whole = new_run(tmp_path_factory.mktemp("whole") / "run", task)
    fit(task, whole)
    end = task.states, lines_without_times(whole)
    run = new_run(tmp_path_factory.mktemp("stopped") / "run", task)
    with pytest.raises(PreemptionError):
        fit(task, run, stop=lambda step: step == STOP)
    assert {path.name for path in run.checkpoints.iterdir()} == {"4", "8", "10"}
    return task, run.path, end


def damages(run: Path, flips: int) -> Iterator[Damage]:
    """Yield flips, cuts, deletions, replacements and swaps of all files of a run."""
    rng = random.Random(0)
    files = sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())
    for file in files:
        size = (run / file).stat().st_size
        more = 10 if file.suffix in (".json", ".jsonl") and file.parent == Path() else 1
        for position in rng.sample(range(size), min(flips * more, size)):
            bit = rng.randrange(8)
            yield f"flip bit {bit} of byte {position} of {file}", flip(file, position, bit)
        for length in sorted({0, size // 2, size - 1}):
            yield (
                f"cut {file} to {length} bytes",
                lambda path, f=file, n=length: os.truncate(path / f, n),
            )
        yield f"delete {file}", lambda path, f=file: (path / f).unlink()
        for kind, make in REPLACEMENTS.items():
            yield f"replace {file} by {kind}", replace(file, make)
    for one, other in itertools.pairwise(files):
        if one.parent == other.parent:
            yield f"swap {one} and {other}", swap(one, other)
    folders = [Path("checkpoints", step) for step in ("4", "8", "10")]
    for one, other in [(folders[0], folders[1]), (folders[1], folders[2])]:
        yield f"swap {one} and {other}", swap(one, other)
        yield f"copy {one} to {other}", copy(one, other)
        yield f"copy {other} to {one}", copy(other, one)
        for file in files:
            if file.is_relative_to(one) and (run / other / file.relative_to(one)).is_file():
                twin = other / file.relative_to(one)
                yield f"swap {file} and {twin}", swap(file, twin)


REPLACEMENTS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "brackets": lambda file: file.write_text("[" * 100_000 + "\n"),
}


def flip(file, position, bit):
    def apply(path):
        content = bytearray((path / file).read_bytes())
        content[position] ^= 1 << bit
        (path / file).write_bytes(content)

    return apply


def replace(file, make):
    def apply(path):
        (path / file).unlink()
        make(path / file)

    return apply


def swap(one, other):
    def apply(path):
        (path / one).rename(path / "swapped")
        (path / other).rename(path / one)
        (path / "swapped").rename(path / other)

    return apply


def copy(source, target):
    def apply(path):
        shutil.rmtree(path / target)
        shutil.copytree(path / source, path / target)

    return apply


def resume(stopped, damage, path) -> str:
    """Resume a damaged copy of the run; return "refused", "fell back" or "unharmed"."""
    task, run, (states, lines) = stopped
    shutil.copytree(run, path)
    progress = RecordedProgress()
    try:
        damage(path)
        fit(task, RunDirectory.open(path), progress, resume=True)
    except TrainError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    finally:
        end = RunDirectory(path)
    jax.tree.map(np.testing.assert_array_equal, task.states, states)
    assert lines_without_times(end) == lines
    return "fell back" if progress.texts else "unharmed"


@vary("sample", [10, 40])
def test_damage_is_refused_or_repaired(tmp_path, stopped, sample, monkeypatch, capfd, caplog):
    monkeypatch.setattr(RunDirectory, "draw", lambda *_: None)  # most of the time
    trials = list(damages(stopped[1], flips=3))
    outcomes: Counter[str] = Counter()
    for number, (name, damage) in enumerate(random.Random(1).sample(trials, sample)):
        try:
            outcomes[resume(stopped, damage, tmp_path / str(number))] += 1
        except Exception as error:
            error.add_note(name)
            raise
        shutil.rmtree(tmp_path / str(number))
    assert sample == 10 or min(outcomes[name] for name in ("refused", "fell back", "unharmed")) > 0
    assert capfd.readouterr() == ("", "") and caplog.records == []
