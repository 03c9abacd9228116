"""The rule of the two tiers.

`pytest.mark.parametrize` runs all its cases in both tiers. `vary` runs its first case in the plain
tier and all of them with --exhaustive. `pytest.mark.exhaustive` leaves a whole test function to
the exhaustive tier.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

_Case = type(pytest.param())  # public since pytest 9 only


def vary(names: str | Sequence[str], values: Iterable, **kwargs: Any) -> pytest.MarkDecorator:
    """Parametrize a test like `pytest.mark.parametrize`; the plain tier runs the first case only."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    cases = [
        case if isinstance(case, _Case) else pytest.param(*(case if len(names) > 1 else [case]))
        for case in values
    ]
    cases[1:] = [case._replace(marks=(*case.marks, pytest.mark.exhaustive)) for case in cases[1:]]
    return pytest.mark.parametrize(names, cases, **kwargs)


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
