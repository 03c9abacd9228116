"""The `effjax memory` command for the very arguments of a run."""

import shlex
from typing import Any

from ..train.images.config import Config
from ..train.lm.config import LMConfig


def memory_command(task: Any) -> str:
    """Of a task: the same model, batch and devices, in all forms that are planned of it."""
    config, devices = task.config, task.mesh.size
    if isinstance(config, LMConfig):
        words = ["lm", *_options(config, "layers", "width", "context")]
        words += _options_unless_default(config, "lora", "num_microbatches", "policy")
    else:
        words = [{"densenet-bc": "densenet"}.get(config.model, config.model)]
        words += _options_unless_default(config, "depth", "growth_rate")
        height, _, _ = task.dataset.image_shape
        words += ["--image-size", height, "--num-classes", len(task.dataset.class_names)]
    words += _options(config, "batch_size") + _options_unless_default(config, "dtype")
    if config.mesh is not None:
        words += ["--mesh", config.mesh]
    elif devices > 1:
        words += ["--num-devices", devices]
    return shlex.join(["effjax", "memory", *map(str, words)])


def _options(config: Config | LMConfig, *names: str) -> list[Any]:
    pairs = [(f"--{name.replace('_', '-')}", getattr(config, name)) for name in names]
    return [word for pair in pairs for word in pair]


def _options_unless_default(config: Config | LMConfig, *names: str) -> list[Any]:
    other = [name for name in names if getattr(config, name) != getattr(type(config), name)]
    return _options(config, *other)
