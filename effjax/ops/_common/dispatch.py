"""What operators with native code share: whether there is any, and its part in a program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ... import native


def available_platforms() -> tuple[str, ...]:
    """The platforms that have native code here."""
    return tuple(p for p in ("cpu", "cuda") if native.available(p))


def unavailable_message(operator: str, platform: str) -> str:
    """Why there is no native code for a platform, and what to do."""
    reason = native.status().get(platform, "there is none for this platform")
    return (
        f"implementation='native': no native {operator} for platform {platform!r} "
        f'({reason}). Pass `implementation=None` for the best there is, or "xla"; '
        "`effjax doctor` shows what is loaded."
    )


def result_type(x: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """The type of a custom call's result that varies over the devices as x does."""
    kind = jax.typeof(x)
    mesh = kind.sharding.mesh
    return jax.ShapeDtypeStruct(
        x.shape if shape is None else shape,
        x.dtype if dtype is None else dtype,
        sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec()),
        manual_axis_type=kind.manual_axis_type,
    )


def select_by_platform(native: dict[str, Callable], elsewhere: Callable) -> Callable:
    """One of the functions, chosen when the program is compiled; the options are static."""

    def run(*args, **options):
        bound = {p: functools.partial(f, **options) for p, f in native.items()}
        default = functools.partial(elsewhere, **options)
        return lax.platform_dependent(*args, **bound, default=default)

    return run if native else elsewhere


def fail_at_compile_time(
    run: Callable, operator: str, why: Callable = unavailable_message
) -> Callable:
    """`run`, which stands for code where there is none: it cannot be compiled. Only then is the
    platform known; why(operator, platform) is the error's text.
    """
    return lambda x, *args, **options: run(
        _refuse_p.bind(x, operator=operator, why=why), *args, **options
    )


def _refuse(ctx, _, *, operator: str, why: Callable):
    raise RuntimeError(why(operator, " or ".join(ctx.module_context.platforms)))


_refuse_p = Primitive("effjax_no_native_code")
_refuse_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_refuse_p, _refuse)
