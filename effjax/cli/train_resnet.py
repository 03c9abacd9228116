"""`effjax train resnet`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from ..train.errors import TrainError
from ..train.images.config import Config
from ..train.options import MODEL
from .options import option
from .training import make_console, train_command, train_images

# Options of DenseNets, or options that a ResNet has in another form.
WITHOUT = ("model", "depth", "growth_rate", "compression", "bn_size", "drop_rate")


def train_and_compare(
    config: Config,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
    fall_back: bool = False,
    compare_plain: bool = False,
) -> None:
    """Train a ResNet in `out`; with `compare_plain` also one without deformation in `out`-plain."""
    from ..train.processes import from_first

    if compare_plain and config.dcn == "none":
        raise TrainError("--compare-plain needs --dcn v1 or v2")
    result = train_images(config, out, overwrite, resume, fall_back)
    if not compare_plain:
        return
    plain = dataclasses.replace(config, dcn="none")
    path = out.with_name(f"{out.name}-plain")
    resume = resume and from_first((path / "config.json").exists)
    plain_result = train_images(plain, path, overwrite, resume, fall_back and resume)
    make_console().print(
        f"test accuracy: dcn {config.dcn} {result.test_accuracy:.2%}, "
        f"plain {plain_result.test_accuracy:.2%}",
        highlight=False,
    )


@train_command(
    "resnet", Config, train_and_compare, saver="--save features",
    with_resume=("epochs", "compare_plain"), without=WITHOUT,
)  # fmt: skip
def train_resnet(
    out: Path,
    overwrite: bool,
    *,
    depth: Annotated[
        Literal["8", "18", "34", "50", "101"],
        option("Depth of the network; 8 is a narrow one for small images.", MODEL),
    ] = "18",
    dcn: Annotated[
        Literal["none", "v1", "v2"],
        option("Deformable 3×3 convolutions in all stages but the first.", MODEL),
    ] = "none",
    compare_plain: Annotated[
        bool,
        option(
            "With --dcn: also train the network without it, in OUT-plain.",
            MODEL,
            name="--compare-plain",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Train a ResNet with batch norm over all devices, and report what it costs in memory."""
    config = Config(model=f"resnet{depth}", dcn=dcn, **options)
    train_and_compare(config, out, overwrite, compare_plain=compare_plain)
