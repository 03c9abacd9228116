"""Source lines of arrays: the line that computes an array, and the user's line that called it."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

_EFFJAX = f"{Path(__file__).parents[2]}{os.sep}"
_PLANNER = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def source_and_caller(stack: Sequence[str]) -> tuple[str, str]:
    """Return the line that made an array, and the user's line that called it.

    The second one is empty if the first is the user's, or if no line is.

    Args:
        stack: lines such as "file.py:12", the innermost first.
    """
    # Frames from the planner outwards belong to the caller of the planner, not to the program.
    frames = list(itertools.takewhile(lambda line: not line.startswith(_PLANNER), stack))
    source = next(iter(frames), "")
    caller = next((line for line in frames if not is_in_library(line)), "")
    return source, "" if caller == source else caller


def is_in_library(place: str) -> bool:
    """Return True if a file or line belongs to effjax or to an installed package."""
    return place.startswith(_EFFJAX) or _INSTALLED.search(place) is not None


def short_path(source: str) -> str:
    """Shorten a line for display.

    A library's path starts with its package; others keep their last two parts, relative to the
    working directory.
    """
    if not source:
        return ""
    if source.startswith(_EFFJAX):
        return f"effjax/{source[len(_EFFJAX) :]}"
    if is_in_library(source):
        return _INSTALLED.split(source)[-1]
    path = os.path.relpath(source)
    return "/".join((source if path.startswith("..") else path).split("/")[-2:])
