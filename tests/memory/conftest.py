import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import MemoryPlan, plan


def f32(*shape, **options):
    return jax.ShapeDtypeStruct(shape, jnp.float32, **options)


def matmuls(a, b):
    return jnp.tanh(a @ b) @ b


def is_line_of(file, source):
    name, _, line = os.path.basename(source).partition(":")
    return name == os.path.basename(file) and int(line) > 0


@pytest.fixture(scope="session")
def matmul_plan(gpu_compiler) -> MemoryPlan:
    """Plan a small program. Tests vary the plan instead of compiling another program."""
    matrix = f32(1024, 1024)
    return plan(matmuls, matrix, matrix, host_memory_bytes=64 * 2**30)


@pytest.fixture
def plot():
    """Draw a result with matplotlib, and return the axes."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    yield lambda result, **options: result.plot(**options)
    matplotlib.pyplot.close("all")


@pytest.fixture
def rich_text(capsys) -> Callable[[Any], str]:
    """Return what rich prints of a result."""
    rich = pytest.importorskip("rich")

    def text(result):
        rich.print(result)
        return capsys.readouterr().out

    return text
