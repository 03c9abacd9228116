"""Checkpoints of a run: the last one and the best one, by Orbax.

A checkpoint is a directory `RUN/checkpoints/NUMBER` that Orbax puts in place only when it is whole.
It holds NumPy arrays, so a run can go on with other devices than it began with.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from .errors import TrainError

WITHOUT_IT = "delete this directory, then resume: from an earlier checkpoint or the beginning"


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
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=False, create=not read_only
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any, best: int) -> None:
        """Writes the state as number `step`, then deletes all others but number `best`.

        Raises:
            OSError: it cannot be written, whatever the reason.
        """
        state = jax.device_get(state)
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)
            for other in self._manager.all_steps():
                if other not in (step, best):
                    self._manager.delete(other)
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
        """The state of number `step`, as NumPy arrays.

        Args:
            step: one of `steps`.
            like: arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and dtypes.

        Raises:
            TrainError: the checkpoint is damaged, cannot be read, or is of another model.
        """
        like = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        # Orbax raises many types for a damaged file: of JSON, of TensorStore, of the system.
        except Exception as error:
            remedy = "give another run" if self.read_only else WITHOUT_IT
            raise TrainError(
                f"{self.directory / str(step)}: cannot be restored ({type(error).__name__}); "
                f"{remedy}"
            ) from error
