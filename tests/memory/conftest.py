import jax
import jax.numpy as jnp
import pytest

from effjax.memory import MemoryPlan, plan


def matmuls(a, b):
    return jnp.tanh(a @ b) @ b


@pytest.fixture(scope="session")
def matmul_plan(gpu_compiler) -> MemoryPlan:
    """Plan a small program. Tests vary the plan instead of compiling another program."""
    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    return plan(matmuls, matrix, matrix, host_memory_bytes=64 * 2**30)
