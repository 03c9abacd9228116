import functools

import jax
import pytest

from effjax import deform_conv2d
from effjax.ops._common import dispatch


@pytest.fixture
def conv(request, monkeypatch):
    """deform_conv2d as one implementation."""
    if request.param == "default":
        monkeypatch.setattr(dispatch, "available_platforms", lambda: ())
    name = None if request.param == "default" else request.param
    return functools.partial(deform_conv2d, implementation=name)


@pytest.fixture
def x64_everywhere():
    """In the threads of XLA too, which partition custom calls."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
