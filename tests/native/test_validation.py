"""The validation of kernels, with the CPU kernels in place of CUDA kernels, and broken ones."""

import pytest

from effjax import native
from effjax.validation import run
from tests.native import broken

pytestmark = pytest.mark.skipif(
    not native.is_available("cpu"), reason="built without native kernels"
)
TABLE = "tests.native.broken:KERNELS"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return broken.compile_library(tmp_path_factory.mktemp("broken"))


def validate(names, **options):
    options = dict(repeats=4, time_limit=20, dtypes=["float32"]) | options
    return run.validate(platform="cpu", table=TABLE, kernels=names, **options)


def test_all(library, monkeypatch):
    monkeypatch.setenv(broken.LIBRARY, str(library))
    report = validate(list(broken.KERNELS), report_line=print)
    for row in report["kernels"]:
        print(row)
    print(run.outcomes(report))
    assert {
        r["kernel"]: (r["failures"] or [{"kind": None}])[0]["kind"] for r in report["kernels"]
    } == broken.KINDS
