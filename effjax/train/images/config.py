"""The configurations of training runs on images. Imports no JAX."""

import dataclasses
from typing import ClassVar, Literal

from ..config import RunConfig
from ..errors import TrainError

Parallel = Literal["jit", "shard_map", "pmap"]

# The ResNets by depth. 8 is a narrow network of three stages, for small images.
RESNET_DEPTHS = (8, 18, 34, 50, 101, 152)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(RunConfig):
    """Options of runs on images. If an option is None, its default depends on the data set."""

    data: str = "digits"
    image_size: int | None = None
    normalize: Literal["data", "imagenet"] | None = None
    augment: bool | None = None
    flip: bool | None = None

    init_from: str | None = None
    freeze_stages: int | None = None
    small_inputs: bool | None = None
    efficient: bool = True
    save: Literal["conv", "features"] = "conv"

    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.1
    schedule: Literal["cosine", "step"] = "cosine"
    momentum: float = 0.9
    weight_decay: float = 1e-3
    parallel: Parallel = "jit"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_share("momentum")
        if self.freeze_stages is not None and self.init_from is None:
            raise TrainError(
                f"`freeze_stages` (={self.freeze_stages}) needs `init_from`, the weights to freeze"
            )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseNetConfig(ImageConfig):
    """Options of `effjax train densenet`.

    If an option of the network is None, its default depends on `model`.
    """

    COMMAND: ClassVar[str] = "densenet"

    model: str = "densenet-bc"
    depth: int | None = None
    growth_rate: int | None = None
    compression: float | None = None
    bn_size: int | None = None
    drop_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if "resnet" in self.model or "resnext" in self.model:
            raise TrainError(
                f"`model` (={self.model!r}) is not a DenseNet. Use effjax train resnet --model "
                f"{self.model}."
            )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        return self.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """Options of `effjax train resnet`. `model` replaces `depth`."""

    COMMAND: ClassVar[str] = "resnet"

    model: str | None = None
    depth: int = 18
    dcn: Literal["none", "v1", "v2"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in RESNET_DEPTHS:
            raise TrainError(
                f"`depth` (={self.depth}) must be one of {', '.join(map(str, RESNET_DEPTHS))}"
            )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        return self.model or f"resnet{self.depth}"
