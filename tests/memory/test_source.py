"""Source lines in plans: the library's line and the user's."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax._src import source_info_util

import effjax
from effjax.memory import plan
from effjax.memory.read.source import short_path, source_and_caller
from tests.programs import needs_gpu_compiler

PACKAGE = str(pathlib.Path(effjax.__file__).parent)
PLANNER = f"{PACKAGE}/memory/compiler/process.py:9"
INSTALLED = "/opt/lib/python3.11/site-packages/"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], ("", "")),
        (["/me/step.py:3"], ("/me/step.py:3", "")),
        ([f"{PACKAGE}/ops/a.py:1", "/me/step.py:3"], (f"{PACKAGE}/ops/a.py:1", "/me/step.py:3")),
        ([f"{INSTALLED}flax/a.py:1", "/me/b.py:3"], (f"{INSTALLED}flax/a.py:1", "/me/b.py:3")),
        # Callers of the planner: the command, or a notebook cell.
        ([f"{PACKAGE}/ops/a.py:1", PLANNER, "/usr/bin/effjax:6"], (f"{PACKAGE}/ops/a.py:1", "")),
        ([f"{PACKAGE}/ops/a.py:1", "/me/a.py:3", PLANNER], (f"{PACKAGE}/ops/a.py:1", "/me/a.py:3")),
        ([PLANNER, "/usr/bin/effjax:6"], ("", "")),
    ],
)
def test_source_and_caller(places, expected):
    assert source_and_caller(places) == expected


def test_short_path():
    assert short_path(f"{PACKAGE}/ops/a.py:1") == "effjax/ops/a.py:1"
    assert short_path(f"{INSTALLED}flax/nnx/nn/linear.py:7") == "flax/nnx/nn/linear.py:7"
    assert short_path("/me/projects/net/step.py:3") == "net/step.py:3"


@pytest.fixture
def as_if_installed(monkeypatch):
    """Make JAX drop the frames of effjax, as it does outside of a virtual environment."""
    paths = [*source_info_util._exclude_paths, PACKAGE]
    monkeypatch.setattr(source_info_util, "_exclude_paths", paths)
    caches = source_info_util._exclude_path_regex, source_info_util.is_user_filename
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@needs_gpu_compiler
def test_plan_names_source_and_caller(as_if_installed):
    def gradient(x):
        return jax.grad(lambda x: jnp.sin(effjax.sync_batch_norm(x)[0]).sum())(x)

    p = plan(gradient, jax.ShapeDtypeStruct((4096, 8, 256), jnp.float32))
    made = [b for b in p.peak_buffers if b.source.startswith(f"{PACKAGE}{os.sep}ops")]
    here = f"{__file__}:{gradient.__code__.co_firstlineno + 1}"
    assert made and here in {b.caller for b in made}
    assert "called from" in str(p) and os.path.basename(here) in str(p)
    assert not source_info_util.is_user_filename(f"{PACKAGE}/ops/a.py")  # restored
