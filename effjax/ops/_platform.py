"""The platform that operators are traced for, where it decides how large their slices are."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """What is traced here will be compiled for this platform, which need not be there."""
    token = _planned.set(platform)
    try:
        yield
    finally:
        _planned.reset(token)


def traced_platform() -> str:
    """ "cpu", "cuda" or "tpu", as JAX's lowering calls them."""
    backend = _planned.get() or jax.default_backend()
    return "cuda" if backend == "gpu" else backend
