"""Plans of several programs for the same arguments, side by side."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import report
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
        return report.plot_comparison(self, ax)


def compare(
    programs: Mapping[str, Callable[..., Any]], *args: Any, progress: bool = False, **options: Any
) -> Comparison:
    """Plans each of several programs for the same arguments, some of them at a time.

        print(compare({"plain": step, "recompute": other_step}, params, batch, target="a100-40"))

    Args:
      programs: functions by name; the first is what the others are compared with.
      *args: the arguments of all of them, arrays or shapes.
      progress: whether to show a bar on stderr while they compile (needs rich).
      **options: for `plan`, the same for all.

    Returns:
      A `Comparison`: a dictionary of plans that prints as a table, with `plot()` and `to_dict()`.

    Raises:
      ValueError, PlanError: as `plan`; ValueError if there are no programs.
    """
    return plan_all({name: (fn, *args) for name, fn in programs.items()}, progress, **options)


def plan_all(
    steps: Mapping[str, tuple[Any, ...]], progress: bool = False, **options: Any
) -> Comparison:
    """Like `compare`, of functions each with its own arguments: `(fn, *args)` by name."""
    if not steps:
        raise ValueError("`programs` is empty: give functions by name.")
    # Traced here, since settings such as `jax.set_mesh` are those of a thread; compiled elsewhere.
    with progress_bar("compiling", len(steps), progress) as advance:
        prepared = [prepare(fn, *args, **options) for fn, *args in steps.values()]

        def compiled(finish: Callable[[], MemoryPlan]) -> MemoryPlan:
            plan = finish()
            advance()
            return plan

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return Comparison(zip(steps, pool.map(compiled, prepared), strict=True))
