"""The kernels of a sampling operator, and which of them a call runs.

Each operator has one table: for each implementation, the functions of its forward and its backward
pass. Its keys are "xla", which all platforms have, and "cpu", "cuda" and "cuda, deterministic".

Each call of a native kernel states its work, which the planner reads (`effjax.memory`). It counts
as the planner counts XLA's kernels: an array once, also if it is sampled, because caches serve the
pixels that samples share; and the numbers that threads add to one array as written, each by itself.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ... import native
from ...native.defaults import uses_cuda, warn_of_slow_sums
from .._common.arguments import check_choice
from .._common.platform import traced_platform

# The platforms whose native kernels each implementation uses. None uses the CUDA kernels that were
# validated on this machine (see native/defaults.py).
_NATIVE_PLATFORMS = {None: ("cpu",), "native": ("cpu", "cuda"), "xla": ()}


class Choice(NamedTuple):
    """The kernels that a call may run; a part of its static configuration."""

    operator: str  # the name of the public function, for errors
    implementation: str | None  # None, "native" or "xla"
    platforms: tuple[str, ...]  # those that run native kernels
    deterministic: bool  # whether a GPU sums gradients in a fixed order

    def key(self, platform: str) -> str:
        """Return the key of the kernels that a platform runs, in the table of the operator."""
        if platform not in self.platforms:
            return "xla"
        return "cuda, deterministic" if platform == "cuda" and self.deterministic else platform


def choose(
    operator: str,
    kernel: str,
    implementation: Any,
    deterministic: Any,
    dtypes: Iterable[Any],
) -> Choice:
    """Choose the kernels of a call.

    `kernel` is the name in verdicts of the validation. The kernel runs in the first of the dtypes,
    that of the images, or in float64 if any of them is.

    Raises:
        ValueError: `implementation` is not None, "native" or "xla"; or `EFFJAX_CUDA` is invalid.
        RuntimeError: `implementation` is "native", or None with `EFFJAX_CUDA=on` on a GPU, and
            there are no native kernels.
    """
    check_choice("implementation", implementation, *_NATIVE_PLATFORMS)
    available = [p for p in ("cpu", "cuda") if native.is_available(p)]
    if implementation == "native" and not available:
        raise RuntimeError(unavailable_message(operator, traced_platform()))
    platforms = _NATIVE_PLATFORMS[implementation]
    if implementation is None and traced_platform() == "cuda":
        first, *others = dtypes
        dtype = "float64" if "float64" in others else first
        if uses_cuda(f"{kernel}_deterministic" if deterministic else kernel, dtype):
            platforms = (*platforms, "cuda")
    platforms = tuple(p for p in platforms if p in available)
    if traced_platform() == "cuda" and "cuda" not in platforms:
        warn_of_slow_sums()
    return Choice(operator, implementation, platforms, bool(deterministic))


def select(kernels: Mapping[str, tuple], choice: Choice) -> tuple[Callable, Callable]:
    """Return the forward and the backward pass, the first two items of the values of a table.

    Each is a function of arrays (positional) and static options (by name), and runs the kernel of
    the platform that it is compiled for. With `implementation="native"`, programs for platforms
    without a native kernel fail to compile.
    """

    def select_pass(i: int) -> Callable:
        default = kernels["xla"][i]
        if choice.implementation == "native":
            default = _fail_at_compile_time(default, choice.operator)
        native = {platform: kernels[choice.key(platform)][i] for platform in choice.platforms}

        def run(*args, **options):
            by_platform = {p: functools.partial(f, **options) for p, f in native.items()}
            other = functools.partial(default, **options)
            return lax.platform_dependent(*args, **by_platform, default=other)

        return run if native else default

    return select_pass(0), select_pass(1)


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


# A bilinear sample of a channel is a sum of four products; its gradient has four products with the
# pixels, and four with the weights that are added to them.
SAMPLE_FLOPS = 8


def count_bytes(*arrays: Any) -> int:
    """Return the bytes of arrays, such as those that a kernel reads or writes once."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def count_sampled_bytes(x: Any, samples: int) -> int:
    """Return the bytes that a kernel reads of x, given the number of samples of a channel."""
    pixels = 4 * samples * x.dtype.itemsize
    # A symbolic size cannot be compared.
    return min(count_bytes(x), pixels) if isinstance(pixels, int) else count_bytes(x)


def call_native(
    target: str,
    results: Any,
    args: Iterable[Any],
    *,
    flops: int | None,
    memory_bytes: int,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Call a native kernel, and state its work: FLOPs, and bytes that it reads and writes.

    `flops` is None if they depend on the data. `aliases` maps the position of an operand to that
    of the result that shares its buffer.
    """
    call = jax.ffi.ffi_call(target, results, input_output_aliases=dict(aliases or {}))
    work = {"flops": flops, "memory_bytes": memory_bytes}
    # Nothing is stated of arrays with symbolic sizes.
    with set_xla_metadata(**{name: str(n) for name, n in work.items() if isinstance(n, int)}):
        return call(*args, **attributes)


def _fail_at_compile_time(run: Callable, operator: str) -> Callable:
    """Return `run` such that it can be traced but not compiled."""
    # The platform is known only at compile time.
    return lambda x, *args, **options: run(
        _unsupported_p.bind(x, operator=operator), *args, **options
    )


def _raise_error(ctx, _, *, operator: str):
    raise RuntimeError(unavailable_message(operator, " or ".join(ctx.module_context.platforms)))


_unsupported_p = Primitive("effjax_no_native_code")
_unsupported_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_unsupported_p, _raise_error)
