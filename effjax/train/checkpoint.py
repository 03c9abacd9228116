"""Checkpoints of a run: the last one and the best one, by Orbax.

A checkpoint is a directory `RUN/checkpoints/NUMBER` that Orbax puts in place only when it is whole.
It holds NumPy arrays, so a run can go on with other devices than it began with.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .errors import TrainError


class Checkpoints:
    """The checkpoints below `directory`; closes with a `with` block.

    They are numbered by what the run counts: epochs, or steps.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
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
        """The state of number `step`, of the structure and shapes of `like`.

        Raises:
            TrainError: the checkpoint is damaged, cannot be read, or is of another model.
        """
        like = jax.device_get(like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        # Orbax raises many types for a damaged file: of JSON, of TensorStore, of the system.
        except Exception as error:
            raise TrainError(
                f"{self.directory / str(step)}: cannot be restored ({type(error).__name__}); "
                "delete this directory, then resume: from an earlier checkpoint or the beginning"
            ) from error
