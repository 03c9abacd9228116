import jax
import pytest

from effjax.ops._common import dispatch


@pytest.fixture
def implementation(request, monkeypatch):
    """The argument `implementation` of an operator."""
    if request.param == "default":
        monkeypatch.setattr(dispatch, "available_platforms", lambda: ())
    return None if request.param == "default" else request.param


@pytest.fixture
def x64_everywhere():
    """In the threads of XLA too, which partition custom calls."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
