"""What a run begins with: the state of step 0, or that of a checkpoint."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .checkpoint import Checkpoints, Partway, Seen
from .config import WITHOUT_EFFECT
from .errors import Damaged, TrainError
from .run_directory import RunDirectory

Task = Any  # `loop.Task`


class Begun(NamedTuple):
    """The state to begin with, the steps that led to it, what was measured of those after the last
    number, and the lines of metrics.jsonl up to that."""

    state: Any
    done: int
    seen: Seen
    records: list[dict[str, Any]]


class Place(NamedTuple):
    """A checkpoint: the steps that led to it, its directory, and how it is read and deleted."""

    done: int
    checkpoints: Checkpoints
    number: int

    @property
    def name(self) -> str:
        return f"{self.checkpoints.directory.name}/{self.number}"

    def restore(self, task: Task) -> tuple[Any, Seen]:
        state = self.checkpoints.restore(task.shapes(), self.number)
        return state, self.checkpoints.seen(self.number)


def places(task: Task, checkpoints: Checkpoints, partway: Partway) -> list[Place]:
    """All checkpoints, the last one first."""
    found = [Place(number * task.steps_each, checkpoints, number) for number in checkpoints.steps]
    if partway.saved is not None:
        found += [Place(step, partway.saved, step) for step in partway.saved.steps]
    return sorted(found, key=lambda place: place.done, reverse=True)


def begin(
    task: Task, run: RunDirectory, checkpoints: Checkpoints, partway: Partway, resume: bool,
    fall_back: bool, say: Callable[[str], None],
) -> Begun:  # fmt: skip
    """A new run, or one that goes on; its files are as they were then."""
    if resume:
        check_same(task, run)
    there = places(task, checkpoints, partway) if resume else []
    wanted: list[int] = []
    if there:
        _check_length(task, run, there[0].done)
        place, state, seen = last_whole(task, run, there, fall_back, say)
        done, last = place.done, place.done // task.steps_each
        wanted = [number for number in task.numbers if number * task.steps_each <= done]
        if place.checkpoints is checkpoints:
            wanted = sorted({*wanted, last} - {0})
    else:  # a new run, or one that was interrupted before its first checkpoint
        done, seen, state = 0, [], task.initial_state()
        checkpoints.save(0, state, best=0)
    records = run.keep(task.kind, wanted, task.fields)
    if resume and run.config != task.describe():
        run.config = task.describe()
    return Begun(state, done, seen, records)


def _check_length(task: Task, run: RunDirectory, done: int) -> None:
    if done > task.numbers[-1] * task.steps_each:
        raise TrainError(
            f"{task.kind}s (={task.numbers[-1]}) must be at least {-(-done // task.steps_each)}, "
            f"which {run.path} has done already"
        )


def last_whole(
    task: Task, run: RunDirectory, there: list[Place], fall_back: bool,
    say: Callable[[str], None],
) -> tuple[Place, Any, Seen]:  # fmt: skip
    """The last checkpoint that can be restored; with `fall_back` those after it are deleted.

    Raises:
        TrainError: without `fall_back`: that is not the last one; none can be restored.
    """
    damaged: list[Place] = []
    for place in there:
        try:
            state, seen = place.restore(task)
        except Damaged as error:
            if not fall_back:
                raise TrainError(f"{error}; {remedy(run, there[len(damaged) + 1 :])}") from error
            say(f"{error}; it is left out")
            damaged.append(place)
            continue
        for one in damaged:
            one.checkpoints.delete(one.number)
        if damaged:
            say(f"goes on from {run.path / place.name}")
        return place, state, seen
    raise TrainError(f"{run.path}: none of its checkpoints can be restored; start a new run")


def remedy(run: RunDirectory, others: list[Place]) -> str:
    """What to do about a damaged checkpoint."""
    for place in others:
        if place.checkpoints.fault(place.number) is None:
            return f"give --fall-back with --resume to go on from {run.path / place.name}"
    return "there is no whole one beside it: put its files back, or start a new run"


def check_same(task: Task, run: RunDirectory) -> None:
    """Raises `TrainError` unless `run` is of the task's options and data; its length, and where its
    data lie, may be others."""
    before, now = run.config, task.describe()
    if before.get("data") != now["data"]:
        raise TrainError(f"{run.path}: was trained on other data; start a new run")
    for name, value in before.get("options", {}).items():
        if name not in (*WITHOUT_EFFECT, f"{task.kind}s") and now["options"].get(name) != value:
            raise TrainError(
                f"{run.path}: was trained with {name} (={value!r}), not with "
                f"{now['options'].get(name)!r}; go on with the former, or start a new run"
            )
