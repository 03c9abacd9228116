"""Which cases wait for --exhaustive."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """A case of `pytest.mark.parametrize` that plain pytest leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def plainly(*names: str, of: Iterable[str]) -> list:
    """The names of cases, of which plain pytest runs these."""
    return [name if name in names else exhaustive(name) for name in of]
