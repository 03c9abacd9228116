"""Options chosen to fit in a budget of memory, by `--fit` of commands that train."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ..train.config import RunConfig
from ..train.errors import TrainError
from .errors import CommandError
from .options import run_option
from .training import RunRequest, make_console
from .user_steps import shorten

if TYPE_CHECKING:
    from rich.console import Console

    from ..memory import OptionSearch

Fit = Annotated[
    str | None,
    run_option(
        help="Choose the options that trade time for memory: the fastest ones that fit in the "
        "memory of a GPU (h100), in a number of bytes (24GB), or both (h100:24GB). Options that "
        "are given do not change."
    ),
]
DEFAULT_TARGET = "h200"
_UNITS = {"mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}


def parse_size(option: str, text: str) -> int:
    """Return the bytes in a text such as `24GB` or `22.5GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise TrainError(f"{option} {text!r} must be a size, such as 24GB or 22.5GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_fit(text: str) -> tuple[str, int | None]:
    """Return the target and the bytes of `--fit`: TARGET, SIZE or TARGET:SIZE."""
    target, colon, size = text.rpartition(":")
    if colon:
        return target, parse_size("--fit", size)
    if text[:1].isdigit():
        return DEFAULT_TARGET, parse_size("--fit", text)
    return text, None


class Choices(NamedTuple):
    """The choices of a training run that trade time for memory.

    options:     values by name, as for `choose_options`.
    not_by_time: as for `choose_options`.
    configure:   ``configure(config, **options)`` returns the configuration with values of the
                 options, or None if it does not support them.
    make_step:   ``make_step(config)`` returns the training step, `(fun, *args)`.
    min_bytes:   as for `choose_options`.
    """

    options: Mapping[str, Sequence[Any]]
    not_by_time: Sequence[str]
    configure: Callable[..., Any]
    make_step: Callable[[Any], tuple[Any, ...]]
    min_bytes: Callable[..., tuple[int, int]] | None = None


def text_choices(config: Any, given: Collection[str], num_devices: int) -> Choices:
    """Return the choices of a language model, of which some options were given."""
    from ..train import decoder_forms as forms
    from ..train.lm import model

    fuses = config.fuse_update or "fuse_update" not in given
    return Choices(
        forms.MEMORY_OPTIONS,
        forms.NOT_BY_TIME,
        functools.partial(forms.with_memory_options, num_devices=num_devices, fuse_update=fuses),
        lambda config: model.lm_training_step(config, num_devices),
        functools.partial(
            forms.min_bytes,
            model.make_model(config),
            (config.batch_size, config.context),
            config.dtype,
            num_devices,
        ),
    )


def finetune_choices(config: Any, given: Collection[str], num_devices: int) -> Choices:
    """Return the choices of fine-tuning, of which some options were given."""
    from ..train import decoder_forms
    from ..train.finetune import forms

    model, shape = forms.read_model(config), (config.batch_size, config.max_length)
    fuses = config.fuse_update or "fuse_update" not in given
    return Choices(
        forms.MEMORY_OPTIONS,
        forms.NOT_BY_TIME,
        functools.partial(forms.with_memory_options, num_devices=num_devices, fuse_update=fuses),
        lambda config: forms.training_step(config, model, num_devices),
        functools.partial(decoder_forms.min_bytes, model, shape, config.dtype, num_devices),
    )


def image_choices(image_shape: tuple[int, int, int], classes: int, num_devices: int) -> Choices:
    """Return the choices of a network for images."""
    from ..train.images import forms

    return Choices(
        forms.IMAGE_MEMORY_OPTIONS,
        [*forms.IMAGE_MEMORY_OPTIONS],
        forms.with_memory_options,
        lambda config: forms.image_training_step(config, image_shape, classes, num_devices),
    )


def search_options(
    config: RunConfig, given: Collection[str], choices: Choices, **limits: Any
) -> "OptionSearch":
    """Search for the fastest options of a run that fit.

    Args:
        config: The options of the run.
        given: The names of its options that must not change.
        choices: What to choose from.
        **limits: Other arguments of `choose_options`.
    """
    from ..memory import choose_options

    def make_step(**values: Any) -> tuple[Any, ...] | None:
        changed = choices.configure(config, **values)
        if changed is None or any(getattr(changed, n) != getattr(config, n) for n in given):
            return None
        return choices.make_step(changed)

    return choose_options(
        make_step, choices.options,
        not_by_time=choices.not_by_time, min_bytes=choices.min_bytes, progress=True, **limits,
    )  # fmt: skip


def fit_config(
    config: Any,
    given: Collection[str],
    fit: str,
    choices: Choices,
    num_devices: int,
    console: "Console",
) -> Any:
    """Return the configuration with the options that `--fit` chooses, and print them."""
    from ..memory import PlanError
    from ..train.processes import is_multiprocess
    from ..train.report import print_line

    if is_multiprocess():
        raise TrainError(
            "--fit works in a single process. Before, choose options with effjax memory --budget."
        )
    target, budget = parse_fit(fit)
    fields = {field.name for field in dataclasses.fields(config)}
    try:
        found = search_options(
            config, fields & set(given), choices,
            target=target, budget=budget, num_devices=num_devices,
        )  # fmt: skip
    except PlanError as error:
        raise CommandError(f"--fit {fit}: {shorten(str(error))}") from error
    except ValueError as error:
        raise TrainError(f"--fit {fit}: {shorten(str(error))}") from error
    if console.is_terminal:
        console.print(found)
    else:
        for line in str(found).splitlines():
            print_line(console, line)
    if found.options is None:
        raise CommandError(
            f"--fit {fit}: nothing fits. Try a smaller --batch-size, or give fewer options."
        )
    chosen = choices.configure(config, **found.options)
    print_line(console, f"options: {describe_changes(config, chosen) or 'as given'}")
    return chosen


def fit_decoder(
    request: RunRequest,
    fit: str | None,
    given: Collection[str],
    make_choices: Callable[[Any, Collection[str], int], Choices],
) -> RunRequest:
    """Return the request to train a decoder, with the options that `--fit` chooses, if given.

    Args:
        request: The run.
        fit: The value of `--fit`.
        given: The names of the options that the command line gives.
        make_choices: `text_choices` or `finetune_choices`.
    """
    if fit is None:
        return request
    from ..train.mesh import make_mesh

    config, size = request.config, make_mesh(request.config.mesh).size
    choices = make_choices(config, given, size)
    config = fit_config(config, given, fit, choices, size, make_console())
    return dataclasses.replace(request, config=config)


def describe_changes(config: RunConfig, changed: RunConfig) -> str:
    """Return the options of `changed` that differ, as on a command line."""
    words = []
    for field in dataclasses.fields(config):
        value, name = getattr(changed, field.name), field.name.replace("_", "-")
        if value == getattr(config, field.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)
