"""Programs that record the numbers of a run, besides metrics.jsonl."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .._extras import install_command
from .errors import TrainError
from .task import Metrics, Progress, Record


class Tracker(Protocol):
    """Interface of a program that records a run."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of a step, by name."""

    def close(self) -> None:
        """Write what is not yet written."""


class TensorBoard:
    """Files of events for TensorBoard.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: Path):
        from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

        self._writer = Writer(os.fspath(folder))

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of a step, by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is not yet written."""
        self._writer.close()


def check_tracker(name: str | None) -> None:
    """Raise TrainError if the package of a tracker is missing."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise TrainError(
            f"`report_to` (={name}) needs {name}, which is missing. Run {install_command(name)}."
        )


class TrackedProgress(Progress):
    """Progress callbacks that also give the numbers of a run to a tracker."""

    def __init__(self, shown: Progress, tracker: Tracker):
        self.shown, self.tracker = shown, tracker

    def start(self, steps: int, done: int) -> None:
        """Pass on the start."""
        self.shown.start(steps, done)

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Record the metrics of a step."""
        self.shown.step(step, metrics, rate)
        self.tracker.add({f"step/{name}": value for name, value in metrics.items()}, step)

    def report(self, record: Record) -> None:
        """Record the numbers of an evaluation."""
        self.shown.report(record)
        numbers = {
            name.replace("_", "/", 1) if name.startswith(("train_", "validation_")) else name: value
            for name, value in record.items()
            if isinstance(value, float)
        }
        self.tracker.add(numbers, record["step"])

    def log(self, text: str) -> None:
        """Pass on a message."""
        self.shown.log(text)

    def stop(self) -> None:
        """Close the tracker."""
        self.shown.stop()
        self.tracker.close()


def track(shown: Progress, name: str | None, run: Path) -> Progress:
    """Return progress callbacks that also write into the directory of the run.

    Args:
        shown: The callbacks that show the progress.
        name: The `report_to` of the configuration.
        run: The directory of the run.
    """
    return shown if name is None else TrackedProgress(shown, TensorBoard(run / name))
