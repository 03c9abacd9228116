"""Modelled time of a compiled program: a roofline, with the overlap that its schedule has."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from ..devices import Rates
from ..read.hlo import HloModule, Instruction, operand_names, parse
from .work import Channel, WorkCounter

# XLA's rematerialization names the instructions that it duplicates so. It runs where the program
# would exceed the memory of the device, and can double its FLOPs: 326 of the 572 TFLOP of Qwen3-8B
# with offloaded activations on an RTX 4090.
_REMATERIALIZED = re.compile(r"\.remat\d*(\.|$)")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Modelled time of one call on one device, and the work that it consists of.

    It is a model and not a measurement: each kernel takes its FLOPs at the peak rate or its bytes
    at the bandwidth of device memory, whichever is longer, and transfers are hidden as far as the
    schedule has kernels to run meanwhile.
    """

    rates: Rates
    # Of matrix products, convolutions, attention and effjax's native kernels, by dtype as in
    # `Rates`; and those of them that XLA added to the traced program, to need less memory.
    flops: Mapping[str, int]
    recomputed_flops: int
    memory_bytes: int  # that kernels read and write in device memory
    to_device_bytes: int
    to_host_bytes: int
    collective_bytes: int  # that the device sends to others
    compute_seconds: float  # of kernels; the others are times that the device waits
    to_device_seconds: float
    to_host_seconds: float
    collective_seconds: float
    unknown_kernels: Mapping[str, int]  # number of executions; their bytes are counted
    unknown_loops: int  # of unknown length, counted as one iteration

    @property
    def seconds(self) -> float:
        """Modelled time, the sum of kernels and waits."""
        waits = self.to_device_seconds + self.to_host_seconds + self.collective_seconds
        return self.compute_seconds + waits

    @property
    def is_lower_bound(self) -> bool:
        """True if a part of the work is unknown: kernels, or the length of a loop."""
        return bool(self.unknown_kernels or self.unknown_loops)

    @property
    def total_flops(self) -> int:
        """FLOPs of all dtypes."""
        return sum(self.flops.values())


def step_time(hlo: str | HloModule, rates: Rates, num_devices: int = 1) -> StepTime:
    """Return the modelled time of one call of a program.

    Args:
        hlo: optimized and scheduled HLO for a GPU or a TPU, such as `MemoryPlan.hlo`.
        rates: peak rates of the device, such as `find_rates("h100")`.
        num_devices: number of devices of collectives that do not name theirs.
    """
    module = parse(hlo) if isinstance(hlo, str) else hlo
    total = _Scheduler(module, rates, num_devices).run(module.entry)
    return StepTime(
        rates=rates,
        flops=dict(total.flops),
        recomputed_flops=total.recomputed_flops,
        memory_bytes=total.memory_bytes,
        to_device_bytes=total.sent["to_device"],
        to_host_bytes=total.sent["to_host"],
        collective_bytes=total.sent["interconnect"],
        # A wait for device memory is a part of the kernel that needs the data.
        compute_seconds=total.compute_seconds + total.waits["memory"],
        to_device_seconds=total.waits["to_device"],
        to_host_seconds=total.waits["to_host"],
        collective_seconds=total.waits["interconnect"],
        unknown_kernels=dict(total.unknown_kernels),
        unknown_loops=total.unknown_loops,
    )


@dataclasses.dataclass
class _Totals:
    """Work and time of one execution of a computation."""

    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    recomputed_flops: int = 0
    memory_bytes: int = 0
    sent: Counter[Channel] = dataclasses.field(default_factory=Counter)  # bytes
    compute_seconds: float = 0.0
    # Seconds; a wait for device memory is that of a prefetch to memory on the chip.
    waits: dict[Channel, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    unknown_kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_loops: int = 0

    @property
    def seconds(self) -> float:
        return self.compute_seconds + sum(self.waits.values())

    def add(self, other: "_Totals", times: int = 1) -> None:
        for name in ("flops", "sent", "unknown_kernels"):
            getattr(self, name).update({k: times * n for k, n in getattr(other, name).items()})
        for name in ("recomputed_flops", "memory_bytes", "compute_seconds", "unknown_loops"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for channel, seconds in other.waits.items():
            self.waits[channel] += times * seconds


class _Scheduler:
    """Runs the computations of a scheduled module in model time."""

    def __init__(self, module: HloModule, rates: Rates, num_devices: int):
        self.module = module
        self.rates = rates
        self.counter = WorkCounter(module, num_devices)
        self.bandwidths: dict[Channel, float] = {
            "to_device": rates.to_device, "to_host": rates.to_host,
            "interconnect": rates.interconnect, "memory": rates.memory,
        }  # fmt: skip
        self.finished: dict[str, _Totals] = {}

    def run(self, computation: str) -> _Totals:
        """Return the totals of one execution of a computation."""
        if computation not in self.finished:
            timeline = _Timeline(self)
            for instruction in self.module.computations.get(computation, ()):
                timeline.advance(instruction)
            self.finished[computation] = timeline.total
        return self.finished[computation]

    def run_nested(self, instruction: Instruction) -> _Totals | None:
        """Return the totals of a loop, a conditional or a call; None for other instructions."""
        opcode, names = instruction.opcode, self.module.nested(instruction)
        if opcode not in ("while", "conditional", "call"):
            return None
        if opcode == "conditional":  # the longest branch
            return max((self.run(name) for name in names), key=lambda t: t.seconds)
        if opcode == "call" and '_xla_compute_type="host"' in instruction.attributes:
            return _Totals(unknown_kernels=Counter(["computation on the host"]))
        trips = self.module.trip_count(instruction) if opcode == "while" else 1
        total = _Totals(unknown_loops=int(trips is None))
        for name in names:
            total.add(self.run(name), 1 if trips is None else trips)
        return total


class _Timeline:
    """One execution of a computation."""

    # The device executes the instructions in order. A copy or collective that is started uses its
    # channel from then on, one after the other, and the device waits for it at its end ("done") if
    # it is not ready. A copy or collective that is not asynchronous stops the device.

    def __init__(self, scheduler: _Scheduler):
        self.scheduler = scheduler
        self.bandwidths = scheduler.bandwidths
        self.total = _Totals()
        self.now = 0.0
        self.free: dict[Channel, float] = defaultdict(float)  # when each channel is free
        self.started: dict[str, dict[Channel, float]] = {}  # when it is ready, by the start's name

    def advance(self, instruction: Instruction) -> None:
        """Execute an instruction."""
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            self._wait(self.started.pop(operand_names(instruction)[0], {}))
        elif opcode.endswith("-update"):
            ready = self.started.pop(operand_names(instruction)[0], {})
            self.started[instruction.name] = ready
        elif (nested := self.scheduler.run_nested(instruction)) is not None:
            self._add(nested)
        else:
            self._execute(instruction)

    def _wait(self, ready: Mapping[Channel, float]) -> None:
        for channel, time in ready.items():
            self.total.waits[channel] += max(0.0, time - self.now)
            self.now = max(self.now, time)

    def _add(self, nested: _Totals) -> None:
        start = self.now
        self.now += nested.seconds
        self.total.add(nested)
        # Copies that are under way share their channel with those inside.
        for channel, size in nested.sent.items():
            delay = size / self.bandwidths[channel]
            self.free[channel] = max(self.free[channel], start) + delay
            for ready in self.started.values():
                if channel in ready:
                    ready[channel] += delay

    def _execute(self, instruction: Instruction) -> None:
        total, rates = self.total, self.scheduler.rates
        work = self.scheduler.counter.work(instruction)
        transfers: list[tuple[Channel, int]] = self.scheduler.counter.transfers(instruction)
        total.flops.update(work.flops)
        if _REMATERIALIZED.search(instruction.name):
            total.recomputed_flops += sum(work.flops.values())
        total.memory_bytes += work.memory_bytes
        total.unknown_kernels.update([work.unknown] if work.unknown else [])
        for channel, size in transfers:
            total.sent[channel] += size

        is_async = instruction.opcode.endswith("-start")
        is_async &= '"is_sync":true' not in instruction.attributes
        if is_async and not transfers and not work.flops and not work.unknown:
            transfers = [("memory", work.memory_bytes)]  # such as a prefetch to on-chip memory
        if not (is_async and transfers):
            products = sum(n / rates.flops_of(dtype) for dtype, n in work.flops.items())
            seconds = max(products, work.memory_bytes / rates.memory)
            total.compute_seconds += seconds
        else:
            seconds = 0.0
        ready: dict[Channel, float] = {}
        for channel, size in transfers:
            start = max(self.now, self.free[channel])
            ready[channel] = self.free[channel] = start + size / self.bandwidths[channel]
        self.now += seconds
        if is_async:
            self.started[instruction.name] = ready
        else:
            self._wait(ready)
