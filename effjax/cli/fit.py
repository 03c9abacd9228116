"""Options chosen to fit in a budget of memory, by `--fit` of commands that train."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..train.config import RunConfig
from ..train.errors import TrainError
from ..train.host_memory import pinnable_bytes
from .answer import print_reports
from .errors import CommandError
from .shell import describe_changes
from .user_steps import errors_in_one_line

if TYPE_CHECKING:
    from ..memory import OptionSearch
    from ..train.task import MemoryChoices

DEFAULT_TARGET = "h200"  # that of effjax.memory, which the help does not import
_UNITS = {"mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}


def parse_size(option: str, text: str) -> int:
    """Return the bytes in a text such as `24GB` or `22.5GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if not 1 <= size < 2**63:
        raise TrainError(f"{option} {text!r:.120} must be a size, such as 24GB or 22.5GiB.")
    return int(size)


def parse_fit(text: str) -> tuple[str, int | None]:
    """Return the target and the bytes of `--fit`: TARGET, SIZE or TARGET:SIZE."""
    target, colon, size = text.rpartition(":")
    if colon:
        return target, parse_size("--fit", size)
    from ..memory.devices import suggest_targets

    if text[:1].isdigit() and not suggest_targets(text):  # "4090" is neither: see `find_target`
        return DEFAULT_TARGET, parse_size("--fit", text)
    return text, None


def search_options(
    config: RunConfig, given: Collection[str], choices: "MemoryChoices", **limits: Any
) -> "OptionSearch":
    """Search for the fastest options of a run that fit, and keep those that are given."""
    from ..memory import choose_options

    def make_step(**values: Any) -> tuple[Any, ...] | None:
        changed = choices.change(**values)
        # A choice may set several options, such as --params-in and --fuse-update.
        if changed is None or any(getattr(changed, n) != getattr(config, n) for n in given):
            return None
        return choices.training_step(changed)

    return choose_options(
        make_step, choices.options,
        not_by_time=choices.not_by_time, min_bytes=choices.min_bytes, progress=True, **limits,
    )  # fmt: skip


def fit_config(
    config: Any,
    given: Collection[str],
    fit: str,
    choices: "MemoryChoices",
    num_devices: int,
) -> Any:
    """Return the configuration with the options that `--fit` chooses, and print them."""
    from ..train.processes import is_multiprocess

    if is_multiprocess():
        raise TrainError(
            "--fit works in a single process. Before, choose options with effjax memory --budget."
        )
    target, budget = parse_fit(fit)
    with errors_in_one_line(f"--fit {fit}: "):
        found = search_options(
            config, given, choices,
            target=target, budget=budget, num_devices=num_devices,
            host_memory_bytes=pinnable_bytes(),
        )  # fmt: skip
    print_reports([found])
    if found.options is None:
        raise CommandError(
            f"--fit {fit}: nothing fits. effjax memory {config.COMMAND} with the same options says "
            "what is short and what helps."
        )
    chosen = choices.change(**found.options)
    print(f"options: {describe_changes(config, chosen) or 'as given'}")
    return chosen
