"""The `effjax memory` command that plans a given run."""

import shlex
from typing import Any

from ..train.images.config import ImageConfig
from ..train.lm.config import LMConfig


def memory_command(task: Any) -> str:
    """Return the command that plans the model, batch and devices of a task, in all forms."""
    config, devices = task.config, task.mesh.size
    if isinstance(config, LMConfig):
        words = ["lm", *_options(config, "layers", "width", "context")]
        words += _changed_options(config, "lora", "num_microbatches", "policy")
    else:
        words = ["densenet" if config.network == "densenet-bc" else config.network]
        if config.COMMAND == "densenet":
            words += _changed_options(config, "depth", "growth_rate")
        height, _, _ = task.dataset.image_shape
        words += ["--image-size", height, "--num-classes", len(task.dataset.class_names)]
    words += _options(config, "batch_size") + _changed_options(config, "dtype")
    if config.mesh is not None:
        words += ["--mesh", config.mesh]
    elif devices > 1:
        words += ["--num-devices", devices]
    return shlex.join(["effjax", "memory", *map(str, words)])


def _options(config: ImageConfig | LMConfig, *names: str) -> list[Any]:
    pairs = [(f"--{name.replace('_', '-')}", getattr(config, name)) for name in names]
    return [word for pair in pairs for word in pair]


def _changed_options(config: ImageConfig | LMConfig, *names: str) -> list[Any]:
    changed = [name for name in names if getattr(config, name) != getattr(type(config), name)]
    return _options(config, *changed)
