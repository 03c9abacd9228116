"""Programs that record the numbers of a run, besides metrics.jsonl."""

import dataclasses
import importlib
import importlib.util
import io
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._extras import install_command
from .._files import append_whole, replace_file
from .config import RunConfig
from .errors import TrainError, quoted
from .files import read_text
from .task import SAMPLES, Metrics, Progress, Record

PROJECT = "effjax"  # unless WANDB_PROJECT or TRACKIO_PROJECT is set


class TensorBoard:
    """Files of events for TensorBoard.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = folder / name
        self._write(file_version="brain.Event:2")

    def start(self, done: int) -> None:
        """Withdraw what was recorded after a step, which a run that resumes records again."""
        from tensorboard.compat.proto import event_pb2  # pyright: ignore[reportMissingImports]

        log: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        self._write(step=done + 1, session_log=log(status=log.START))

    def add(self, values: Mapping[str, float | str], step: int) -> None:
        """Record numbers and texts of a step, by name."""
        from tensorboard.plugins.scalar.summary_v2 import (  # pyright: ignore[reportMissingImports]
            scalar_pb,
        )
        from tensorboard.plugins.text.summary_v2 import (  # pyright: ignore[reportMissingImports]
            text_pb,
        )

        for name, value in values.items():
            summary = (text_pb if isinstance(value, str) else scalar_pb)(name, value)
            self._write(step=step, summary=summary)

    def close(self) -> None:
        """Do nothing: each record is written at once."""

    def _write(self, **entries: Any) -> None:
        from tensorboard.compat.proto import event_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.record_writer import (  # pyright: ignore[reportMissingImports]
            RecordWriter,
        )

        event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        record = io.BytesIO()
        RecordWriter(record).write(event(wall_time=time.time(), **entries).SerializeToString())
        # TensorBoard's own writer has a thread, which prints a traceback if the disk is full.
        with self._file.open("ab", buffering=0) as file:
            append_whole(file, record.getvalue())


class OnlineRun:
    """A run of Weights & Biases or of Trackio. A run that resumes continues it.

    Args:
        name: The package, "wandb" or "trackio". Their variables apply, such as WANDB_MODE=offline.
        folder: A folder for the identifier of the run; wandb also writes its files there.
        options: The options of the run.
    """

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any]):
        package = importlib.import_module(name)
        folder.mkdir(exist_ok=True)
        file = folder / "id"
        if not file.exists():
            replace_file(file, uuid.uuid4().hex[:8].encode())
        number, run = read_text(file), folder.parent
        if name == "wandb":
            places: dict[str, Any] = {"id": number, "dir": os.fspath(run)}  # it appends its name
        else:
            places = {"embed": False, "space_id": os.environ.get("TRACKIO_SPACE_ID")}
        self._run = package.init(
            project=os.environ.get(f"{name.upper()}_PROJECT", PROJECT),
            name=f"{run.resolve().name}-{number}", config=dict(options), resume="allow", **places,
        )  # fmt: skip

    def start(self, done: int) -> None:
        """Do nothing: what was recorded cannot be withdrawn."""

    def add(self, values: Mapping[str, float | str], step: int) -> None:
        """Record numbers and texts of a step, by name."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is not yet written."""
        self._run.finish()


def check_tracker(name: str | None) -> None:
    """Raise TrainError if the package of a tracker is missing."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise TrainError(
            f"`report_to` (={name}) needs {name}, which is missing. Run {install_command(name)}."
        )


class TrackedProgress(Progress):
    """Progress callbacks that also give the numbers of a run to a tracker.

    An error of the tracker, such as one of the network, is shown once, and the run continues
    without it.
    """

    def __init__(self, shown: Progress, tracker: TensorBoard | OnlineRun | None):
        self.shown, self.tracker = shown, tracker

    def start(self, steps: int, done: int) -> None:
        """Pass on the start, and withdraw the steps that follow."""
        self.shown.start(steps, done)
        self._call("start", done)

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Record the metrics of a step."""
        self.shown.step(step, metrics, rate)
        self._call("add", {f"step/{name}": value for name, value in metrics.items()}, step)

    def report(self, record: Record) -> None:
        """Record the numbers and texts of an evaluation."""
        self.shown.report(record)
        values: dict[str, float | str] = {
            name.replace("_", "/", 1) if name.startswith(("train_", "validation_")) else name: value
            for name, value in record.items()
            if isinstance(value, float)
        }
        for i, sample in enumerate(record.get(SAMPLES, ()), 1):
            values[f"{SAMPLES}/{i}"] = f"> {sample['prompt']}\n\n{sample['text']}"
        self._call("add", values, record["step"])

    def log(self, text: str) -> None:
        """Pass on a message."""
        self.shown.log(text)

    def stop(self) -> None:
        """Close the tracker."""
        self.shown.stop()
        self._call("close")
        self.tracker = None

    def _call(self, method: str, *args: Any) -> None:
        if self.tracker is not None:
            try:
                getattr(self.tracker, method)(*args)
            # Hours of training do not end for a network that is down.
            except Exception as error:
                self.tracker = None
                self.log(_describe(error))


def track(shown: Progress, config: RunConfig, run: Path) -> Progress:
    """Return progress callbacks that also report to the tracker of a configuration.

    Args:
        shown: The callbacks that show the progress.
        config: The configuration.
        run: The directory of the run.
    """
    name = config.report_to
    if name is None:
        return shown
    try:
        if name == "tensorboard":
            return TrackedProgress(shown, TensorBoard(run / name))
        return TrackedProgress(shown, OnlineRun(name, run / name, dataclasses.asdict(config)))
    except Exception as error:  # such as one of the network
        shown.log(_describe(error))
        return shown


def _describe(error: Exception) -> str:
    return f"warning: --report-to: {quoted(error)}. The run continues without it."
