import jax
import pytest

from effjax import native


@pytest.fixture
def implementation(request, monkeypatch):
    """Return the argument `implementation` of a sampling operator."""
    if request.param == "default":
        monkeypatch.setattr(native, "is_available", lambda platform: False)
    return None if request.param == "default" else request.param


@pytest.fixture
def x64_everywhere():
    """Enable float64 in the threads of XLA too, which partition custom calls."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
