"""Helpers that inspect compiled programs."""

import functools
import os
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from effjax.memory import PlanError, collectives
from effjax.memory.compiler.packages import Compiler, find_compiler


@functools.cache
def why_not(compiler: Compiler) -> str:
    """Install a compiler of the planner if it is missing. Return why that fails, or nothing.

    With EFFJAX_STRICT=1 a failure is an error.
    """
    try:
        find_compiler(compiler)
    except PlanError as error:
        if os.environ.get("EFFJAX_STRICT") == "1" and sys.platform == "linux":
            raise
        return str(error)
    return ""


# The fixtures, in tests/conftest.py, skip a test if the compiler cannot be installed.
needs_gpu_compiler = pytest.mark.usefixtures("gpu_compiler")
needs_tpu_compiler = pytest.mark.usefixtures("tpu_compiler")


def collective_sizes(program: Any, dtype: Any) -> list[tuple[str, int]]:
    """Return the kind and the number of elements of each collective of a program, sorted."""
    return sorted(
        (collective.kind, collective.bytes // jnp.dtype(dtype).itemsize)
        for collective in collectives(program.as_text())
        for _ in range(collective.count)
    )
