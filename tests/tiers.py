"""Which cases wait for --exhaustive."""

from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """A case of `pytest.mark.parametrize` that plain pytest leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
