"""The options of a run, checked. Imports nothing heavy: the help of the command needs this."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..options import (
    COUNT,
    DATA,
    DECAY,
    HELD_OUT,
    MODEL,
    OPTIMIZATION,
    RATE,
    SEED,
    SHARE,
    CheckpointEvery,
    Keep,
    MeshAxes,
    OnNan,
    Option,
    RunOptions,
)

Parallel = Literal["jit", "shard_map", "pmap"]


@dataclasses.dataclass(frozen=True)
class Config(RunOptions):
    """What `effjax train` can be asked for; the defaults are those of `effjax train densenet`.

    None leaves the choice to the data (`image_size`, `augment`, `flip`, `small_inputs`) or to the
    model (`depth`, `growth_rate`, `compression`, `bn_size`).
    """

    COMMANDS: ClassVar[str] = "effjax train densenet or resnet"
    # Of runs without a validation set: the test set was looked at after each epoch.
    BEFORE: ClassVar[Mapping[str, Any]] = {"validation": 0}

    data: Annotated[
        str,
        Option("digits, rotated-digits, cifar10:PATH, cifar100:PATH or folder:PATH.", DATA),
    ] = "digits"
    validation: Annotated[
        float,
        Option(
            "Held out of the train set to choose the best epoch by: a share, or images.",
            DATA,
            HELD_OUT,
        ),
    ] = 0.1
    image_size: Annotated[
        int | None, Option("Resize the images of a folder to this side.", DATA, COUNT)
    ] = None
    augment: Annotated[
        bool | None, Option("Crop at random, and flip where the data allow it.", DATA, unset="on")
    ] = None
    flip: Annotated[
        bool | None,
        Option("Flip at random when augmenting.", DATA, unset="on, but not for digits"),
    ] = None

    model: Annotated[str, Option("densenet-bc, or a name like densenet121.", MODEL)] = "densenet-bc"
    depth: Annotated[int | None, Option("Depth of densenet-bc, 6n + 4.", MODEL, unset="22")] = None
    growth_rate: Annotated[
        int | None, Option("New channels of a layer.", MODEL, COUNT, unset="12, or the model's")
    ] = None
    compression: Annotated[
        float | None, Option("Share of channels that a transition keeps.", MODEL, unset="0.5")
    ] = None
    bn_size: Annotated[
        int | None, Option("Bottleneck width, in growth rates.", MODEL, COUNT, unset="4")
    ] = None
    drop_rate: Annotated[float, Option("Dropout of each layer's new channels.", MODEL)] = 0.0
    small_inputs: Annotated[
        bool | None,
        Option("A stem that does not pool.", MODEL, unset="on up to 64×64 pixels"),
    ] = None
    efficient: Annotated[
        bool, Option("Recompute in the backward pass instead of keeping.", MODEL)
    ] = True
    save: Annotated[
        Literal["conv", "features"], Option("What efficient blocks keep: fast or least.", MODEL)
    ] = "conv"
    dcn: Literal["none", "v1", "v2"] = "none"  # an option of `effjax train resnet` alone

    epochs: Annotated[int, Option("Passes over the train set.", OPTIMIZATION, COUNT)] = 20
    batch_size: Annotated[
        int, Option("Images of a step, over all devices.", OPTIMIZATION, COUNT)
    ] = 64
    learning_rate: Annotated[float, Option("SGD's rate at the start.", OPTIMIZATION, RATE)] = 0.1
    schedule: Annotated[
        Literal["cosine", "step"],
        Option("To zero, or a tenth at 1/2 and at 3/4 of the run.", OPTIMIZATION),
    ] = "cosine"
    momentum: Annotated[float, Option("Nesterov momentum.", OPTIMIZATION, SHARE)] = 0.9
    weight_decay: Annotated[
        float, Option("Of kernels; batch norm and biases are not decayed.", OPTIMIZATION, DECAY)
    ] = 1e-3
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option("Of the computation; parameters are float32.", OPTIMIZATION),
    ] = "float32"
    checkpoint_every: CheckpointEvery = None
    keep: Keep = 1
    on_nan: OnNan = "stop"
    mesh: MeshAxes = None
    parallel: Annotated[Parallel, Option("How all devices are used.")] = "jit"
    seed: Annotated[
        int, Option("Of parameters, order, augmentation, and dropout if any.", bounds=SEED)
    ] = 0

    @property
    def command(self) -> str:
        return "resnet" if self.model.startswith("resnet") else "densenet"
