"""Results of the planner, and how they print: as text, as rich tables, as charts and as JSON."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..ops.offload.compiled import HOST_MEMORY_VARIABLE, gibibytes, host_memory_limit
from ..ops.offload.row_update import WHOLE_UPDATE
from .devices import Target
from .plots import Bar, bar_chart, scatter_chart, stacked_bar_chart
from .read.buffers import Buffer, Bytes
from .read.hlo import Collective, Transfer
from .read.source import short_path
from .render import (
    FLOPS,
    MAX_ROWS,
    Printable,
    Report,
    ReportTable,
    format_bytes,
    format_number,
    format_seconds,
)
from .time.step_time import StepTime

_WORTH_A_NOTE = 0.01  # of the peak, or of the FLOPs
_TIMES = "modelled time of a call, at published peak rates (not measured)"


@dataclasses.dataclass(frozen=True)
class MemoryPlan(Printable):
    """Memory of a compiled program, per device unless stated otherwise. Returned by `plan`.

    Attributes:
        target: the GPU or TPU.
        num_devices: number of devices that the program spans.
        memory_fraction: fraction of the device's memory that JAX reserves for arrays.
        host_memory_bytes: pinned host memory of the process, for all of its devices; None if it is
            not known.
        device: bytes in device memory: `arguments`, `outputs`, `temporaries`, `generated_code`,
            `aliased` (results that overwrite a donated argument, in both of the first two), and
            `total`, which counts these once.
        host: the same of pinned host memory.
        constant_bytes: bytes of the program's constants, in device memory.
        peak_buffers: arrays in device memory at the peak, largest first. Each has its `shape`,
            `bytes`, `kind`, `operation`, and the `source` that computes it, "file.py:12", called
            from the user's line `caller`. A TPU leaves `padding` of its bytes unused.
        collectives: communication between devices, most bytes first, as `collectives` returns it.
        transfers: copies between device and host, most bytes first, with the same attributes except
            that `direction` is "to_device" or "to_host", and `shape` that of a copy.
        step_time: modelled time of a call; not a measurement. Its parts are FLOPs by dtype
            (`flops`, `recomputed_flops`, `total_flops`), bytes (`memory_bytes`, `to_device_bytes`,
            `to_host_bytes`, `collective_bytes`), the time of the kernels (`compute_seconds`) and
            that of waiting for each kind of transfer (`to_device_seconds`, `to_host_seconds`,
            `collective_seconds`). `unknown_kernels` counts kernels of unknown FLOPs, and
            `unknown_loops` loops of unknown length; with either, `is_lower_bound` is True.
        hlo: the optimized program as text.
        refusal: the compiler's message if it refused the program because it does not fit, which
            the compiler for TPUs does; otherwise empty.
    """

    target: Target
    num_devices: int
    memory_fraction: float
    host_memory_bytes: int | None
    device: Bytes
    host: Bytes
    constant_bytes: int
    peak_buffers: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    step_time: StepTime
    hlo: str = dataclasses.field(repr=False)
    refusal: str = ""

    @property
    def peak_device_bytes(self) -> int:
        """Device memory for arguments, results, temporaries, code and constants."""
        return self.device.total + self.constant_bytes

    @property
    def peak_host_bytes(self) -> int:
        """Pinned host memory of all devices together."""
        return self.host.total * self.num_devices

    @property
    def padding_bytes(self) -> int:
        """Padding of the arrays in device memory at the peak."""
        return sum(buffer.padding for buffer in self.peak_buffers)

    @property
    def available_bytes(self) -> int:
        """Device memory that JAX reserves for arrays."""
        return int(self.memory_fraction * self.target.memory_bytes)

    @property
    def share(self) -> float:
        """Fraction of the available memory in use, on the device or the host, the larger one."""
        host = self.peak_host_bytes / self.host_memory_bytes if self.host_memory_bytes else 0.0
        return max(self.peak_device_bytes / max(self.available_bytes, 1), host)

    @property
    def step_seconds(self) -> float:
        """Modelled time of a call in seconds; not a measurement."""
        return self.step_time.seconds

    @property
    def fits_device(self) -> bool:
        """True if the program fits in device memory that holds nothing else."""
        # The compiler may refuse a program before it has placed all buffers.
        return not self.refusal and self.peak_device_bytes <= self.available_bytes

    @property
    def fits_host(self) -> bool:
        """True if the program fits in pinned host memory that is otherwise empty."""
        return self.host_memory_bytes is None or self.peak_host_bytes <= self.host_memory_bytes

    @property
    def fits(self) -> bool:
        """True if the program fits in device memory, and host memory if its size is known."""
        return self.fits_device and self.fits_host

    def to_dict(self) -> dict[str, Any]:
        """Return the plan without its HLO as JSON-serializable data."""
        # The HLO of a deep network has megabytes, and the target is known by its name.
        record = dataclasses.asdict(self)
        del record["hlo"]
        names = ("name", "description", "memory_bytes")
        record["target"] = {name: record["target"][name] for name in names}
        return record | {
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "available_bytes": self.available_bytes,
            "step_seconds": self.step_seconds,
            "padding_bytes": self.padding_bytes,
            "fits": self.fits,
        }

    def report(self, name: str = "", max_rows: int = MAX_ROWS) -> Report:
        """Return the report to print, with `name` in its headline."""
        hints = _donation_note, _padding_note, _whole_update_note, recomputation_note
        return Report(
            tables=_plan_tables(self, max_rows),
            headline=f"{name}: {summarize(self)}" if name else summarize(self),
            note="\n".join(f"hint: {note}" for hint in hints if (note := hint(self))),
            is_ok=self.fits,
        )

    def plot(self, ax: Any = None, *, most: int = MAX_ROWS) -> Any:
        """Draw at most `most` buffers at the peak as bars with matplotlib; return the axes."""
        bars = []
        for count, buffer in _group_buffers(self.peak_buffers)[:most]:
            place = short_path(buffer.source) or _short_operation(buffer)
            bars.append(Bar(f"{count}× {buffer.shape}  {place}", buffer.bytes, buffer.kind))
        ax = bar_chart(bars, ax, "device memory at the peak")
        ax.set_title(summarize(self).replace("; ", "\n"), fontsize="medium")
        return ax


class Comparison(Printable, dict[str, MemoryPlan]):
    """Plans by name, with ratios relative to the first one. Returned by `compare`.

    Attributes:
        errors: by name, the errors of programs that cannot be compiled.
    """

    def __init__(
        self,
        plans: Mapping[str, MemoryPlan] | None = None,
        errors: Mapping[str, Exception] | None = None,
    ):
        super().__init__(plans or {})
        self.errors = dict(errors or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the plans as JSON-serializable data."""
        errors = {name: {"error": str(error)} for name, error in self.errors.items()}
        return {name: plan.to_dict() for name, plan in self.items()} | errors

    def report(self) -> Report:
        """Return the report to print: a table with a row per plan."""
        first = next((plan.peak_device_bytes for plan in self.values()), 0)
        rows = [
            {
                "": name,
                "peak": format_bytes(plan.peak_device_bytes),
                "ratio": f"{plan.peak_device_bytes / max(first, 1):.3f}",
                "arguments": format_bytes(plan.device.arguments),
                "outputs": format_bytes(plan.device.outputs - plan.device.aliased),
                "temporaries": format_bytes(plan.device.temporaries),
                "host": format_bytes(plan.host.total),
                "fits": "yes" if plan.fits else "no",
            }
            for name, plan in self.items()
        ]
        times = [
            {
                "": name,
                "call": format_step(time),
                "products": format_number(time.total_flops, FLOPS),
                "kernels": format_seconds(time.compute_seconds),
                "from host": format_seconds(time.to_device_seconds),
                "to host": format_seconds(time.to_host_seconds),
                "collectives": format_seconds(time.collective_seconds),
            }
            for name, time in ((name, plan.step_time) for name, plan in self.items())
        ]
        note = "\n".join(f"{name}: {error}" for name, error in self.errors.items())
        return Report([ReportTable(rows), ReportTable(times, _TIMES)], note=note)

    def plot(self, ax: Any = None) -> Any:
        """Draw a bar per plan, by kind of memory, with matplotlib; return the axes."""
        first = next(iter(self.values()))
        available = first.available_bytes
        where = f"{format_bytes(available)} available on {first.target.description}"
        label = f"device memory at the peak, of {where}"
        sizes = {name: _bytes_by_kind(plan) for name, plan in self.items()}
        return stacked_bar_chart(sizes, ax, label, available)


@dataclasses.dataclass(frozen=True)
class MaxBatch(Printable):
    """The largest batch size that fits. Returned by `max_batch_size`.

    Attributes:
        batch_size: the largest batch size that fits; 0 if none does.
        plan: the plan of that batch size; of the smallest one tried if none fits.
        tried: peak device bytes of each batch size that was compiled.
    """

    batch_size: int
    plan: MemoryPlan
    tried: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-serializable data."""
        tried = {str(batch): peak for batch, peak in sorted(self.tried.items())}
        return {"batch_size": self.batch_size, "plan": self.plan.to_dict(), "tried": tried}

    def report(self) -> Report:
        """Return the report to print: the plan in a line, and a row per batch size."""
        batch = self.batch_size
        title = f"batch {batch}" if batch else f"no batch fits, not even {min(self.tried)}"
        rows = [
            {"batch": str(n), "peak": format_bytes(peak), "fits": "yes" if n <= batch else "no"}
            for n, peak in sorted(self.tried.items())
        ]
        return Report([ReportTable(rows)], f"{title}: {summarize(self.plan)}", is_ok=batch > 0)

    def plot(self, ax: Any = None) -> Any:
        """Draw the peak of each batch size with matplotlib; return the axes."""
        tried = sorted(self.tried.items())
        points = {
            "fits": [point for point in tried if point[0] <= self.batch_size],
            "does not fit": [point for point in tried if point[0] > self.batch_size],
        }
        ax = scatter_chart(points, ax, "batch size", self.plan.available_bytes)
        ax.set_title(f"largest batch: {self.batch_size or 'none fits'}", fontsize="medium")
        return ax


@dataclasses.dataclass(frozen=True)
class Trial:
    """A combination of options, and why it was chosen or not."""

    options: dict[str, Any]
    result: str  # "chosen", or why another one was, such as "does not fit: 12.3 GB"
    is_compiled: bool  # also if it was read from the cache; otherwise all numbers are lower bounds
    peak_device_bytes: int
    peak_host_bytes: int
    step_seconds: float  # modelled; of an example, if `choose_options` got `examples`
    is_lower_bound: bool  # of `step_seconds`


@dataclasses.dataclass(frozen=True)
class OptionSearch(Printable):
    """The fastest options that fit, and all others. Returned by `choose_options`.

    Attributes:
        options: the fastest options that fit; None if none were found.
        plan: the plan of their step; None if none were found.
        trials: all combinations, the compiled ones first. Each has its `options`, a `result`
            ("chosen", or why it was not), `is_compiled`, `peak_device_bytes`, `peak_host_bytes`,
            `step_seconds` and `is_lower_bound`. If it is not compiled, bytes and seconds are lower
            bounds.
        target: the device.
        budget: bytes of device memory.
        host_memory_bytes: bytes of pinned host memory; None if they are not known.
        is_complete: False if `max_compiles` ended the search, so that a combination that was not
            compiled may be faster.
    """

    options: dict[str, Any] | None
    plan: MemoryPlan | None
    trials: tuple[Trial, ...]
    target: Target
    budget: int
    host_memory_bytes: int | None
    is_complete: bool

    @property
    def num_compiled(self) -> int:
        """The number of programs that were compiled or read from the cache."""
        return sum(trial.is_compiled for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-serializable data."""
        return {
            "options": None if self.options is None else _as_plain(self.options),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "trials": [
                dataclasses.asdict(dataclasses.replace(trial, options=_as_plain(trial.options)))
                for trial in self.trials
            ],
            "target": self.target.name,
            "budget": self.budget,
            "host_memory_bytes": self.host_memory_bytes,
            "is_complete": self.is_complete,
        }

    def report(self) -> Report:
        """Return the report to print: the chosen options, and a row per combination."""
        if self.options is None or self.plan is None:
            headline = f"nothing fits in {format_bytes(self.budget)} of {self.target.description}"
            if self.host_memory_bytes is not None:
                headline += f" and {format_bytes(self.host_memory_bytes)} of pinned host memory"
        else:
            headline = f"{describe_options(self.options)}: {summarize(self.plan)}"
        notes = []
        shown = self.trials
        # Options multiply to dozens of combinations, of which few are compiled. Count the others.
        if len(shown) > MAX_ROWS:
            shown = [trial for trial in self.trials if trial.is_compiled]
            reasons = Counter(trial.result for trial in self.trials if not trial.is_compiled)
            notes += [f"{count}× {reason}" for reason, count in reasons.most_common(MAX_ROWS)]
        if not self.is_complete:
            notes.append("hint: the search ended at `max_compiles`; other options may be faster")
        rows = [
            {name: str(value) for name, value in _as_plain(trial.options).items()}
            | {
                # Names that no option can have.
                "device memory": format_bytes(trial.peak_device_bytes),
                "host memory": format_bytes(trial.peak_host_bytes),
                "step time": _format_time(trial.step_seconds, trial.is_lower_bound),
                "chosen or not": trial.result,
            }
            for trial in shown
        ]
        return Report([ReportTable(rows)], headline, "\n".join(notes), self.plan is not None)


@dataclasses.dataclass(frozen=True)
class ResidualReport(Printable):
    """Arrays kept for the backward pass. Returned by `residual_bytes`.

    Attributes:
        bytes: total size, with each array counted once.
        argument_bytes: the part of `bytes` that belongs to arguments of the function, such as
            parameters, which stay alive anyway.
        arrays: `(shape, dtype, count, total bytes)` of the arrays, largest first.
    """

    bytes: int
    argument_bytes: int
    arrays: tuple[tuple[tuple[int, ...], str, int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-serializable data."""
        return dataclasses.asdict(self)

    def report(self) -> Report:
        """Return the report to print: the total and the largest arrays."""
        rows = [
            (size, count, _array_name(shape, dtype))
            for shape, dtype, count, size in self.arrays[:MAX_ROWS]
        ]
        if rest := self.arrays[MAX_ROWS:]:
            rows.append((sum(a[3] for a in rest), sum(a[2] for a in rest), "smaller ones"))
        table = ReportTable([
            {"bytes": format_bytes(size), "count": f"{count}×", "shape": name}
            for size, count, name in rows
        ])  # fmt: skip
        kept, arguments = format_bytes(self.bytes), format_bytes(self.argument_bytes)
        return Report([table], f"{kept} kept for the backward pass, of them {arguments} arguments")

    def plot(self, ax: Any = None, *, most: int = MAX_ROWS) -> Any:
        """Draw at most `most` arrays as bars with matplotlib; return the axes."""
        bars = [
            Bar(f"{count}× {_array_name(shape, dtype)}", size, "temporary")
            for shape, dtype, count, size in self.arrays[:most]
        ]
        return bar_chart(bars, ax, "kept for the backward pass", legend=False)


def summarize(plan: MemoryPlan) -> str:
    """Return one line with the peaks of device and host, and whether they fit."""

    def describe(fits: bool, available: int) -> str:
        return f"{'fits in' if fits else 'DOES NOT FIT in'} {format_bytes(available)}"

    each = f", each of {plan.num_devices}" if plan.num_devices > 1 else ""
    peak, on_host = plan.peak_device_bytes, plan.peak_host_bytes
    line = (
        f"{format_bytes(peak)} at the peak {describe(plan.fits_device, plan.available_bytes)} "
        f"({plan.memory_fraction:.0%} of {plan.target.description}{each})"
    )
    if on_host:
        line += f"; {format_bytes(on_host)} of pinned host memory"
        if plan.host_memory_bytes is not None:
            line += f" {describe(plan.fits_host, plan.host_memory_bytes)}"
        # XLA reads the limit when JAX starts a GPU, so the program itself cannot raise it.
        if plan.target.is_gpu and on_host > host_memory_limit():
            line += f" (set {HOST_MEMORY_VARIABLE}={gibibytes(on_host)} before JAX starts)"
    return line


def format_step(time: StepTime) -> str:
    """Return the modelled time of a call, such as "12.3 ms", or "≥ 12.3 ms" if work is unknown."""
    return _format_time(time.seconds, time.is_lower_bound)


def _format_time(seconds: float, is_lower_bound: bool) -> str:
    return ("≥ " if is_lower_bound else "") + format_seconds(seconds)


def _donation_note(plan: MemoryPlan) -> str:
    """Return a hint at the bytes that donation would save, if nothing is donated."""
    if plan.device.aliased or plan.host.aliased:
        return ""
    # A result can replace an argument of the same shape.
    arguments, outputs = (
        Counter(buffer.shape for buffer in plan.peak_buffers if buffer.kind == kind)
        for kind in ("argument", "output")
    )
    sizes = {buffer.shape: buffer.bytes for buffer in plan.peak_buffers if buffer.kind == "output"}
    saved = sum(count * sizes[shape] for shape, count in (arguments & outputs).items())
    on_host = min(plan.host.arguments, plan.host.outputs)
    if max(saved, on_host) < _WORTH_A_NOTE * (plan.peak_device_bytes + on_host):
        return ""
    where = [f"{format_bytes(saved)} of device memory"] if saved else []
    where += [f"{format_bytes(on_host)} of host memory"] if on_host else []
    return (
        "nothing is donated; where results replace arguments (donate_argnums), "
        f"{' and '.join(where)} would be saved"
    )


def _padding_note(plan: MemoryPlan) -> str:
    """Return a hint at the bytes that padding takes, if they are many."""
    if plan.padding_bytes < _WORTH_A_NOTE * plan.peak_device_bytes:
        return ""
    most = max(plan.peak_buffers, key=lambda buffer: buffer.padding)
    return (
        f"{format_bytes(plan.padding_bytes)} are padding, because {plan.target.description} "
        f"stores the last axes in tiles; {most.shape} takes "
        f"{most.bytes / (most.bytes - most.padding):.1f} times its size"
    )


def recomputation_note(plan: MemoryPlan) -> str:
    """Return a hint at the FLOPs that XLA recomputes; empty if there are hardly any."""
    time = plan.step_time
    if time.recomputed_flops <= _WORTH_A_NOTE * time.total_flops:
        return ""
    recomputed, total = (format_number(n, FLOPS) for n in (time.recomputed_flops, time.total_flops))
    return (
        f"XLA recomputes {recomputed} of {total}, because the step would otherwise exceed the "
        "memory of the device"
    )


def _whole_update_note(plan: MemoryPlan) -> str:
    """Return a hint at what `update_rows` would save, if the peak is in an update without it."""
    named = [buffer for buffer in plan.peak_buffers if WHOLE_UPDATE in buffer.operation]
    # XLA does not name the copies from the host. Count those of the shapes of such updates.
    updates = [line for line in plan.hlo.splitlines() if WHOLE_UPDATE in line]
    shapes = set(re.findall(r"\w+\[[\d,]+\]", "".join(updates)))
    copies = [b for b in plan.peak_buffers if b.operation.startswith("copy") and b.shape in shapes]
    size = sum(buffer.bytes for buffer in named + copies)
    if not named or size < _WORTH_A_NOTE * plan.peak_device_bytes:
        return ""
    return (
        f"{named[0].shape} is updated whole, with its optimizer state; `update_rows` saves "
        f"up to {format_bytes(size)} where the update of a row depends on no other row"
    )


def _plan_tables(plan: MemoryPlan, max_rows: int) -> list[ReportTable]:
    names = ("arguments", "outputs", "aliased", "temporaries", "generated_code")
    totals = [
        (name.replace("_", " "), getattr(plan.device, name), getattr(plan.host, name))
        for name in names
    ]
    totals += [("constants", plan.constant_bytes, 0)]
    totals += [("peak", plan.peak_device_bytes, plan.host.total)]
    bytes_by_kind = [
        {"": name, "device": format_bytes(device), "host": format_bytes(host)}
        for name, device, host in totals
    ]
    groups = _group_buffers(plan.peak_buffers)
    peak = [
        _row(b, count, kind=b.kind, shape=b.shape, operation=_short_operation(b))
        for count, b in groups[:max_rows]
    ]
    if rest := groups[max_rows:]:
        size, count = sum(b.bytes for _, b in rest), sum(count for count, _ in rest)
        peak.append({"bytes": format_bytes(size), "count": f"{count}×", "shape": "smaller ones"})
    if lost := _lost_in_packing(plan):
        peak.append({"bytes": format_bytes(lost), "shape": "lost in packing"})

    collectives = [_row(c, c.count, kind=c.kind) for c in plan.collectives[:max_rows]]
    transfers = [
        _row(t, t.count, direction=t.direction.replace("_", " "), shape=t.shape)
        for t in plan.transfers[:max_rows]
    ]
    return [
        ReportTable(bytes_by_kind, "bytes"),
        ReportTable(peak, "device memory at the peak"),
        ReportTable(collectives, "collectives of a call"),
        ReportTable(transfers, "transfers of a call"),
        _time_table(plan.step_time),
    ]


def _row(record: Any, count: int, **texts: str) -> dict[str, str]:
    """Return a row of a table of buffers, collectives or transfers."""
    size = {"bytes": format_bytes(record.bytes), "count": f"{count}×"}
    lines = {"source": short_path(record.source), "called from": short_path(record.caller)}
    return size | texts | lines


def _time_table(time: StepTime) -> ReportTable:
    """Return the table of a modelled time: each part alone, and what it adds."""
    rows = [
        {
            "part": f"products, {dtype}",
            "amount": format_number(flops, FLOPS),
            "rate": f"{format_number(time.rates.flops_of(dtype), FLOPS)}/s",
            "alone": format_seconds(flops / time.rates.flops_of(dtype)),
        }
        for dtype, flops in sorted(time.flops.items(), key=lambda item: -item[1])
    ]
    if time.recomputed_flops:
        recomputed = format_number(time.recomputed_flops, FLOPS)
        rows.append({"part": "of them recomputed by XLA", "amount": recomputed})

    def moved(name: str, size: int, rate: float) -> dict[str, str]:
        amount, alone = format_bytes(size), format_seconds(size / rate)
        return {"part": name, "amount": amount, "rate": f"{format_bytes(rate)}/s", "alone": alone}

    rows.append(moved("device memory", time.memory_bytes, time.rates.memory))
    rows.append({"part": "kernels", "adds": format_seconds(time.compute_seconds)})
    for name, size, rate, wait in (
        ("host to device", time.to_device_bytes, time.rates.to_device, time.to_device_seconds),
        ("device to host", time.to_host_bytes, time.rates.to_host, time.to_host_seconds),
        ("collectives", time.collective_bytes, time.rates.interconnect, time.collective_seconds),
    ):
        if size:
            rows.append(moved(name, size, rate) | {"adds": format_seconds(wait)})
    rows.append({"part": "call", "adds": format_step(time)})
    rows += [
        {"part": f"unknown FLOPs: {name}", "amount": f"{count}×"}
        for name, count in time.unknown_kernels.items()
    ]
    if time.unknown_loops:
        rows.append({"part": "loops of unknown length", "amount": f"{time.unknown_loops}×"})
    return ReportTable(rows, _TIMES)


def _group_buffers(buffers: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
    """Merge the buffers that an operation on one line made; most bytes first.

    Returns:
        The number of buffers of each group, and one buffer of their total size, with the shape of
        the first one, and an ellipsis if there are other shapes.
    """
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.source and buffer.kind != "argument":
            # The names of repeated layers differ in a number only.
            operation = re.sub(r"\d+", "#", buffer.operation)
            key = buffer.kind, operation, buffer.source, buffer.caller
        else:
            key = buffer.kind, buffer.operation, buffer.source, buffer.caller, buffer.shape
        groups.setdefault(key, []).append(buffer)
    result = []
    for (_, operation, *_), members in groups.items():
        shape = members[0].shape
        if any(buffer.shape != shape for buffer in members):
            shape += " …"
        size = sum(buffer.bytes for buffer in members)
        merged = dataclasses.replace(members[0], shape=shape, bytes=size, operation=operation)
        result.append((len(members), merged))
    return sorted(result, key=lambda item: item[1].bytes, reverse=True)


def _lost_in_packing(plan: MemoryPlan) -> int:
    """Return the bytes of temporary memory that are unused at the peak."""
    # XLA gives all temporaries places in one allocation. Gaps remain where sizes do not match.
    live = sum(buffer.bytes for buffer in plan.peak_buffers if buffer.kind == "temporary")
    return max(plan.device.temporaries - live, 0)


def _bytes_by_kind(plan: MemoryPlan) -> dict[str, int]:
    """Return the peak by kind of memory; the values add up to `peak_device_bytes`."""
    device, lost = plan.device, _lost_in_packing(plan)
    return {
        "argument": device.arguments,
        "output": device.outputs - device.aliased,
        "temporary": device.temporaries - lost,
        "lost in packing": lost,
        "constant": plan.constant_bytes + device.generated_code,
    }


def _short_operation(buffer: Buffer) -> str:
    """Return the operation without the outer jit(...), and without the start of a long one."""
    operation = re.sub(r"^jit\([^()]*\)/", "", buffer.operation).replace("\\'", "'")
    return operation if len(operation) <= 44 else "…" + operation[-43:]


def _array_name(shape: Sequence[int], dtype: str) -> str:
    """Return a name such as "float32[8,128]"."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def describe_options(options: Mapping[str, Any]) -> str:
    """Return options such as "policy=dots, batch_size=64"."""
    return ", ".join(f"{name}={value}" for name, value in _as_plain(options).items())


def _as_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with functions and other objects replaced by their names."""
    return {
        name: value
        if value is None or isinstance(value, (bool, int, float, str))
        else getattr(value, "__name__", str(value))
        for name, value in options.items()
    }
