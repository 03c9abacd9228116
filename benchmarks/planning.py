"""Planned memory of several steps, for a GPU that need not be present."""

from typing import Any

import jax

from effjax.memory import MemoryPlan, PlanError, compare, plan

from .results import UnavailableError

TARGET = "h200"


def need_compiler() -> None:
    """Raise `UnavailableError` if no GPU compiler is installed."""
    try:
        plan(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"), target=TARGET)
    except PlanError as error:
        raise UnavailableError(str(error)) from error


def plan_steps(steps: dict[str, tuple], target: str = TARGET) -> dict[str, MemoryPlan]:
    """Plan steps given as `(fn, *args)` by name."""
    return dict(compare(steps, target=target, progress=True))


def plan_rows(steps: dict[str, tuple], target: str = TARGET) -> list[dict[str, Any]]:
    """Plan steps; return a row per step, whose "ratio" is that of its peak to the first one's."""
    plans = plan_steps(steps, target)
    first = next(iter(plans.values())).peak_device_bytes
    return [
        {
            "name": name,
            "peak_bytes": plan.peak_device_bytes,
            "temp_bytes": plan.device.temporaries,
            "ratio": round(plan.peak_device_bytes / first, 4),
        }
        for name, plan in plans.items()
    ]
