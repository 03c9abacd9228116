"""`effjax train resnet`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from ..train.images.config import Config
from ..train.options import MODEL
from .options import option
from .training import train_command, train_images

# What of the options of a DenseNet's run a ResNet does not have, or has in another way.
WITHOUT = ("model", "depth", "growth_rate", "compression", "bn_size", "drop_rate")


@train_command(
    "resnet", Config, train_images, saver="--save features", with_resume=("epochs",),
    without=WITHOUT,
)  # fmt: skip
def train_resnet(
    out: Path,
    overwrite: bool,
    *,
    depth: Annotated[Literal["18", "34", "50", "101"], option("Of the network.", MODEL)] = "18",
    dcn: Annotated[
        Literal["none", "v1", "v2"],
        option("Deformable 3×3 convolutions in all stages but the first.", MODEL),
    ] = "none",
    **options: Any,
) -> None:
    """Train a ResNet with batch norm over all devices, and report what it costs in memory."""
    train_images(Config(model=f"resnet{depth}", dcn=dcn, **options), out, overwrite)
