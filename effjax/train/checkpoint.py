"""Checkpoints of a run, by Orbax: the last one, the best one, and one of the way to the next.

A checkpoint is a directory that Orbax writes in the background, while the run goes on, and puts in
place only when it is whole. Each process writes and reads what its devices have of the arrays, and
those in host memory are written from there. A run can go on with other devices than it began with.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from .errors import TrainError

WITHOUT_IT = "delete this directory, then resume: from an earlier checkpoint or the beginning"
Seen = list[dict[str, float]]  # what was measured of steps


class Checkpoints:
    """The checkpoints below `directory`; closes with a `with` block.

    They are numbered by what the run counts: epochs, or steps.

    Args:
        directory: made if it is not there.
        read_only: nothing is made or written; without the directory, there are no checkpoints.
    """

    def __init__(self, directory: Path, read_only: bool = False):
        self.directory, self.read_only = directory, read_only
        # Orbax warns of its own `read_only`, and does no more for what is only restored.
        options = ocp.CheckpointManagerOptions(create=not read_only)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self._kept: set[int] = set()  # once that of the largest number is whole

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and jax.process_count() > 1:
            return  # the others may be gone, or wait for this one
        try:
            with contextlib.suppress(*() if kind is None else (OSError,)):
                self.settle()
        finally:
            self._manager.close()

    def save(self, step: int, state: Any, best: int, seen: Seen | None = None) -> None:
        """Begins to write the state as number `step`, when the save before has ended; when this one
        has, all others but number `best` are deleted.

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
        self._kept = {step, best}

    def settle(self) -> None:
        """Waits for the last `save`; errors as there."""
        if not self._kept:
            return
        with self._errors(max(self._kept)):
            self._manager.wait_until_finished()
            for other in self._manager.all_steps():
                if other not in self._kept:
                    self._manager.delete(other)
        self._kept = set()

    @contextlib.contextmanager
    def _errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        # Orbax raises many types for what the system refuses: of zarr, of TensorStore.
        except Exception as error:
            reason = f"{type(error).__name__} of Orbax"
            raise OSError(None, reason, str(self.directory / str(step))) from error

    @property
    def steps(self) -> list[int]:
        """The numbers that there are, in order."""
        return sorted(self._manager.all_steps())

    def restore(self, like: Any, step: int) -> Any:
        """The state of number `step`.

        Args:
            step: one of `steps`.
            like: arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and dtypes. Where
                these have a sharding, the array is put there; else on this process's first device.

        Raises:
            TrainError: the checkpoint is damaged, cannot be read, or is of another model.
        """
        like = jax.tree.map(_described, like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        # Orbax raises many types for a damaged file: of JSON, of TensorStore, of the system.
        except Exception as error:
            remedy = "give another run" if self.read_only else WITHOUT_IT
            raise TrainError(
                f"{self.directory / str(step)}: cannot be restored ({type(error).__name__}); "
                f"{remedy}"
            ) from error

    def seen(self, step: int) -> Seen:
        """What was saved with number `step`; [] without."""
        return self._manager.metadata(step).custom_metadata.get("seen") or []


def _described(a: Any) -> Any:
    sharding = getattr(a, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


class Partway:
    """One checkpoint between two numbers, by step; its directory is made when it is first saved."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._saved: Checkpoints | None = Checkpoints(directory) if directory.is_dir() else None

    def __enter__(self) -> "Partway":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._saved is not None:
            self._saved.__exit__(*raised)

    @property
    def step(self) -> int:
        """That of the checkpoint; 0 if there is none."""
        return max(self._saved.steps, default=0) if self._saved else 0

    def save(self, step: int, state: Any, seen: Seen) -> None:
        """As `Checkpoints.save`, in place of the one before."""
        self._saved = self._saved or Checkpoints(self.directory)
        self._saved.save(step, state, step, seen)

    def settle(self) -> None:
        """As `Checkpoints.settle`."""
        if self._saved is not None:
            self._saved.settle()

    def restore(self, like: Any) -> tuple[Any, Seen]:
        """The state, as of `Checkpoints.restore`, and what was measured since the last number."""
        assert self._saved is not None
        return self._saved.restore(like, self.step), self._saved.seen(self.step)
