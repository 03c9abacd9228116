"""The configurations of training runs on images. Imports no JAX."""

import dataclasses
from typing import ClassVar, Literal, Self

from ..config import (
    COUNT,
    DATA,
    FRACTION,
    INDEX,
    MODEL,
    NONNEGATIVE,
    OPTIMIZATION,
    POSITIVE,
    SHARE,
    SHARE_OR_COUNT,
    SIZE,
    Check,
    RunConfig,
    option,
)
from ..errors import TrainError

Parallel = Literal["jit", "shard_map", "pmap"]

# The ResNets by depth. 8 is a narrow network of three stages, for small images.
RESNET_DEPTHS = (8, 18, 34, 50, 101, 152)
RESNET_DEPTH = Check(
    f"be one of {', '.join(map(str, RESNET_DEPTHS))}", lambda value: value in RESNET_DEPTHS
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(RunConfig):
    """Options of runs on images. If an option is None, its default depends on the data set."""

    UNIT: ClassVar[Literal["epoch", "step"]] = "epoch"

    data: str = option(
        "digits", help="digits, cifar10:PATH, cifar100:PATH or folder:PATH.", group=DATA
    )
    validation: float = option(
        0.1,
        help="Images held out to select the best parameters: a share of the train set, or a "
        "number. Unused if the folder has val/ and test/.",
        group=DATA,
        check=SHARE_OR_COUNT,
    )
    image_size: int | None = option(
        None,
        help="Resize the images of a folder to this side. (default: that of the first image; of a "
        "plan 32, or 224 for ImageNet's models)",
        group=DATA,
        check=SIZE,
    )
    normalize: Literal["data", "imagenet"] | None = option(
        None,
        help="Normalize pixels by the mean and standard deviation of the train set or of ImageNet. "
        "(default: data, or imagenet with --init-from)",
        group=DATA,
    )
    augment: bool | None = option(
        None, help="Crop at random, and flip if --flip. (default: on)", group=DATA
    )
    flip: bool | None = option(
        None, help="Flip at random when augmenting. (default: on, except for digits)", group=DATA
    )
    init_from: str | None = option(
        None,
        help="Start with the weights of this file: torchvision's .pth, .safetensors, or the output "
        "of effjax convert. If the classes differ, the head is new. (default: random weights)",
        group=MODEL,
    )
    freeze_stages: int | None = option(
        None,
        help="With --init-from, do not train the stem and so many stages, and keep the statistics "
        "of their norms. (default: train all)",
        group=MODEL,
        check=INDEX,
    )
    small_inputs: bool | None = option(
        None,
        help="Use a stem without pooling. (default: up to 64×64 pixels, or that of --init-from)",
        group=MODEL,
    )
    efficient: bool = option(
        True,
        help="Save memory: recompute activations in the backward pass.",
        group=MODEL,
    )
    save: Literal["conv", "features"] = option(
        "conv",
        help="With --efficient, conv keeps outputs of convolutions for the backward pass, and "
        "features recomputes them: slower, less memory.",
        group=MODEL,
    )
    epochs: int = option(20, help="Passes over the train set.", group=OPTIMIZATION, check=COUNT)
    batch_size: int = option(
        64, help="Examples per step, over all devices.", group=OPTIMIZATION, check=COUNT
    )
    learning_rate: float = option(
        0.1, help="Largest learning rate.", group=OPTIMIZATION, check=POSITIVE
    )
    schedule: Literal["cosine", "step"] = option(
        "cosine",
        help="Learning rate: cosine to 0, or a tenth after 1/2 and again after 3/4 of the run.",
        group=OPTIMIZATION,
    )
    momentum: float = option(0.9, help="Nesterov momentum of SGD.", group=OPTIMIZATION, check=SHARE)
    weight_decay: float = option(
        1e-3,
        help="Weight decay of kernels. Norms and biases have none.",
        group=OPTIMIZATION,
        check=NONNEGATIVE,
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        help="Dtype of the computation. Parameters are float32.",
        group=OPTIMIZATION,
    )
    parallel: Parallel = option(
        "jit", help="How the step is distributed over the devices.", group=OPTIMIZATION
    )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        raise NotImplementedError

    def resolve(self) -> Self:
        """Return the configuration; raise TrainError for options that cannot be combined."""
        if self.freeze_stages is not None and self.init_from is None:
            raise TrainError(
                f"`freeze_stages` (={self.freeze_stages}) needs `init_from`, the weights to freeze"
            )
        return super().resolve()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseNetRunConfig(ImageConfig):
    """Options of `effjax train densenet`.

    If an option of the network is None, its default depends on `model`.
    """

    COMMAND: ClassVar[str] = "densenet"

    model: str = option(
        "densenet-bc", help="densenet-bc, or a network such as densenet121.", group=MODEL
    )
    depth: int | None = option(
        None, help="Depth of densenet-bc, 6n + 4. (default: 22)", group=MODEL, check=SIZE
    )
    growth_rate: int | None = option(
        None,
        help="Channels that each layer adds. (default: 12, or that of --model)",
        group=MODEL,
        check=SIZE,
    )
    compression: float | None = option(
        None,
        help="Share of the channels that a transition keeps. (default: 0.5)",
        group=MODEL,
        check=FRACTION,
    )
    bn_size: int | None = option(
        None,
        help="Width of the bottleneck, in growth rates. (default: 4)",
        group=MODEL,
        check=SIZE,
    )
    drop_rate: float = option(
        0.0, help="Dropout rate of each layer's output.", group=MODEL, check=SHARE
    )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        return self.model

    def resolve(self) -> Self:
        """Return the configuration; raise TrainError for options that cannot be combined."""
        if "resnet" in self.model or "resnext" in self.model:
            raise TrainError(
                f"`model` (={self.model!r:.120}) is not a DenseNet. Use effjax train resnet "
                f"--model {self.model:.120}."
            )
        return super().resolve()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetRunConfig(ImageConfig):
    """Options of `effjax train resnet`. `model` replaces `depth`."""

    COMMAND: ClassVar[str] = "resnet"

    model: str | None = option(
        None,
        help="A network such as resnext50_32x4d. (default: the ResNet of --depth)",
        group=MODEL,
    )
    depth: int = option(
        18,
        help="Depth of the network: 18, 34, 50, 101, 152, or 8 for small images.",
        group=MODEL,
        check=RESNET_DEPTH,
    )
    dcn: Literal["none", "v1", "v2"] = option(
        "none", help="Deformable 3×3 convolutions in all stages but the first.", group=MODEL
    )

    @property
    def network(self) -> str:
        """The name of the network in messages."""
        return self.model or f"resnet{self.depth}"
