"""Four devices of one and of two processes give the same losses and parameters."""

import numpy as np
import pytest

from tests.distributed.cases import OPERATORS, WAYS, results
from tests.distributed.processes import Group

# Relative to the largest value of each array. Sums over devices are taken in another order; the
# steps of the network amplify that, most in gradients (momenta).
TOLERANCE = {name: 2e-6 for name in OPERATORS} | {"network": 3e-4}


PROGRAM = """
import jax, numpy
jax.distributed.initialize({address!r}, 2, process, heartbeat_timeout_seconds=30)
from tests.distributed.cases import results
arrays = results({cases!r})
if process == 0:
    numpy.savez({file!r}, **arrays)"""


def check(folder, *cases: str) -> dict[str, np.ndarray]:
    """Return the results of two processes, which must agree with those of one."""
    file = str(folder / "arrays.npz")
    with Group() as two:
        ended = two.execute(PROGRAM.format(address=two.address, cases=cases, file=file))
        assert [one.code for one in ended] == [0, 0], ended
    with np.load(file) as arrays:
        got, want = dict(arrays), results(cases)
    assert got.keys() == want.keys()
    for case in got:
        assert_close(got[case], want[case], case)
    assert all(np.ptp(a) > 0 for case, a in got.items() if case.endswith("losses"))
    return got


def assert_close(a, b, case: str) -> None:
    name = case.split()[0]
    scale = max(np.abs(b).max(), 0.02)  # some are zero but for rounding
    np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[name] * scale, err_msg=case)


def test_batch_norm(tmp_path):
    got = check(tmp_path, *(f"batch_norm {way}" for way in WAYS))
    for case, a in got.items():
        name, _, which = case.split(" ", 2)
        assert_close(a, got[f"{name} jit {which}"], f"{case}, not as in jit")


@pytest.mark.exhaustive
def test_other_operators(tmp_path):
    """Compare the ways whose collectives differ: of gradients, statistics and split layers."""
    check(tmp_path, "deform_conv pmap", "dense_block jit", "offload jit", "offload pmap")


@pytest.mark.exhaustive
def test_network(tmp_path):
    check(tmp_path, "network shard_map")
