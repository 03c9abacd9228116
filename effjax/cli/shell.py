"""Commands and options as one types them into a shell."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..train.config import RunConfig, command_line

if TYPE_CHECKING:
    from .planning import Limits


def describe_changes(config: RunConfig, changed: RunConfig) -> str:
    """Return the options of `changed` that differ from those of `config`."""
    return " ".join(
        word
        for field in dataclasses.fields(config)
        if (value := getattr(changed, field.name)) != getattr(config, field.name)
        for word in _words(field, value)
    )


def training_command(
    config_type: type[RunConfig], given: Mapping[str, Any], config: Any, limits: "Limits"
) -> str:
    """Return the command that trains with the options that are given and those of a form.

    Words in capitals stand for what a run needs and the plan did not.

    Args:
        config_type: The configuration of the command.
        given: Its options that are given.
        config: The configuration of the form.
        limits: What the step may use.
    """
    base = config_type(**given).resolve()
    words = [command_line(base.COMMAND)]
    for field in sorted(dataclasses.fields(config_type), key=_is_named):
        name = field.name
        # An option that the form changes is among the changes below.
        if name in given and getattr(config, name) == getattr(base, name):
            words += _words(field, given[name])
    if base.COMMAND == "detector":
        words += [f"--{name} {name.upper()}" for name in ("data", "weights") if name not in given]
    # Other networks have a default data set and start with random weights.
    if base.COMMAND == "finetune":
        if not find_weights(given["checkpoint"]):
            words[1] = "CHECKPOINT"
        if "data" not in given:
            words.append("--data FILE.jsonl")
    words.append(describe_changes(base, config))
    # Otherwise JAX would reserve less for the run than the plan had.
    if limits.target.is_gpu and limits.memory_fraction > limits.target.default_memory_fraction:
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={limits.memory_fraction:.4g}")
    return " ".join(filter(None, words))


def find_weights(checkpoint: str) -> Literal["folder", "hub", ""]:
    """Return where the weights of a checkpoint are; "" for a config.json alone."""
    from ..train.text.hub import parse_name

    if any(Path(checkpoint).glob("*.safetensors")):
        return "folder"
    return "hub" if parse_name(checkpoint) is not None else ""


def _is_named(field: dataclasses.Field) -> bool:
    return not field.metadata["positional"]


def _words(field: dataclasses.Field, value: Any) -> list[str]:
    """Return an option with its value; one that can be repeated may have several."""
    name = field.name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    texts = [shlex.quote(str(one)) for one in (value if isinstance(value, list) else [value])]
    return [f"--{name} {text}" if _is_named(field) else text for text in texts]
