"""Plans of several programs for the same arguments, side by side."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from ..ops._common.arguments import as_callable, as_flag, describe
from . import plots, report
from ._progress import progress_bar
from .plan import MemoryPlan, prepare


class Comparison(dict[str, MemoryPlan]):
    """Plans by name; the first is what the others are compared with."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {name: plan.to_dict() for name, plan in self.items()}

    def __str__(self) -> str:
        header, rows = report.comparison_rows(self)
        return report.aligned([header, *rows])

    def __rich__(self) -> Any:
        return report.table("", *report.comparison_rows(self))

    def plot(self, ax: Any = None) -> Any:
        """Draws a bar for each program, by kind of memory (matplotlib); returns the axes."""
        return plots.plot_comparison(self, ax)


def compare(
    programs: Mapping[str, Callable[..., Any]], *args: Any, progress: bool = False, **options: Any
) -> Comparison:
    """Plans each of several programs for the same arguments, some of them at a time::

        print(compare({"plain": step, "recompute": other_step}, params, batch, target="a100-40"))

    Args:
        programs: functions by name; the first is what the others are compared with.
        *args: the arguments of all of them, arrays or shapes.
        progress: whether to say on stderr what is compiled.
        **options: for `plan`, the same for all.

    Returns:
        A `Comparison`: a dictionary of plans that prints as a table, with `plot()` and `to_dict()`.

    Raises:
        TypeError, ValueError, PlanError: as `plan`; ValueError if there are no programs.
    """
    steps = {
        name: (as_callable(f"programs[{name!r}]", fun), *args)
        for name, fun in _by_name("programs", programs).items()
    }
    return plan_all(steps, progress=progress, **options)


def plan_all(
    steps: Mapping[str, tuple[Any, ...]], *, progress: bool = False, **options: Any
) -> Comparison:
    """Plans several programs, each with arguments of its own; else as `compare`::

        plan_all({"in memory": (step, state, batch), "offloaded": (other, other_state, batch)})

    Args:
        steps: `(fun, *args)` by name; the first is what the others are compared with.
        progress, **options: as `compare`.

    Returns:
        A `Comparison`.

    Raises:
        TypeError, ValueError, PlanError: as `compare`.
    """
    steps = {
        name: as_step(f"steps[{name!r}]", step) for name, step in _by_name("steps", steps).items()
    }
    as_flag("progress", progress)
    first, *others = steps
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def start(name: str) -> Future[tuple[MemoryPlan, float]]:
            # Traced here, since settings such as `jax.set_mesh` are those of a thread.
            began = time.perf_counter()
            fun, *args = steps[name]
            finish = prepare(fun, *args, **options)
            return pool.submit(lambda: (finish(), time.perf_counter() - began))

        started = {start(first): first}  # what is wrong with all of them is said alone
        with progress_bar("compiling", len(steps), progress) as advance:
            started |= {start(name): name for name in others}
            for done in as_completed(started):
                plan, seconds = done.result()
                size = report.format_bytes(plan.peak_device_bytes)
                advance(f"{started[done]}: {size} at the peak, {seconds:.1f} s")
    return Comparison({name: done.result()[0] for done, name in started.items()})


def as_step(name: str, step: Any) -> tuple[Any, ...]:
    """`(fun, *args)`."""
    if not isinstance(step, (tuple, list)) or not step:
        raise TypeError(f"`{name}` must be (fun, *args), not {describe(step)}.")
    as_callable(f"{name}[0]", step[0])
    return tuple(step)


def _by_name(argument: str, programs: Any) -> Mapping[str, Any]:
    if not isinstance(programs, Mapping):
        raise TypeError(f"`{argument}` must be functions by name, not {describe(programs)}.")
    if not programs:
        raise ValueError(f"`{argument}` is empty: give functions by name.")
    return programs
