"""The platform that operators are traced for, where it decides how large their slices are."""

from contextlib import AbstractContextManager

import jax

_planned = jax.make_user_context(None)  # JAX's caches know it


def trace_for_platform(platform: str) -> AbstractContextManager:
    """What is traced here will be compiled for this platform, which need not be there."""
    return _planned(platform)


def traced_platform() -> str:
    """A name of `lax.platform_dependent`'s, "cuda" for any GPU."""
    backend = _planned.value or jax.default_backend()
    return "cuda" if backend == "gpu" else backend
