import jax
import pytest

from effjax.ops._common import dispatch
from tests.ops.battery import NO_NATIVE


@pytest.fixture
def implementation(request, monkeypatch):
    """Return the argument `implementation` of a sampling operator."""
    if request.param == "native" and NO_NATIVE:
        pytest.skip("the native library is not built")
    if request.param == "default":
        monkeypatch.setattr(dispatch, "available_platforms", lambda: ())
    return None if request.param == "default" else request.param


@pytest.fixture
def x64_everywhere():
    """Enable float64 in the threads of XLA too, which partition custom calls."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
