"""The platform that operators are traced for; chunk sizes depend on it."""

from contextlib import AbstractContextManager

import jax

_target = jax.make_user_context(None)  # part of the key of JAX's trace caches


def trace_for_platform(platform: str) -> AbstractContextManager:
    """Trace for this platform inside the context; the machine need not have it."""
    return _target(platform)


def traced_platform() -> str:
    """Return the platform as `lax.platform_dependent` names it; any GPU is "cuda"."""
    backend = _target.value or jax.default_backend()
    return "cuda" if backend == "gpu" else backend
