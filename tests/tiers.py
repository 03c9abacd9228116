"""Test cases for the exhaustive tier."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that runs only with --exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def plainly(*names: str, of: Iterable[str]) -> list:
    """Return the cases `of`; only `names` run without --exhaustive."""
    return [name if name in names else exhaustive(name) for name in of]


def product_cases(*values: Iterable, plain: Collection[tuple]) -> list:
    """Return the product of `values` as cases; only those in `plain` run without --exhaustive."""
    cases = list(itertools.product(*values))
    assert set(plain) <= set(cases), set(plain) - set(cases)
    return [case if case in plain else exhaustive(*case) for case in cases]
