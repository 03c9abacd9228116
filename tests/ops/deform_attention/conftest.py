import functools

import jax
import pytest

from effjax import dcn_aggregate, ms_deform_attn
from effjax.ops._common import dispatch


def _implementation(request, monkeypatch):
    if request.param == "default":
        monkeypatch.setattr(dispatch, "available_platforms", lambda: ())
    return None if request.param == "default" else request.param


@pytest.fixture
def attn(request, monkeypatch):
    """ms_deform_attn as one implementation."""
    return functools.partial(ms_deform_attn, implementation=_implementation(request, monkeypatch))


@pytest.fixture
def dcn(request, monkeypatch):
    """dcn_aggregate as one implementation."""
    return functools.partial(dcn_aggregate, implementation=_implementation(request, monkeypatch))


@pytest.fixture
def x64_everywhere():
    """In the threads of XLA too, which partition custom calls."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
