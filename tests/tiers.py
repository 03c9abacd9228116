"""The rule of the two tiers.

`pytest.mark.parametrize` runs all its cases in both tiers. `vary` runs its first case in the plain
tier and all of them with --exhaustive. `pytest.mark.exhaustive` leaves a whole test function to
the exhaustive tier.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_Case = type(pytest.param())  # public since pytest 9 only


def vary(names: str | Sequence[str], values: Iterable, **kwargs: Any) -> pytest.MarkDecorator:
    """Parametrize a test as `pytest.mark.parametrize` does; only the first case is plain."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    cases = [
        case if isinstance(case, _Case) else pytest.param(*(case if len(names) > 1 else [case]))
        for case in values
    ]
    cases[1:] = [case._replace(marks=(*case.marks, pytest.mark.exhaustive)) for case in cases[1:]]
    return pytest.mark.parametrize(names, cases, **kwargs)
