"""Which line made an array: the library's that computes it, and the user's that led there."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

_EFFJAX = f"{Path(__file__).parents[1]}{os.sep}"
_PLANNER = f"{Path(__file__).parent}{os.sep}"  # who called it made nothing
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def made_by(places: Sequence[str]) -> tuple[str, str]:
    """(the line that made it, the user's line that led there).

    The second is empty where the first is the user's, or where there is none.

    Args:
        places: "file.py:12" of the stack, the innermost first.
    """
    inside = list(itertools.takewhile(lambda place: not place.startswith(_PLANNER), places))
    source = next(iter(inside), "")
    caller = next((place for place in inside if not in_library(place)), "")
    return source, "" if caller == source else caller


def in_library(place: str) -> bool:
    """Whether a file, or a line of one, is effjax's or of an installed package."""
    return place.startswith(_EFFJAX) or _INSTALLED.search(place) is not None


def from_package(place: str) -> str:
    """A library's line with the name of its package first: effjax/ops/batch_norm/sync.py:12."""
    if place.startswith(_EFFJAX):
        return f"effjax/{place[len(_EFFJAX) :]}"
    return _INSTALLED.split(place)[-1]
