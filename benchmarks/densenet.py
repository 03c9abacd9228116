"""Planned memory of a training step of a DenseNet-BC.

The forms are those of `effjax memory`: Flax's BatchNorm, the same with ``jax.checkpoint`` on every
layer, and effjax's. The benchmark `dense-block` times the same layers.
"""

from collections.abc import Iterator, Sequence

from effjax.train.images.config import DenseNetRunConfig
from effjax.train.images.plans import forms, training_step

from .measure import TARGET, need_compiler, plan_training
from .results import Result, Size

# Depth of the network, at batch 64 of 32x32 images as in Pleiss et al. 2017.
DEPTHS: dict[Size, int] = {"small": 22, "published": 100}


def plan_network(
    depth: int,
    batch_size: int = 64,
    target: str = TARGET,
    names: Sequence[str] | None = None,
) -> Result:
    """Plan steps of SGD with momentum, of some forms or of all."""
    config = DenseNetRunConfig(depth=depth, growth_rate=12, batch_size=batch_size)
    return plan_training(
        f"memory_densenet_{depth}",
        f"step of DenseNet-BC-{depth} (k = 12), batch {batch_size} of 32x32",
        {"depth": depth, "batch_size": batch_size},
        {form: training_step(config, form=form) for form in names or forms(config, ())},
        target,
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    yield plan_network(DEPTHS[size])
