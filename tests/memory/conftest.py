import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import MemoryPlan, PlanError, plan


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


@pytest.fixture(scope="module")
def numbers_are_steps(matmul_plan) -> Iterator[None]:
    """Let a step be (device bytes, host bytes, seconds) or an error, to search without compilers.

    Functions are compiled as ever.
    """
    planner = sys.modules["effjax.memory.plan"]  # whose name is that of its function
    real = planner.start_plan
    none = dict(arguments=0, outputs=0, aliased=0, generated_code=0)
    waits = dict(to_device_seconds=0.0, to_host_seconds=0.0, collective_seconds=0.0)

    def start_plan(step, args, options):
        if callable(step):
            return real(step, args, options)
        if isinstance(step, PlanError):
            raise step
        device, host, seconds = step
        time = dataclasses.replace(matmul_plan.step_time, compute_seconds=seconds, **waits)
        limits = ("target", "memory_fraction", "host_memory_bytes")
        result = dataclasses.replace(
            matmul_plan, **{name: options[name] for name in limits}, step_time=time,
            num_devices=options.get("num_devices") or 1,
            device=dataclasses.replace(matmul_plan.device, temporaries=device, **none),
            host=dataclasses.replace(matmul_plan.host, temporaries=host, **none),
        )  # fmt: skip
        return lambda pipe: result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "start_plan", start_plan)
        yield


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
