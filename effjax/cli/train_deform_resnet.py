"""`effjax train deform-resnet`."""

from pathlib import Path
from typing import Annotated, Any

from ..train.images.config import Config
from ..train.options import MODEL, declared
from .options import option
from .training import make_console, train_command, train_images

# Of the options of a DenseNet's run it has no model's, and the images are not to be flipped.
WITHOUT = ("flip", *(one.name for one in declared(Config) if one.option.panel == MODEL))
DEFAULTS = {
    "data": "rotated-digits", "augment": False,
    "epochs": 5, "learning_rate": 0.05, "weight_decay": 5e-4,
}  # fmt: skip


@train_command(
    "deform-resnet", Config, train_images, saver="--dtype bfloat16", with_resume=("epochs",),
    without=WITHOUT, defaults=DEFAULTS,
)  # fmt: skip
def train_deform_resnet(
    out: Path,
    overwrite: bool,
    *,
    baseline: Annotated[
        bool, option("Train the same network without deformation too, and compare.")
    ] = True,
    **options: Any,
) -> None:
    """Train a ResNet with deformable convolutions, and the same one without, on turned digits.

    Each has a run directory of its own in --out: deformable and plain.
    """
    accuracy = {}
    for name in ("deformable", "plain") if baseline else ("deformable",):
        config = Config(model="deform-resnet", deformable=name == "deformable", **options)
        accuracy[name] = train_images(config, out / name, overwrite).test_accuracy
    make_console().print(
        "test accuracy: " + ", ".join(f"{name} {value:.2%}" for name, value in accuracy.items()),
        highlight=False,
    )
