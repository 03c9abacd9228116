"""The largest batch that fits."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ._progress import progress_bar
from .plan import MemoryPlan, plan
from .report import format_bytes

_LIMIT = 2**31  # of the search


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """What `max_batch_size` found.

    batch_size: the largest that fits; 0 if none does.
    plan:       of that batch; of the smallest one if none fits.
    tried:      the peak of each batch size that was compiled.
    """

    batch_size: int
    plan: MemoryPlan
    tried: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        tried = {str(batch): peak for batch, peak in sorted(self.tried.items())}
        return {"batch_size": self.batch_size, "plan": self.plan.to_dict(), "tried": tried}


def max_batch_size(
    step_for_batch: Callable[[int], tuple[Any, ...]],
    *,
    multiple_of: int = 1,
    start: int = 8,
    progress: bool = False,
    **options: Any,
) -> MaxBatch:
    """Finds the largest batch that fits the target, by bisection over plans.

    The peak grows about linearly with the batch, so each batch tried is where a line through the
    nearest ones meets the memory there is, or the middle, where lines fail to close in. It usually
    takes four to eight compiles, none of which runs anything.

    Args:
      step_for_batch: makes the program for a batch size: `(fn, *args)`, with the arguments as
        shapes, and any donations in `fn` (a `jax.jit`).
      multiple_of: only multiples of this are tried, such as the number of devices.
      start: the first batch to try, rounded up to such a multiple.
      progress: whether to show a bar on stderr meanwhile (needs rich).
      **options: for `plan`: `target`, `memory_fraction`, `num_devices`, …

    Returns:
      A `MaxBatch`. The next larger multiple was compiled and does not fit.

    Raises:
      ValueError, PlanError: as `plan`; ValueError too if `multiple_of` or `start` is less than 1,
        or if memory does not grow with the batch.
    """
    for name, value in (("multiple_of", multiple_of), ("start", start)):
        if value < 1:
            raise ValueError(f"`{name}` (={value}) must be at least 1.")
    plans: dict[int, MemoryPlan] = {}
    low, high = 0, None  # in multiples: the largest that fits, the smallest that does not
    guess, narrowed = -(-start // multiple_of), True
    with progress_bar("finding the largest batch", None, progress) as advance:
        while high is None or high - low > 1:
            batch = guess * multiple_of
            fn, *args = step_for_batch(batch)
            found = plans[batch] = plan(fn, *args, **options)
            size, width = format_bytes(found.peak_device_bytes), (high or 2 * guess) - low
            advance(what=f"batch {batch}: {size}, {'fits' if found.fits else 'too much'}")
            if found.fits:
                low = guess
            else:
                high = guess
            if high is None and guess * multiple_of > _LIMIT:
                raise ValueError(
                    f"`step_for_batch` fits even at a batch of {batch}: does its memory grow with "
                    "the batch?"
                )
            narrowed = high is None or (high - low) <= width / 2
            guess = _next(plans, low, high, multiple_of, by_line=narrowed)
    best = plans[low * multiple_of] if low else plans[min(plans)]
    return MaxBatch(low * multiple_of, best, {b: p.peak_device_bytes for b, p in plans.items()})


def _next(
    plans: dict[int, MemoryPlan], low: int, high: int | None, unit: int, by_line: bool
) -> int:
    """The next multiple to try: where a line meets the memory there is, or the middle."""
    if high is not None and not by_line:
        return (low + high) // 2
    available = next(iter(plans.values())).available_bytes
    points = sorted((batch, plan.peak_device_bytes) for batch, plan in plans.items())
    points = sorted(points, key=lambda p: abs(p[1] - available))[:2]
    (batch, peak), (other, other_peak) = points[0], points[-1]
    if len(points) == 1:
        other, other_peak = 0, 0
    slope = (peak - other_peak) / (batch - other)
    if slope <= 0:
        return 2 * low if high is None else (low + high) // 2
    meets = batch + (available - peak) / slope
    guess = int(min(meets, 2 * _LIMIT) // unit)
    if high is None:
        return max(low + 1, guess)
    return min(max(low + 1, guess), high - 1)
