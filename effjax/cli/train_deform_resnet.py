"""`effjax train deform-resnet`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from ..train.images.config import Config
from ..train.options import MODEL, declared
from .options import option
from .training import make_console, train_command, train_images

# Of the options of a DenseNet's run it has no model's, and the images are not to be flipped.
WITHOUT = ("flip", *(one.name for one in declared(Config) if one.option.panel == MODEL))
PAIR = "deformable", "plain"
DEFAULTS = {
    "data": "rotated-digits", "augment": False,
    "epochs": 5, "learning_rate": 0.05, "weight_decay": 5e-4,
}  # fmt: skip


def run_in(path: Path) -> Path:
    """The first of a pair of runs, or the run itself."""
    first = path / PAIR[0]
    return path if (path / "config.json").exists() or not first.is_dir() else first


def train_pair(
    config: Config,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
    fall_back: bool = False,
    baseline: bool = True,
) -> None:
    """Trains both networks, each in a directory of its own. With `resume` what there is goes on; a
    run that is no pair goes on by itself."""
    from ..train.processes import from_first

    if resume and run_in(out) == out:
        train_images(config, out, resume=True, fall_back=fall_back)
        return
    accuracy = {}
    for name in PAIR if baseline else PAIR[:1]:
        path = out / name
        goes_on = resume and from_first((path / "config.json").exists)
        result = train_images(
            dataclasses.replace(config, deformable=name == PAIR[0]), path, overwrite, goes_on,
            fall_back and goes_on, within=out if baseline else None,
        )  # fmt: skip
        accuracy[name] = result.test_accuracy
    make_console().print(
        "test accuracy: " + ", ".join(f"{name} {value:.2%}" for name, value in accuracy.items()),
        highlight=False,
    )


@train_command(
    "deform-resnet", Config, train_pair, saver="--dtype bfloat16",
    with_resume=("epochs", "baseline"), without=WITHOUT, defaults=DEFAULTS, run_in=run_in,
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
    train_pair(Config(model="deform-resnet", **options), out, overwrite, baseline=baseline)
