"""Checkpoints of a run, by Orbax: the last one, the best one, and one of the way to the next.

A checkpoint is a directory that Orbax writes in the background, while the run goes on, and puts in
place only when it is whole. Each process writes and reads what its devices have of the arrays, and
those in host memory are written from there. A run can go on with other devices than it began with.
"""

import contextlib
import errno
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from . import checksums
from .errors import Damaged, Preempted, TrainError
from .processes import from_first, is_first, several

Seen = list[dict[str, float]]  # what was measured of steps


class _Manager(ocp.CheckpointManager):
    """Orbax's, but for one thing: it asks JAX whether to stop, by numbers of its own, and so takes
    the answer from the run."""

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints below `directory`; closes with a `with` block.

    They are numbered by what the run counts: epochs, or steps.

    Args:
        directory: made if it is not there.
        read_only: nothing is made or written; without the directory, there are no checkpoints.
        keep: how many of the last ones are kept, beside the best one.
    """

    def __init__(self, directory: Path, read_only: bool = False, keep: int = 1):
        self.directory, self.read_only, self.keep = directory, read_only, keep
        # Orbax warns of its own `read_only`, and does no more for what is only restored.
        options = ocp.CheckpointManagerOptions(create=not read_only)
        self._manager = _Manager(directory.absolute(), options=options)
        self._kept: set[int] = set()  # once that of the largest number is whole
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and several() and not issubclass(kind, Preempted):
            return  # the others may be gone, or wait for this one
        with contextlib.suppress(*() if kind is None else (OSError,)):
            try:
                self.settle()
            finally:
                self._worker.shutdown()
                with self._errors(max(self._kept, default=0)):
                    self._manager.close()

    def save(self, step: int, state: Any, best: int, seen: Seen | None = None) -> None:
        """Begins to write the state as number `step`, when the save before has ended; when this one
        has, all but number `best` and the last ones are deleted.

        The state may be donated as soon as this returns.

        Args:
            seen: what was measured since the last number, where this one is on the way to the next.

        Raises:
            OSError: it, or that of before, cannot be written, whatever the reason.
        """
        self.settle()
        with self._errors(step):
            args = ocp.args.StandardSave(state)
            notes = {"seen": None if seen is None else [*seen]}  # written later, as it is now
            self._manager.save(step, args=args, force=True, custom_metadata=notes)
        before = [number for number in self._manager.all_steps() if number < step]
        self._kept = {step, best, *sorted(before)[max(len(before) - self.keep + 1, 0) :]}
        self._written = self._worker.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """Beside the run's steps: waits until the checkpoint is whole, and adds its checksums."""
        self._manager.wait_until_finished()
        if is_first():
            checksums.write(self.directory / str(step))

    def settle(self) -> None:
        """Waits for the last `save`; errors as there."""
        if not self._kept:
            return
        with self._errors(max(self._kept)):
            if self._written is not None:
                self._written.result()
            for other in self._manager.all_steps():
                if other not in self._kept:
                    self._manager.delete(other)
        self._kept = set()

    def delete(self, step: int) -> None:
        """Deletes number `step`; raises OSError."""
        with self._errors(step):
            self._manager.delete(step)

    @contextlib.contextmanager
    def _errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, jax.errors.JaxRuntimeError):  # the latter is of the device
            raise
        # Orbax raises many types for what the system refuses: of zarr, of TensorStore.
        except Exception as error:
            full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
            reason = "No space left on device" if full else f"{type(error).__name__} of Orbax"
            number = errno.ENOSPC if full else errno.EIO
            raise OSError(number, reason, str(self.directory / str(step))) from error

    @property
    def steps(self) -> list[int]:
        """The numbers that there are, in order."""
        return from_first(lambda: sorted(self._manager.all_steps()))

    def restore(self, like: Any, step: int) -> Any:
        """The state of number `step`.

        Args:
            step: one of `steps`.
            like: arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and dtypes. Where
                these have a sharding, the array is put there; else on this process's first device.

        Raises:
            Damaged: the checkpoint is not as it was written, or cannot be read.
            TrainError: it is of another model.
        """
        path = self.directory / str(step)
        like = jax.tree.map(_described, like)
        if fault := self.fault(step):
            raise Damaged(f"{path}: cannot be restored ({fault})")
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except jax.errors.JaxRuntimeError:  # of the device
            raise
        # Orbax raises many types for a damaged file: of JSON, of TensorStore, of the system.
        except Exception as error:
            if several():  # the others may know nothing of it
                raise TrainError(
                    f"{path}: cannot be restored by process {jax.process_index()} "
                    f"({type(error).__name__}: {error}); mend that, then resume"
                ) from error
            if isinstance(error, OSError) or not checksums.is_there(path):
                raise Damaged(f"{path}: cannot be restored ({type(error).__name__})") from error
            raise TrainError(
                f"{path}: is whole, but not of the model that config.json tells of "
                f"({type(error).__name__}); put the run's own config.json back, or start a new run"
            ) from error

    def fault(self, step: int) -> str | None:
        """What is wrong with the files of number `step`; None: nothing, as far as one knows."""
        return from_first(lambda: checksums.fault(self.directory / str(step)))

    def seen(self, step: int) -> Seen:
        """What was saved with number `step`; [] without."""
        return (self._manager.metadata(step).custom_metadata or {}).get("seen") or []


def _described(a: Any) -> Any:
    sharding = getattr(a, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


class Partway:
    """One checkpoint between two numbers, by step; its directory is made when it is first saved.

    Where there are several processes, it and `numbered` may not be written at the same time: these
    meet at barriers, and wait for signals, of Orbax that have the same names for both.
    """

    def __init__(self, directory: Path, numbered: Checkpoints):
        self.directory, self.numbered = directory, numbered
        there = from_first(directory.is_dir)
        self.saved: Checkpoints | None = Checkpoints(directory) if there else None

    def __enter__(self) -> "Partway":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.saved is not None:
            self.saved.__exit__(*raised)

    @property
    def step(self) -> int:
        """That of the checkpoint; 0 if there is none."""
        return max(self.saved.steps, default=0) if self.saved else 0

    def save(self, step: int, state: Any, seen: Seen) -> None:
        """As `Checkpoints.save`, in place of the one before, after the last numbered one."""
        self.numbered.settle()
        self.saved = self.saved or Checkpoints(self.directory)
        self.saved.save(step, state, step, seen)

    def settle(self) -> None:
        """As `Checkpoints.settle`."""
        if self.saved is not None:
            self.saved.settle()
