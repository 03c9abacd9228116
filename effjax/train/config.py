"""The configuration of a training run, as its config.json stores it. Imports no JAX."""

import dataclasses
import hashlib
import json
import math
from typing import Any, ClassVar, Literal, Self

from .errors import TrainError

# Options that may change on `--resume`. They do not affect the result of a step with finite loss
# and gradients, apart from rounding. Files may move: they are compared by their content.
PATHS = "data", "validation_data", "checkpoint"
RESUMABLE_OPTIONS = *PATHS, "checkpoint_every", "keep", "on_nan", "mesh"


def command_line(command: str) -> str:
    """Return the command line of a `RunConfig.COMMAND`."""
    return f"effjax {command}" if command == "finetune" else f"effjax train {command}"


def fingerprint(options: Any) -> str:
    """Return a digest of the options of a run, without the `RESUMABLE_OPTIONS`.

    Raises:
        ValueError: `options` is not a dict.
    """
    if not isinstance(options, dict):
        raise ValueError("options must be an object")
    relevant = {name: value for name, value in options.items() if name not in RESUMABLE_OPTIONS}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that all training runs have.

    The command line checks types, choices and the bounds of integers. The constructor checks what
    it cannot express, and options that depend on each other.
    """

    COMMAND: ClassVar[str]  # the command that starts and resumes the run

    data: str
    validation: float = 0.1  # held out: a share of the train set (of the text), or a number
    batch_size: int
    learning_rate: float
    weight_decay: float
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int | None = None
    keep: int = 1
    on_nan: Literal["stop", "skip"] = "stop"
    mesh: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise TrainError(f"`learning_rate` (={self.learning_rate}) must be above 0 and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise TrainError(f"`weight_decay` (={self.weight_decay}) must be at least 0 and finite")
        if not (0 <= self.validation < 1 or self.validation % 1 == 0 < self.validation):
            raise TrainError(
                f"`validation` (={self.validation}) must be a share in [0, 1) or a whole number"
            )
        # Not in the fingerprint of config.json, and any other value would act as "skip".
        if self.on_nan not in ("stop", "skip"):
            raise TrainError(f"`on_nan` (={self.on_nan!r}) must be 'stop' or 'skip'")

    def check_share(self, *names: str) -> None:
        """Raise TrainError unless these options lie in [0, 1)."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise TrainError(f"`{name}` (={getattr(self, name)}) must lie in [0, 1)")

    def describe(self, version: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            version: The version of effjax.
            data: What distinguishes the data of the run from other data.
        """
        options = dataclasses.asdict(self)
        return {
            "effjax": version,
            "command": self.COMMAND,
            "options": options,
            "fingerprint": fingerprint(options),
            "data": data,
        }

    @classmethod
    def from_json(cls, options: Any) -> Self:
        """Return the configuration that config.json stores.

        Raises:
            TrainError: The options are those of another command or version.
        """
        try:
            return cls(**options)
        except (TypeError, TrainError) as error:
            raise TrainError(
                f"config.json is not that of {command_line(cls.COMMAND)}, or of another version "
                f"of effjax ({error}). Start a new run."
            ) from error
