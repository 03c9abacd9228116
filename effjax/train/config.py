"""The configuration of a training run: each option is one field. Imports no JAX.

The command line, `--config FILE`, config.json of a run and the planner read the same fields.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

from .._files import MAX_COUNT, MAX_NUMBER, MAX_SIZE
from .errors import TrainError

DATA, MODEL, OPTIMIZATION, RUN, PROCESSES, PLAN = (
    "Data", "Model", "Optimization", "Run", "Several processes", "Plan",
)  # fmt: skip
# Options that may change on `--resume`. They do not affect the result of a step with finite loss
# and gradients, apart from rounding. Files may move: they are compared by their content.
PATHS = (
    "data", "validation_data", "checkpoint", "weights", "chat_template", "adapter",
    "sample_prompts",
)  # fmt: skip
RESUMABLE_OPTIONS = (
    *PATHS, "checkpoint_every", "keep", "on_nan", "mesh", "patience", "report_to",
    "sample_tokens", "sample_temperature",
)  # fmt: skip


class Check(NamedTuple):
    """A requirement of an option: what it must be, in words and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


SIZE = Check(f"be between 1 and {MAX_SIZE}", lambda value: 1 <= value <= MAX_SIZE)
COUNT = Check(f"be between 1 and {MAX_COUNT}", lambda value: 1 <= value <= MAX_COUNT)
INDEX = Check(f"be between 0 and {MAX_SIZE}", lambda value: 0 <= value <= MAX_SIZE)
SEED = Check(f"be between 0 and {2**32 - 1}", lambda value: 0 <= value < 2**32)
SHARE = Check("lie in [0, 1)", lambda value: 0 <= value < 1)
FRACTION = Check("lie in [0, 1]", lambda value: 0 <= value <= 1)
POSITIVE = Check(f"be above 0 and at most {MAX_NUMBER:g}", lambda value: 0 < value <= MAX_NUMBER)
NONNEGATIVE = Check(
    f"be at least 0 and at most {MAX_NUMBER:g}", lambda value: 0 <= value <= MAX_NUMBER
)
SHARE_OR_COUNT = Check(
    f"be a share in [0, 1) or a whole number up to {MAX_COUNT}",
    lambda value: 0 <= value < 1 or (value % 1 == 0 and 0 < value <= MAX_COUNT),
)


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    group: str = RUN,
    check: Check | None = None,
    positional: bool = False,
) -> Any:
    """Return a dataclass field that is an option of the command line.

    Args:
        default: The default. Without one, the option must be given.
        help: A sentence that describes the option.
        group: The group of the help.
        check: The requirement of a value that is not None, for `check_options`.
        positional: Whether the command line gives the value without the name of the option.
    """
    metadata = {"help": help, "group": group, "check": check, "positional": positional}
    return dataclasses.field(default=default, metadata=metadata)


def inherit(config_type: type, name: str, **changes: Any) -> Any:
    """Return an option of a base class with another `default`, `help` or other argument."""
    field = next(field for field in dataclasses.fields(config_type) if field.name == name)
    return option(**{"default": field.default, **field.metadata, **changes})


def check_options(options: Any) -> None:
    """Raise TrainError if a field of a dataclass has another type, or violates its check."""
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, check = getattr(options, field.name), field.metadata.get("check")
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        if not any(_is_one(value, kind) for kind in kinds):
            expected = " or ".join(_describe(kind) for kind in kinds if kind is not types.NoneType)
            raise TrainError(f"`{field.name}` (={value!r:.120}) must be {expected}")
        if check is not None and value is not None and not check.holds(value):
            raise TrainError(f"`{field.name}` (={value!s:.120}) must {check.words}")


def _is_one(value: Any, kind: Any) -> bool:
    """Return True if a value has a type, as JSON has them: bools are no numbers."""
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(
            _is_one(one, *typing.get_args(kind)) for one in value
        )
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    words[list[str]] = "a list of texts"
    return words.get(kind, "a text")


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

    The constructor checks single options. `resolve` fills in defaults that depend on other options
    and checks what cannot be combined, so that a configuration can be completed step by step.
    """

    COMMAND: ClassVar[str]  # the command that starts and resumes the run
    # The unit of the run's length, and the kind of its records. The option of the length is its
    # plural, which may change on resume.
    UNIT: ClassVar[Literal["epoch", "step"]]

    # Each kind of run declares these.
    data: str | list[str] | None
    validation: float
    batch_size: int
    learning_rate: float | None
    weight_decay: float
    dtype: Literal["float32", "bfloat16"]
    checkpoint_every: int | None = option(
        None, help="Also write a checkpoint every so many steps.", check=COUNT
    )
    keep: int = option(
        1,
        help="Number of most recent evaluated checkpoints to keep, besides the best one.",
        check=COUNT,
    )
    patience: int | None = option(
        None,
        help="Stop after this many validations without a better one.",
        group=OPTIMIZATION,
        check=COUNT,
    )
    on_nan: Literal["stop", "skip"] = option(
        "stop", help="At a loss or gradients that are not finite, stop, or skip the step."
    )
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = option(
        None,
        help="Also give the metrics to TensorBoard (into RUN/tensorboard), Weights & Biases or "
        "Trackio.",
    )
    mesh: str | None = option(
        None,
        help="Devices by axis, such as data=2,fsdp=4; fsdp shards the parameters. (default: all "
        "devices on the data axis)",
    )
    seed: int = option(
        0,
        help="Seed of all random numbers: new parameters, order, augmentation, dropout, rounding.",
        group=OPTIMIZATION,
        check=SEED,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def resolve(self) -> Self:
        """Return the configuration with the defaults that depend on other options.

        Raises:
            TrainError: Options that cannot be combined.
        """
        return self

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

    def check_resumable(self, run: object, stored: Mapping[str, Any]) -> None:
        """Raise TrainError if options other than the length and `RESUMABLE_OPTIONS` have changed.

        Args:
            run: The path of the run, for the message.
            stored: The options in its config.json.
        """
        options = dataclasses.asdict(self)
        for name, value in stored.items():
            if name in (*RESUMABLE_OPTIONS, f"{self.UNIT}s") or options.get(name) == value:
                continue
            raise TrainError(
                f"{run} was trained with `{name}` (={value!r:.120}), not with "
                f"{options.get(name)!r:.120}. Resume with the former, or start a new run."
            )

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
