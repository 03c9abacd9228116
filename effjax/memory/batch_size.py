"""The largest batch that fits."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ..ops._common.arguments import as_callable, as_flag, as_integer
from . import plots, report
from ._progress import progress_bar
from .compare import as_step
from .plan import MemoryPlan, plan

_LIMIT = 2**31  # of the search


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """What `max_batch_size` found.

    Attributes:
        batch_size: the largest that fits; 0 if none does.
        plan: of that batch; of the smallest one if none fits.
        tried: the peak of each batch size that was compiled.
    """

    batch_size: int
    plan: MemoryPlan
    tried: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        tried = {str(batch): peak for batch, peak in sorted(self.tried.items())}
        return {"batch_size": self.batch_size, "plan": self.plan.to_dict(), "tried": tried}

    def __str__(self) -> str:
        return report.batches_text(self)

    def __rich__(self) -> Any:
        return report.batches_table(self)

    def plot(self, ax: Any = None) -> Any:
        """Draws the peaks of the batches that were compiled (matplotlib); returns the axes."""
        return plots.plot_batches(self, ax)


def max_batch_size(
    step_for_batch: Callable[[int], tuple[Any, ...]],
    *,
    multiple_of: int | None = None,
    start: int = 8,
    progress: bool = False,
    **options: Any,
) -> MaxBatch:
    """Finds the largest batch that fits the target, by bisection over plans.

    The peaks grow about linearly with the batch, so each batch tried is where a line through the
    nearest ones meets the memory there is, on the device or on the host; or the middle, where lines
    fail to close in. It usually takes four to eight compiles, none of which runs anything.

    Args:
        step_for_batch: makes the program for a batch size: `(fun, *args)`, with the arguments as
            shapes, and any donations in `fun` (a `jax.jit`).
        multiple_of: only multiples of this are tried; None: of the number of devices that the
            program spans at the first batch.
        start: the first batch to try, rounded up to a multiple of `multiple_of`.
        progress: whether to say on stderr what is compiled.
        **options: for `plan`: `target`, `memory_fraction`, `num_devices`, …

    Returns:
        A `MaxBatch`. If any batch fits, the next larger multiple was compiled and does not. Print
        it.

    Raises:
        TypeError, ValueError, PlanError: as `plan`; ValueError too if `multiple_of` or `start` is
            less than 1, or if memory does not grow with the batch.
    """
    as_callable("step_for_batch", step_for_batch)
    as_integer("start", start, 1)
    unit = 1 if multiple_of is None else as_integer("multiple_of", multiple_of, 1)
    plans: dict[int, MemoryPlan] = {}

    def planned(batch: int) -> MemoryPlan:
        began = time.perf_counter()
        fun, *args = as_step("step_for_batch(…)", step_for_batch(batch))
        found = plans[batch] = plan(fun, *args, **options)
        size, seconds = report.format_bytes(found.peak_device_bytes), time.perf_counter() - began
        advance(f"batch {batch}: {size}, {'fits' if found.fits else 'too much'}, {seconds:.1f} s")
        return found

    low, high = 0, None  # in multiples: the largest that fits, the smallest that does not
    with progress_bar("finding the largest batch", None, as_flag("progress", progress)) as advance:
        if multiple_of is None:
            unit = planned(start).num_devices
        guess, narrowed = -(-start // unit), True
        while high is None or high - low > 1:
            batch = guess * unit
            found = plans.get(batch) or planned(batch)
            width = (high or 2 * guess) - low
            if found.fits:
                low = guess
            else:
                high = guess
            if high is None and batch > _LIMIT:
                raise ValueError(
                    f"`step_for_batch` fits even at a batch of {batch}: does its memory grow with "
                    "the batch?"
                )
            narrowed = high is None or (high - low) <= width / 2
            guess = _next(plans, low, high, unit, by_line=narrowed)
    best = plans[low * unit] if low else plans[min(plans)]
    return MaxBatch(low * unit, best, {b: p.peak_device_bytes for b, p in plans.items()})


def _next(
    plans: dict[int, MemoryPlan], low: int, high: int | None, unit: int, by_line: bool
) -> int:
    """The next multiple to try: where a line meets the memory there is, or the middle."""
    if high is not None and not by_line:
        return (low + high) // 2
    points = sorted((batch, plan.share) for batch, plan in plans.items())
    points = sorted(points, key=lambda p: abs(p[1] - 1))[:2]
    (batch, share), (other, other_share) = points[0], points[-1]
    if len(points) == 1:
        other, other_share = 0, 0
    slope = (share - other_share) / (batch - other)
    if slope <= 0:
        return 2 * low if high is None else (low + high) // 2
    meets = batch + (1 - share) / slope
    guess = int(min(meets, 2 * _LIMIT) // unit)
    if high is None:
        return max(low + 1, guess)
    return min(max(low + 1, guess), high - 1)
