"""The configuration of training runs of detectors. Imports no JAX."""

import dataclasses
from typing import ClassVar, Literal, Self

from ..config import (
    COUNT,
    DATA,
    FRACTION,
    MODEL,
    NONNEGATIVE,
    OPTIMIZATION,
    POSITIVE,
    Check,
    RunConfig,
    inherit,
    option,
)
from ..errors import TrainError
from ..images.config import ImageConfig
from ..text.config import FinetuneConfig

CELL, STEP = 32, 64  # pixels: the model's largest stride, and between two sizes in training


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorConfig(RunConfig):
    """Options of `effjax train detector`. `prepare` fills in `steps`."""

    COMMAND: ClassVar[str] = "detector"
    UNIT: ClassVar[Literal["epoch", "step"]] = "step"

    data: str | None = option(
        None, help="Folder of images with boxes, as COCO or Roboflow lays it out.", group=DATA
    )
    validation: float = inherit(
        ImageConfig,
        "validation",
        help="Images held out to select the best parameters: a share of the train set, or a "
        "number. Unused if the folder has a validation set.",
    )
    image_size: int = option(
        640,
        help="Resize images to this side.",
        group=DATA,
        check=Check(f"be a multiple of {CELL}", lambda size: size > 0 and size % CELL == 0),
    )
    num_sizes: int = option(
        1,
        help=f"Train on so many sizes around --image-size, {STEP} pixels apart. Each step draws "
        "one. Each is compiled once.",
        group=DATA,
        check=Check("be odd and at most 9", lambda number: number in range(1, 10, 2)),
    )
    augment: bool = option(True, help="Crop and flip at random.", group=DATA)
    weights: str | None = option(
        None,
        help="The RT-DETR to start with: a folder in Hugging Face's layout, or a name on the Hub "
        "such as PekingU/rtdetr_r50vd. If the number of classes differs, their heads are new. "
        "(default of a plan: ResNet-50)",
        group=MODEL,
    )
    freeze_norms: bool | None = option(
        None,
        help="Keep all batch norms, or train all of them, with statistics over all devices. "
        "(default: keep those of the backbone, if config.json of the model does)",
        group=MODEL,
    )
    efficient: bool = inherit(ImageConfig, "efficient")
    save: Literal["conv", "features"] = inherit(ImageConfig, "save")
    epochs: int = inherit(ImageConfig, "epochs")
    steps: int | None = inherit(FinetuneConfig, "steps")
    report_every: int | None = inherit(FinetuneConfig, "report_every")
    batch_size: int = option(
        16, help="Images per step, over all devices.", group=OPTIMIZATION, check=COUNT
    )
    learning_rate: float = option(
        1e-4, help="Largest learning rate.", group=OPTIMIZATION, check=POSITIVE
    )
    backbone_rate: float = option(
        0.1,
        help="Learning rate of the backbone, as a share of the others'.",
        group=OPTIMIZATION,
        check=FRACTION,
    )
    warmup: float = inherit(FinetuneConfig, "warmup")
    schedule: Literal["cosine", "linear", "constant"] = inherit(FinetuneConfig, "schedule")
    weight_decay: float = option(
        1e-4,
        help="Weight decay of AdamW. Norms and biases have none.",
        group=OPTIMIZATION,
        check=NONNEGATIVE,
    )
    clip_norm: float = inherit(FinetuneConfig, "clip_norm", default=0.1)
    dtype: Literal["float32", "bfloat16"] = inherit(ImageConfig, "dtype")

    @property
    def train_sizes(self) -> list[int]:
        """The sides of images in training, the smallest first."""
        half = self.num_sizes // 2
        return [self.image_size + STEP * i for i in range(-half, half + 1)]

    def resolve(self) -> Self:
        """Return the configuration; raise TrainError for options that cannot be combined."""
        if self.train_sizes[0] < CELL:
            raise TrainError(
                f"`num_sizes` (={self.num_sizes}) needs `image_size` (={self.image_size}) to be at "
                f"least {self.num_sizes // 2 * STEP + CELL}"
            )
        return super().resolve()
