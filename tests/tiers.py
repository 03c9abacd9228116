"""Test cases for the exhaustive tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that runs only with --exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def plainly(*names: str, of: Iterable[str]) -> list:
    """Return the cases `of`; only `names` run without --exhaustive."""
    return [name if name in names else exhaustive(name) for name in of]
