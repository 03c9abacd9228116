"""Four devices of one, two and four processes give the same losses and parameters."""

import functools

import numpy as np
import pytest

from tests.distributed.cases import OPERATORS, WAYS, results
from tests.distributed.launch import in_processes

# Relative to the largest value of each array. Sums over devices are taken in another order; the
# steps of the network amplify that, most in gradients (momenta).
TOLERANCE = {name: 2e-6 for name in OPERATORS} | {"network": 3e-4}


@functools.cache
def alone(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return results(cases_of(names))


@functools.cache
def found(names: tuple[str, ...], count: int) -> dict[str, np.ndarray]:
    return in_processes(count, 4 // count, cases_of(names))


def cases_of(names: tuple[str, ...]) -> list[str]:
    return [f"{name} {way}" for name in names for way in WAYS]


def check(names: tuple[str, ...], count: int) -> None:
    """Assert that results agree with those of one process, and with those of jit."""
    got, want = found(names, count), alone(names)
    assert got.keys() == want.keys()
    for case, a in got.items():
        name, _, which = case.split(" ", 2)
        for of, b in (("1 process", want[case]), ("jit", got[f"{name} jit {which}"])):
            scale = max(np.abs(b).max(), 0.02)  # some are zero but for rounding
            np.testing.assert_allclose(
                a, b, rtol=0, atol=TOLERANCE[name] * scale, err_msg=f"{case}, not as in {of}"
            )
    assert all(np.ptp(a) > 0 for case, a in got.items() if case.endswith("losses"))


def test_operators_in_two_processes():
    check(("batch_norm",), 2)


@pytest.mark.exhaustive
def test_operators_in_four_processes():
    """Sums over devices are taken in the same order as in two processes."""
    names = tuple(OPERATORS)
    check(names, 4)
    for case, a in found(names, 2).items():
        np.testing.assert_array_equal(found(names, 4)[case], a, err_msg=case)


@pytest.mark.exhaustive
def test_network():
    check(("network",), 2)
