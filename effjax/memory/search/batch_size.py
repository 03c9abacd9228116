"""Steps as functions of their batch size: the largest that fits, and steps split over devices."""

import time
from collections.abc import Callable
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...ops._common.arguments import as_integer
from ..compiler.lower import make_data_mesh, split_modules
from ..plan import PlanArguments, plan
from ..render import Progress, format_bytes
from ..results import MaxBatch, MemoryPlan

_UNLIMITED = 2**31  # a step that fits at a larger batch size does not grow with it


def max_batch_size(
    step_for_batch: Callable[[int], tuple[Any, ...]],
    *,
    multiple_of: int | None = None,
    start: int = 8,
    progress: bool = False,
    **options: "Unpack[PlanArguments]",
) -> MaxBatch:
    """Find the largest batch size that fits the target.

    Memory grows about linearly with the batch size. Each guess is where a line through the two
    nearest plans meets the available memory, on the device or on the host; if the lines do not
    converge, the search falls back to bisection. It usually compiles four to eight programs and
    runs none. On a TPU the peak may not grow near the limit, where the compiler saves memory; there
    the search is for the batch size from which on the compiler refuses the program.

    Args:
        step_for_batch: returns the program for a batch size, `(fun, *args)`, with arguments as
            shapes and any donations in `fun` (a `jax.jit`).
        multiple_of: only multiples of this are tried. If None, multiples of `num_devices`, or
            else of the number of devices that the program spans at the first batch size.
        start: the first batch size to try, rounded up to a multiple of `multiple_of`.
        progress: whether to report finished programs on stderr.
        **options: those of `plan`, such as `target`, `memory_fraction` or `num_devices`.

    Returns:
        A `MaxBatch`. Its batch size is exact: the next larger multiple was compiled and does not
        fit. It is 0 if no batch size fits. The result can be printed.

    Raises:
        ValueError: if `multiple_of` or `start` is less than 1, or if memory does not grow with the
            batch size; and as `plan`.
        TypeError, PlanError: as `plan`.
    """
    start = as_integer("start", start, 1)
    unit = None
    if multiple_of is not None:
        unit = as_integer("multiple_of", multiple_of, 1)
    elif (num_devices := options.get("num_devices")) is not None:
        unit = as_integer("num_devices", num_devices, 1)
    plans: dict[int, MemoryPlan] = {}
    report = Progress("finding the largest batch", show=progress)

    def try_batch(batch: int) -> MemoryPlan:
        if batch not in plans:
            began = time.perf_counter()
            report.run([f"batch {batch}"])
            fun, *args = step_for_batch(batch)
            result = plans[batch] = plan(fun, *args, **options)
            size, seconds = format_bytes(result.peak_device_bytes), time.perf_counter() - began
            fits = "fits" if result.fits else "too much"
            report.finish(f"batch {batch}: {size}, {fits}, {seconds:.1f} s")
        return plans[batch]

    if unit is None:
        unit = try_batch(start).num_devices
    low, high = 0, None  # in units: the largest that fits, the smallest that does not
    guess = -(-start // unit)
    while high is None or high - low > 1:
        width = (high or 2 * guess) - low
        if try_batch(guess * unit).fits:
            low = guess
        else:
            high = guess
        if high is None and low * unit > _UNLIMITED:
            raise ValueError(
                "`step_for_batch` must return steps whose memory grows with the batch size, "
                f"but a batch size of {low * unit} fits."
            )
        # Bisect next if the last guess did not halve the interval.
        has_halved = high is None or (high - low) <= width / 2
        guess = _next_guess(plans, low, high, unit, extrapolate=has_halved)
    best = plans[low * unit] if low else plans[min(plans)]
    return MaxBatch(low * unit, best, {b: p.peak_device_bytes for b, p in plans.items()})


def _next_guess(
    plans: dict[int, MemoryPlan], low: int, high: int | None, unit: int, extrapolate: bool
) -> int:
    # By a line through the two plans nearest to the limit, since memory grows about linearly.
    if high is not None and not extrapolate:
        return (low + high) // 2
    points = sorted((batch, result.share) for batch, result in plans.items())
    points = sorted(points, key=lambda p: abs(p[1] - 1))[:2]
    (batch, share), (other, other_share) = points[0], points[-1]
    if len(points) == 1:
        other, other_share = 0, 0
    slope = (share - other_share) / (batch - other)
    if slope <= 0:
        return 2 * low if high is None else (low + high) // 2
    limit = batch + (1 - share) / slope
    guess = int(min(limit, 2 * _UNLIMITED) // unit)
    if high is None:
        # The compiler for TPUs saves memory near the limit, so the slope there may be almost zero.
        is_near = any(p.share > 0.5 for p in plans.values())
        return min(max(low + 1, guess), 2 * low) if is_near and low else max(low + 1, guess)
    return min(max(low + 1, guess), high - 1)


def split_over_devices(
    step_for_batch: Callable[[int], tuple[Any, ...]], num_devices: int
) -> Callable[[int], tuple[Any, ...]]:
    """Split the batch of a step over devices (data parallelism), for `plan` and `max_batch_size`.

    The axis of each argument that grows with the batch size is split along the axis `"data"` of a
    mesh. Arguments without such an axis are replicated.

    Args:
        step_for_batch: returns the program for a batch size, `(fun, *args)`. It is also called with
            twice the batch size, to find the axes that grow.
        num_devices: the number of devices.

    Returns:
        A function like `step_for_batch` whose arguments are shapes with shardings.

    Raises:
        ValueError: if no argument grows with the batch size, or its size is not divisible by
            `num_devices`.
    """
    mesh = make_data_mesh(num_devices)

    def split_step(batch_size: int) -> tuple[Any, ...]:
        fun, *args = step_for_batch(batch_size)
        _, *larger_args = step_for_batch(2 * batch_size)
        (arrays, merge), (larger, _) = split_modules(args), split_modules(larger_args)
        specs = jax.tree.map(_batch_spec, arrays, larger)
        is_spec = lambda value: isinstance(value, PartitionSpec)  # noqa: E731
        if not any(spec for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
            raise ValueError(
                "`step_for_batch` must return arguments that grow with the batch size, to split "
                f"them over {num_devices} devices, but none grows."
            )

        def shard(path: Any, a: Any, spec: PartitionSpec) -> Any:
            if not isinstance(a, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
                return a  # a Python number
            for size, name in zip(a.shape, spec, strict=False):
                if name and size % num_devices:
                    raise ValueError(
                        f"args{jax.tree_util.keystr(path)} of shape {tuple(a.shape)} cannot be "
                        f"split over {num_devices} devices: the batch size must be divisible by it."
                    )
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

        return fun, *merge(jax.tree_util.tree_map_with_path(shard, arrays, specs))

    return split_step


def _batch_spec(a: Any, larger: Any) -> PartitionSpec:
    sizes = zip(np.shape(a), np.shape(larger), strict=True)
    growing = [axis for axis, (size, other) in enumerate(sizes) if size != other]
    return PartitionSpec(*[None] * growing[0], "data") if growing else PartitionSpec()
