"""`effjax train densenet`."""

from pathlib import Path
from typing import Any

from ..train.images.config import Config
from .training import train_command, train_images


@train_command("densenet", Config, train_images, saver="--save features", with_resume=("epochs",))
def train_densenet(out: Path, overwrite: bool, **options: Any) -> None:
    """Train a DenseNet-BC with batch norm over all devices, and report what it costs in memory."""
    train_images(Config(**options), out, overwrite)
