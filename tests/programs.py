"""Helpers that inspect compiled programs."""

from typing import Any

import jax.numpy as jnp
import pytest

from effjax.memory import PlanError, collectives
from effjax.memory._compile import check_compiler


def has_gpu_compiler() -> bool:
    try:
        check_compiler()
    except PlanError:
        return False
    return True


needs_gpu_compiler = pytest.mark.skipif(
    not has_gpu_compiler(), reason="no GPU compiler: pip install '.[plan]'"
)


def collective_sizes(program: Any, dtype: Any) -> list[tuple[str, int]]:
    """Return the kind and the number of elements of each collective of a program, sorted."""
    return sorted(
        (collective.kind, collective.bytes // jnp.dtype(dtype).itemsize)
        for collective in collectives(program.as_text())
        for _ in range(collective.count)
    )
