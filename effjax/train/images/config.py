"""The options of a run, checked. Imports nothing heavy: the help of the command needs this."""

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import TrainError

Parallel = Literal["jit", "shard_map", "pmap"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What `effjax train` can be asked for; the defaults are those of `effjax train densenet`.

    None leaves the choice to the data (`image_size`, `augment`, `flip`, `small_inputs`) or to the
    model (`depth`, `growth_rate`, `compression`, `bn_size`).
    """

    data: str = "digits"
    image_size: int | None = None
    augment: bool | None = None
    flip: bool | None = None

    model: str = "densenet-bc"
    depth: int | None = None
    growth_rate: int | None = None
    compression: float | None = None
    bn_size: int | None = None
    drop_rate: float = 0.0
    small_inputs: bool | None = None
    efficient: bool = True
    save: Literal["conv", "features"] = "conv"
    deformable: bool = True  # of the model deform-resnet

    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.1
    schedule: Literal["cosine", "step"] = "cosine"
    momentum: float = 0.9
    weight_decay: float = 1e-3
    dtype: Literal["float32", "bfloat16"] = "float32"
    parallel: Parallel = "jit"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one = {"image_size", "growth_rate", "bn_size", "epochs", "batch_size"}
        for name, hint in get_type_hints(Config).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise TrainError(f"{name} (={value!r}) must be one of {', '.join(get_args(hint))}")
            if name in at_least_one and value is not None and value < 1:
                raise TrainError(f"{name} (={value}) must be at least 1")
        if not self.learning_rate > 0:
            raise TrainError(f"learning_rate (={self.learning_rate}) must be above 0")
        if not 0 <= self.momentum < 1:
            raise TrainError(f"momentum (={self.momentum}) must lie in [0, 1)")
        if not self.weight_decay >= 0:
            raise TrainError(f"weight_decay (={self.weight_decay}) must not be negative")
        if not 0 <= self.seed < 2**32:
            raise TrainError(f"seed (={self.seed}) must lie in 0..{2**32 - 1}")

    @classmethod
    def from_json(cls, options: Any) -> "Config":
        """The options that a run wrote into its config.json."""
        try:
            return cls(**options)
        except TypeError as error:
            raise TrainError(
                f"config.json is of another version of effjax ({error}); start a new run"
            ) from error
