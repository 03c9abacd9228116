"""Dispatch of operators to native code."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ... import native
from ...native.defaults import uses_cuda
from .arguments import check_choice
from .platform import traced_platform

# The platforms whose native kernels each implementation uses. None uses the CUDA kernels that were
# validated on this machine (see native/defaults.py).
_NATIVE_PLATFORMS = {None: ("cpu",), "native": ("cpu", "cuda"), "xla": ()}


def available_platforms() -> tuple[str, ...]:
    """Return the platforms whose native library is loaded."""
    return tuple(p for p in ("cpu", "cuda") if native.is_available(p))


def native_platforms(
    implementation: Any, operator: str, kernel: str, dtypes: Iterable[Any]
) -> tuple[str, ...]:
    """Return the platforms on which `implementation` runs native kernels.

    Args:
        implementation: None, "native" or "xla".
        operator: its name in errors.
        kernel: the name of its kernel in verdicts of the validation.
        dtypes: of the images, and of the other arrays. The kernel runs in the first one, or in
            float64 if any of them is.

    Raises:
        ValueError: `implementation` is not None, "native" or "xla"; or `EFFJAX_CUDA` is invalid.
        RuntimeError: `implementation` is "native" and there are no native kernels; or the processes
            of a job would decide differently.
    """
    check_choice("implementation", implementation, *_NATIVE_PLATFORMS)
    available = available_platforms()
    if implementation == "native" and not available:
        raise RuntimeError(unavailable_message(operator, traced_platform()))
    platforms = _NATIVE_PLATFORMS[implementation]
    if implementation is None and traced_platform() == "cuda":
        first, *others = dtypes
        dtype = "float64" if "float64" in others else first
        # Even without the library: all processes of a job take part in the decision.
        if uses_cuda(kernel, dtype):
            platforms = (*platforms, "cuda")
    return tuple(p for p in platforms if p in available)


def unavailable_message(operator: str, platform: str) -> str:
    """Return the error message for a platform without native code."""
    reason = native.status().get(platform, "unsupported platform")
    return (
        f"implementation='native': no native {operator} for platform {platform!r} "
        f'({reason}). Pass `implementation=None` for the best available one, or "xla"; '
        "`effjax doctor` lists the loaded libraries."
    )


def result_type(x: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """Return the type of a custom call's result. By default it has the shape and dtype of x.

    The result varies over the same mesh axes as x (see `sharding`).
    """
    kind = jax.typeof(x)
    mesh = kind.sharding.mesh
    return jax.ShapeDtypeStruct(
        x.shape if shape is None else shape,
        x.dtype if dtype is None else dtype,
        sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec()),
        manual_axis_type=kind.manual_axis_type,
    )


def select_by_platform(native: dict[str, Callable], default: Callable) -> Callable:
    """Return a function that runs the entry of the platform that it is compiled for.

    Args:
        native: functions by platform.
        default: the function for every other platform.

    Returns:
        A function of arrays (positional) and static options (by name).
    """

    def run(*args, **options):
        by_platform = {p: functools.partial(f, **options) for p, f in native.items()}
        other = functools.partial(default, **options)
        return lax.platform_dependent(*args, **by_platform, default=other)

    return run if native else default


def select_kernel(
    kernel: Callable,
    xla: Callable,
    implementation: str | None,
    platforms: tuple[str, ...],
    operator: str,
    on_cuda: Callable | None = None,
) -> Callable:
    """Return a function that runs the native `kernel` on `platforms`, and `xla` on all others.

    `on_cuda` replaces `kernel` on GPUs. With `implementation="native"`, programs for other
    platforms fail to compile.
    """
    default = fail_at_compile_time(xla, operator) if implementation == "native" else xla
    kernels = dict.fromkeys(platforms, kernel)
    if on_cuda is not None and "cuda" in kernels:
        kernels["cuda"] = on_cuda
    return select_by_platform(kernels, default)


def fail_at_compile_time(run: Callable, operator: str) -> Callable:
    """Return `run` such that it can be traced but not compiled.

    The platform is known only at compile time.
    """
    return lambda x, *args, **options: run(
        _unsupported_p.bind(x, operator=operator), *args, **options
    )


def _raise_error(ctx, _, *, operator: str):
    raise RuntimeError(unavailable_message(operator, " or ".join(ctx.module_context.platforms)))


_unsupported_p = Primitive("effjax_no_native_code")
_unsupported_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_unsupported_p, _raise_error)
