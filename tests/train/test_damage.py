"""Damage to any file of a run: resuming it is refused, or ends with the bits of an intact run."""

import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
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
    assert_same_bits,
    image_task,
    lines_without_times,
    new_run,
)
from tests.train.text.small import finetune_task, tiny_base

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")

STOP = 10  # of 12 steps; there are checkpoints of steps 4, 8 and 10


class TracedTask(CachedTask):
    """A task that remembers the states that it evaluates."""

    def make_eval(self):
        evaluate = super().make_eval()

        def evaluate_and_remember(state, part):
            self.states[part] = jax.device_get(state)
            return evaluate(state, part)

        self.states: dict[str, Any] = {}
        return evaluate_and_remember


def preference_task():
    """Return a task of preferences, with as many steps and checkpoints as that of images."""
    base = tiny_base()
    rows = [{"prompt": f"{i}:", "chosen": "ab", "rejected": "no" * (1 + i % 3)} for i in range(24)]
    (base / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return finetune_task(
        base, data=str(base / "pairs.jsonl"), loss="dpo", steps=12, report_every=4, keep=2
    )


@pytest.fixture(scope="module", params=["images", "preferences"])
def stopped(request, tmp_path_factory):
    """Stop a run; return its task, its directory, and the end of a run that was not stopped."""
    is_images = request.param == "images"
    task: Any = TracedTask(image_task(devices=1, keep=2) if is_images else preference_task())
    whole = new_run(tmp_path_factory.mktemp("whole") / "run", task)
    fit(task, whole)
    end = task.states, lines_without_times(whole)
    run = new_run(tmp_path_factory.mktemp("stopped") / "run", task)
    with pytest.raises(PreemptionError):
        fit(task, run, stop=lambda step: step == STOP)
    assert {path.name for path in run.checkpoints.iterdir()} == {"4", "8", "10"}
    return task, run.path, end


def flip(file, position, bit, run):
    content = bytearray((run / file).read_bytes())
    content[position] ^= 1 << bit
    (run / file).write_bytes(content)


def cut(file, length, run):
    os.truncate(run / file, length)


def replace(file, kind, run):
    (run / file).unlink()
    if kind == "pipe":
        os.mkfifo(run / file)
    elif kind == "folder":
        (run / file).mkdir()
    elif kind == "brackets":
        (run / file).write_text("[" * 100_000 + "\n")


def swap(one, other, run):
    (run / one).rename(run / "swapped")
    (run / other).rename(run / one)
    (run / "swapped").rename(run / other)


def copy(source, target, run):
    shutil.rmtree(run / target)
    shutil.copytree(run / source, run / target)


def damages(run: Path, flips: int) -> Iterator[tuple]:
    """Yield functions and arguments: they damage each file in turn, or exchange two."""
    rng = random.Random(0)
    files = sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())
    for file in files:
        size = (run / file).stat().st_size
        more = 10 if file.suffix in (".json", ".jsonl") and file.parent == Path() else 1
        for position in rng.sample(range(size), min(flips * more, size)):
            yield flip, file, position, rng.randrange(8)
        for length in sorted({0, size // 2, size - 1}):
            yield cut, file, length
        for kind in ("nothing", "pipe", "folder", "brackets"):
            yield replace, file, kind
    for one, other in itertools.pairwise(files):
        if one.parent == other.parent:
            yield swap, one, other
    for one, other in itertools.pairwise(Path("checkpoints", step) for step in ("4", "8", "10")):
        yield swap, one, other
        yield copy, one, other
        yield copy, other, one
        for file in files:
            if file.is_relative_to(one) and (run / other / file.relative_to(one)).is_file():
                yield swap, file, other / file.relative_to(one)


def resume(stopped, damage, arguments, path) -> str:
    """Resume a damaged copy of the run; return "refused", "fell back" or "unharmed"."""
    task, run, (states, lines) = stopped
    shutil.copytree(run, path)
    if task.unit == "step":  # as in a new process
        for part in (task.data.train, task.data.validation):
            part.references[:] = np.nan
    progress = RecordedProgress()
    try:
        damage(*arguments, path)
        fit(task, RunDirectory.open(path), progress, resume=True)
    except TrainError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    finally:
        end = RunDirectory(path)
    jax.tree.map(assert_same_bits, task.states, states)
    assert lines_without_times(end) == lines
    return "fell back" if progress.texts else "unharmed"


@vary("sample", [10, 40])
def test_damage_is_refused_or_repaired(tmp_path, stopped, sample, monkeypatch, capfd, caplog):
    monkeypatch.setattr(RunDirectory, "draw", lambda *_: None)  # most of the time
    trials = list(damages(stopped[1], flips=3))
    random.Random(1).shuffle(trials)
    trials.sort(key=lambda trial: Path(RunDirectory.ARRAYS) not in trial)  # the rarest file first
    outcomes: Counter[str] = Counter()
    for number, (damage, *arguments) in enumerate(trials[:sample]):
        try:
            outcomes[resume(stopped, damage, arguments, tmp_path / str(number))] += 1
        except Exception as error:
            error.add_note(f"{damage.__name__} {arguments}")
            raise
        shutil.rmtree(tmp_path / str(number))
    assert sample == 10 or min(outcomes[name] for name in ("refused", "fell back", "unharmed")) > 0
    assert capfd.readouterr() == ("", "") and caplog.records == []
