"""The fastest options of a step that fit in a budget of memory."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

import jax

from ...ops._common.arguments import as_integer
from ..compiler.cache import default_folder
from ..compiler.lower import PlanError, split_modules
from ..compiler.packages import find_compiler
from ..devices import Target, find_rates, find_target
from ..plan import DEFAULT_TARGET, PlanArguments, plan, resolve_memory_fraction
from ..render import Progress, format_bytes
from ..results import MemoryPlan, OptionSearch, Trial, describe_options, format_step

# The index of a combination's value of each option.
Position = tuple[int, ...]


def choose_options(
    make_step: Callable[..., Sequence[Any] | None],
    options: Mapping[str, Sequence[Any]],
    *,
    budget: int | None = None,
    examples: str | None = None,
    not_by_time: Collection[str] = (),
    min_bytes: Callable[..., tuple[int, int]] | None = None,
    max_compiles: int = 12,
    progress: bool = False,
    **plan_options: "Unpack[PlanArguments]",
) -> OptionSearch:
    """Find the options of the fastest step that fits in a budget of memory.

    Example::

        found = choose_options(
            lambda policy, batch_size: (step_with(policy), state, batch_of(batch_size)),
            {"policy": ["everything", "dots", "recompute"], "batch_size": [64, 32, 16]},
            target="h100", budget=20 * 10**9, examples="batch_size", not_by_time=["policy"],
        )
        print(found)
        found.options  # such as {"policy": "dots", "batch_size": 32}

    The values of each option are ordered from the fastest, which needs the most device memory, to
    the slowest. So a step that does not fit rules out all steps with the same or earlier values of
    every option, and a step that fits rules out those with the same or later values. The search
    compiles the program that rules out the most others in the worse of these two cases. Steps are
    not compiled if their arguments alone exceed the budget, or if what they keep on the host takes
    longer to transfer than another step that fits takes.

    The chosen step has been compiled, and fits. Where the order of the values does not hold, a
    faster step can be missed. Times are `MemoryPlan.step_seconds`, which are modelled.

    Args:
        make_step: returns the program of a combination of options, ``make_step(**options) -> (fun,
            *args)`` as for `plan`, or None to leave out a combination. It is called once for each
            combination before the first is compiled.
        options: the values of each option, in order.
        budget: bytes of device memory. If None, the target's memory times `memory_fraction`.
        examples: the name of the option that is the number of examples of a step, whose values are
            ordered from the largest. Times are then compared per example.
        not_by_time: names of options whose later values may be faster, too. They are ordered by
            memory only. Policies of recomputation are an example: where the bandwidth of the memory
            is the limit, to compute again can be faster than to write and read.
        min_bytes: returns lower bounds of the temporary memory of a step, ``min_bytes(**options) ->
            (device_bytes, host_bytes)``, on one device and on the host for all devices. Residuals
            counted by `residual_bytes` are an example.
        max_compiles: the largest number of programs to compile. It includes those in the cache, so
            that the result does not depend on the cache.
        progress: whether to report finished programs on stderr.
        **plan_options: those of `plan`; `cache` is by default in the user's cache directory. Give
            `num_devices` if shardings are those of ``jax.jit`` only and not of the arguments.

    Returns:
        An `OptionSearch` with the options, the plan, and a table of all combinations. It can be
        printed.

    Raises:
        ValueError: for a budget larger than the target's memory, or together with
            `memory_fraction`; if no combination has a step; if `examples` is not an option, or has
            a value below 1; and as `plan`.
        TypeError, PlanError: as `plan`. A PlanError of a single program only excludes it.
    """
    device = find_target(plan_options.get("target", DEFAULT_TARGET))
    _check_names("examples", [] if examples is None else [examples], options)
    _check_names("not_by_time", not_by_time, options)
    fraction = plan_options.get("memory_fraction")
    if budget is None:
        fraction = resolve_memory_fraction(fraction, device)
    elif fraction is None:
        fraction = fraction_of(budget, device)
    else:
        raise ValueError(
            f"`memory_fraction` (={fraction}) must be None with a `budget` (={budget}), because "
            "both limit the device memory. Give one of them."
        )
    max_compiles = as_integer("max_compiles", max_compiles, 1)
    rates = plan_options.get("rates") or find_rates(device)
    find_compiler(device.platform)  # here, so that its errors are not those of a single program

    candidates: dict[Position, _Candidate] = {}
    for numbered in itertools.product(*(enumerate(values) for values in options.values())):
        choice = {name: value for name, (_, value) in zip(options, numbered, strict=True)}
        if (step := make_step(**choice)) is None:
            continue
        num_devices = plan_options.get("num_devices") or _count_devices(step[1:])
        num_examples = as_integer(examples, choice[examples], 1) if examples else 1
        more = min_bytes(**choice) if min_bytes else (0, 0)
        least = zip(argument_bytes(step[1:], num_devices), more, strict=True)
        device_bytes, host_bytes = map(sum, least)
        # All that is on the host is needed on the device.
        seconds = host_bytes / num_devices / rates.to_device / num_examples
        candidates[tuple(i for i, _ in numbered)] = _Candidate(
            choice, step, num_devices, num_examples, device_bytes, host_bytes, seconds
        )
    if not candidates:
        raise ValueError("`options` must have a combination for which `make_step` returns a step.")
    on_host = plan_options.get("host_memory_bytes")
    if on_host is None and device.host_bytes_per_device:
        on_host = device.host_bytes_per_device * max(c.num_devices for c in candidates.values())
    cache = plan_options.get("cache")
    plan_options |= {
        "target": device, "memory_fraction": fraction, "host_memory_bytes": on_host,
        "cache": default_folder() if cache is None else cache,
    }  # fmt: skip
    unordered = [i for i, name in enumerate(options) if name in not_by_time]
    search = _Search(candidates, int(fraction * device.memory_bytes), on_host, unordered)
    _compile_in_turn(
        search, max_compiles, plan_options, Progress("choosing options", show=progress)
    )
    best = search.best
    return OptionSearch(
        options=None if best is None else best.options,
        plan=None if best is None else best.plan,
        trials=search.trials(),
        target=device,
        budget=search.budget,
        host_memory_bytes=on_host,
        is_complete=search.is_complete,
    )


@dataclasses.dataclass(eq=False)
class _Candidate:
    """A combination of options, and what is known of its step: exactly if `plan` is not None."""

    options: dict[str, Any]
    step: Sequence[Any]  # (fun, *args)
    num_devices: int
    num_examples: int
    device_bytes: int  # at least
    host_bytes: int  # at least
    seconds: float  # at least, per example
    plan: MemoryPlan | None = None
    error: PlanError | None = None


class _Search:
    """The candidates among which the fastest one that fits can still be."""

    # A candidate precedes another if it has the same or an earlier value of every option. It then
    # needs at least as much device memory. It takes at most as long if, in addition, both have the
    # same values of the options that are not ordered by time.

    def __init__(
        self,
        candidates: Mapping[Position, _Candidate],
        budget: int,
        host_bytes: int | None,
        unordered: Collection[int] = (),
    ):
        self.candidates, self.budget, self.host_bytes = dict(candidates), budget, host_bytes
        self.unordered = unordered  # indices of the options that are not ordered by time
        self.best: _Candidate | None = None
        # A set in the order of the options.
        self._undecided = {p: None for p, c in candidates.items() if self._may_fit(c)}
        self._transfer_seconds = {p: c.seconds for p, c in candidates.items()}

    @property
    def is_complete(self) -> bool:
        """True if no undecided candidate is left."""
        return not self._undecided

    def next(self) -> Position | None:
        """Return the candidate to compile next, or None if the search is complete."""
        # One of those with the least to transfer from the host: what has to be copied is a lower
        # bound of the time, so the others are often too slow. Of these, the one that decides the
        # most others in the worse of its two outcomes, that it fits or does not. With a single
        # option this is bisection.
        least = min((self._transfer_seconds[p] for p in self._undecided), default=0.0)
        group = [p for p in self._undecided if self._transfer_seconds[p] <= least]

        def num_decided(position: Position) -> tuple[int, int]:
            before = sum(_precedes(other, position) for other in group)
            after = sum(self._is_no_slower(position, other) for other in group)
            return min(before, after), max(before, after)

        return max(group, key=num_decided, default=None)

    def fail(self, position: Position, error: PlanError) -> None:
        """Exclude a candidate that cannot be compiled."""
        self.candidates[position].error = error
        del self._undecided[position]

    def add(self, position: Position, plan: MemoryPlan) -> None:
        """Store the plan of a candidate, and exclude those that it decides."""
        candidate = self.candidates[position]
        candidate.plan = plan
        candidate.device_bytes, candidate.host_bytes = plan.peak_device_bytes, plan.peak_host_bytes
        if plan.refusal:  # by the compiler, which plans less memory than the program needs
            candidate.device_bytes = max(candidate.device_bytes, self.budget + 1)
        candidate.seconds = plan.step_seconds / candidate.num_examples
        del self._undecided[position]
        if plan.fits and (self.best is None or candidate.seconds < self.best.seconds):
            self.best = candidate
        for place in list(self._undecided):
            other = self.candidates[place]
            if self._is_no_slower(position, place):
                other.seconds = max(other.seconds, candidate.seconds)
            # Host memory is not ordered: a step with less on the device may have more on the host.
            if _precedes(place, position):
                other.device_bytes = max(other.device_bytes, candidate.device_bytes)
            if not self._may_fit(other) or self._is_slower(other):
                del self._undecided[place]

    def trials(self) -> tuple[Trial, ...]:
        """Return all candidates: the best one, the compiled ones by time, and the others."""
        ordered = sorted(
            self.candidates.values(), key=lambda c: (c.plan is None, c is not self.best, c.seconds)
        )
        return tuple(
            Trial(
                c.options, self._result(c), c.plan is not None, c.device_bytes, c.host_bytes,
                c.seconds, c.plan is None or c.plan.step_time.is_lower_bound,
            )
            for c in ordered
        )  # fmt: skip

    def _is_no_slower(self, first: Position, second: Position) -> bool:
        return _precedes(first, second) and all(first[i] == second[i] for i in self.unordered)

    def _may_fit(self, candidate: _Candidate) -> bool:
        fits_host = self.host_bytes is None or candidate.host_bytes <= self.host_bytes
        return candidate.device_bytes <= self.budget and fits_host

    def _is_slower(self, candidate: _Candidate) -> bool:
        return self.best is not None and candidate.seconds >= self.best.seconds

    def _result(self, candidate: _Candidate) -> str:
        at_least = "" if candidate.plan else "at least "
        if candidate is self.best:
            return "chosen"
        if candidate.error is not None:
            return f"failed: {candidate.error}"
        if candidate.device_bytes > self.budget:
            result = f"does not fit: {at_least}{format_bytes(candidate.device_bytes)}"
        elif self.host_bytes is not None and candidate.host_bytes > self.host_bytes:
            result = f"does not fit: {at_least}{format_bytes(candidate.host_bytes)} on the host"
        elif self.best is not None and self._is_slower(candidate):
            ratio = candidate.seconds / max(self.best.seconds, 1e-12)
            result = f"slower: {at_least}{ratio:.2f}×"
        else:
            result = "the limit of compiled programs was reached"
        return result if candidate.plan else f"not compiled, {result}"


def _compile_in_turn(
    search: _Search, max_compiles: int, options: PlanArguments, report: Progress
) -> None:
    """Compile candidates until the search is complete, or `max_compiles` is reached.

    Raises:
        PlanError: if no program can be compiled.
    """
    errors = []
    for _ in range(max_compiles):
        if (position := search.next()) is None:
            break
        candidate, began = search.candidates[position], time.perf_counter()
        fun, *args = candidate.step
        label = describe_options(candidate.options)
        report.run([label])
        try:
            planned = plan(fun, *args, **options)
        except PlanError as error:
            errors.append(error)
            search.fail(position, error)
            report.finish(f"{label}: failed")
            continue
        search.add(position, planned)
        size, fits = format_bytes(planned.peak_device_bytes), "fits" if planned.fits else "too much"
        seconds, took = format_step(planned.step_time), time.perf_counter() - began
        report.finish(f"{label}: {size}, {fits}, {seconds} a step, {took:.1f} s")
    if errors and all(candidate.plan is None for candidate in search.candidates.values()):
        raise errors[0]


def _precedes(first: Position, second: Position) -> bool:
    return all(i <= j for i, j in zip(first, second, strict=True))


def _check_names(argument: str, names: Collection[str], options: Mapping[str, Any]) -> None:
    for name in names:
        if name not in options:
            raise ValueError(
                f"`{argument}` (={name!r}) must be one of the options, {', '.join(options)}."
            )


def fraction_of(budget: int, target: Target) -> float:
    """Return the fraction of the target's memory that rounds down to `budget` bytes."""
    budget = as_integer("budget", budget, 1)
    if budget > target.memory_bytes:
        raise ValueError(
            f"`budget` (={budget}) must be at most the memory of {target.description} "
            f"(={target.memory_bytes})."
        )
    return min((budget + 0.5) / target.memory_bytes, 1.0)


def _count_devices(args: Sequence[Any]) -> int:
    """Return the number of devices over which the arguments are sharded."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(split_modules(args)[0])]
    return max((sharding.num_devices for sharding in shardings if sharding), default=1)


def argument_bytes(args: Sequence[Any], num_devices: int) -> tuple[int, int]:
    """Return the bytes of arguments in the memory of a device, and of all devices on the host."""
    device, host = 0, 0
    for leaf in jax.tree.leaves(split_modules(args)[0]):
        if not hasattr(leaf, "dtype"):  # a Python number
            continue
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * leaf.dtype.itemsize
        if sharding is None or sharding.num_devices == 1:  # the function may shard it
            size //= num_devices
        if getattr(sharding, "memory_kind", None) == "pinned_host":
            host += size * num_devices
        else:
            device += size
    return device, host
