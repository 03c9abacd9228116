"""The options of a run, each declared once: a field of a dataclass, an `Option` beside its type.

The dataclass checks values by it, and the command line makes its options of it. Imports nothing
heavy: the help of the command needs this.
"""

import abc
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import TrainError

DATA, MODEL, OPTIMIZATION = "Data", "Model", "Optimization"


class Bounds(NamedTuple):
    """What a value must do, in words, and whether it does."""

    words: str
    hold: Callable[[Any], bool]


COUNT = Bounds("be at least 1", lambda value: value >= 1)
SHARE = Bounds("lie in [0, 1)", lambda value: 0 <= value < 1)
RATE = Bounds("be above 0 and finite", lambda value: 0 < value < math.inf)
DECAY = Bounds("be finite and not negative", lambda value: 0 <= value < math.inf)
SEED = Bounds(f"lie in 0..{2**32 - 1}", lambda value: 0 <= value < 2**32)
KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
HELD_OUT = Bounds(
    "lie in [0, 1), or be a whole number",
    lambda value: 0 <= value < 1 or 1 <= value < math.inf and value == int(value),
)


@dataclasses.dataclass(frozen=True)
class Option:
    """What is said of an option beside its type and its default.

    help: one line.
    panel: the group that the help shows it in.
    bounds: of its value, unless that is None.
    unset: what None stands for, in words.
    """

    help: str
    panel: str | None = None
    bounds: Bounds | None = None
    unset: str | None = None


CheckpointEvery = Annotated[
    int | None,
    Option("Also write a checkpoint after so many steps, in the background.", bounds=COUNT),
]
OnNan = Annotated[
    Literal["stop", "skip", "rollback"],
    Option(
        "At a loss or gradients that are not finite: stop; skip the step; or go back to the last "
        "checkpoint, and leave that batch out."
    ),
]
MeshAxes = Annotated[
    str | None,
    Option(
        "Devices by axis, like data=2,fsdp=4: parameters are split over fsdp.",
        unset="all along data",
    ),
]
# What makes no difference to a run's numbers, as long as they are finite, but for rounding; beside
# it, its length may change.
WITHOUT_EFFECT = ("data", "checkpoint_every", "on_nan", "mesh")  # what the data hold is compared


class Declared(NamedTuple):
    """An option as a dataclass declares it: `name: Annotated[kind, option] = default`."""

    name: str
    kind: Any
    option: Option
    default: Any


def declared(options: type) -> list[Declared]:
    """The options of a dataclass, in their order; fields without an `Option` are none."""
    hints = get_type_hints(options, include_extras=True)
    found = []
    for field in dataclasses.fields(options):
        if get_origin(hints[field.name]) is Annotated:
            kind, option = get_args(hints[field.name])
            found.append(Declared(field.name, kind, option, field.default))
    return found


def check(options: Any) -> None:
    """Raises `TrainError` if a value is not of its option's type, none of its choices, or out of
    its bounds."""
    for name, kind, option, _ in declared(type(options)):
        value = getattr(options, name)
        kinds = (kind,) if get_origin(kind) is Literal else get_args(kind) or (kind,)
        choices = [c for one in kinds if get_origin(one) is Literal for c in get_args(one)]
        if choices:
            if value not in (choices if kind is kinds[0] else [*choices, None]):
                raise TrainError(f"{name} (={value!r}) must be one of {', '.join(choices)}")
            continue
        if not _is_one_of(kinds, value):
            words = " or ".join(KINDS[one] for one in kinds)
            raise TrainError(f"{name} (={value!r}) must be {words}")
        if option.bounds is not None and value is not None and not option.bounds.hold(value):
            raise TrainError(f"{name} (={value}) must {option.bounds.words}")


def _is_one_of(kinds: tuple[type, ...], value: Any) -> bool:
    """An integer is a number too; True is neither."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def fingerprint(options: Any) -> str:
    """What tells the options of a run from others, but for those `WITHOUT_EFFECT`.

    Raises:
        ValueError: these are no options.
    """
    if not isinstance(options, dict):
        raise ValueError("options: not an object")
    told = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class RunOptions(abc.ABC):
    """The options of a run: checked when they are made, and read from the run's config.json."""

    COMMANDS: ClassVar[str]
    BEFORE: ClassVar[Mapping[str, Any]] = {}  # what older runs did, by options they did not have

    def __post_init__(self) -> None:
        check(self)

    def describe(self, version: str, data: dict[str, Any]) -> dict[str, Any]:
        """For config.json: what made the run, its options, and what its data are."""
        options = dataclasses.asdict(self)
        return {
            "effjax": version,
            "command": self.command,
            "options": options,
            "fingerprint": fingerprint(options),
            "data": data,
        }

    @property
    @abc.abstractmethod
    def command(self) -> str:
        """The command of `effjax train` that goes on with a run of these options."""

    @classmethod
    def from_json(cls, options: Any) -> Self:
        """The options that a run wrote into its config.json."""
        try:
            return cls(**{**cls.BEFORE, **options})
        except (TypeError, TrainError) as error:
            raise TrainError(
                f"config.json is not of {cls.COMMANDS}, or of another version of effjax ({error}); "
                "start a new run"
            ) from error
