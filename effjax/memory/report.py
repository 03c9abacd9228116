"""How plans look: as text and as tables."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.offload.host_pool import HOST_MEMORY_VARIABLE
from ._source import from_package, in_library

if TYPE_CHECKING:
    from .batch_size import MaxBatch
    from .plan import Buffer, MemoryPlan
    from .residuals import ResidualReport

SHOWN = 12  # rows of a table
_NUMBERS = {
    "bytes", "count", "device", "host", "peak", "ratio", "arguments", "outputs", "temporaries",
    "batch",
}  # fmt: skip
_SPARED = 0.01  # of the peak: less is no hint


def format_bytes(count: float) -> str:
    """12345678 → 12.3 MB"""
    size, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{count:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def verdict(plan: "MemoryPlan") -> str:
    """One line: the peaks of device and host, and whether they fit."""
    each = f", each of {plan.num_devices}" if plan.num_devices > 1 else ""
    peak, there = plan.peak_device_bytes, plan.available_bytes
    line = (
        f"{format_bytes(peak)} at the peak {_fits(peak, there)} {format_bytes(there)} "
        f"({plan.memory_fraction:.0%} of {plan.target.description}{each})"
    )
    if on_host := plan.peak_host_bytes:
        there = plan.host_memory_bytes
        line += (
            f"; {format_bytes(on_host)} of pinned host memory {_fits(on_host, there)} "
            f"{format_bytes(there)} ({HOST_MEMORY_VARIABLE}={there / 2**30:g})"
        )
    return line


def _fits(size: int, there: int) -> str:
    return "fits in" if size <= there else "DOES NOT FIT in"


def hint(plan: "MemoryPlan") -> str:
    """What donation would save, if nothing is donated; empty where that is little."""
    if plan.device.aliased or plan.host.aliased:
        return ""
    shapes = [Counter[str](), Counter[str]()]
    sizes: dict[str, int] = {}
    for buffer in plan.peak_buffers:
        if buffer.kind in ("argument", "output"):
            shapes[buffer.kind == "output"][buffer.shape] += 1
            sizes[buffer.shape] = buffer.bytes
    alike = shapes[0] & shapes[1]
    saved = sum(count * sizes[shape] for shape, count in alike.items())
    on_host = min(plan.host.arguments, plan.host.outputs)
    if max(saved, on_host) < _SPARED * (plan.peak_device_bytes + on_host):
        return ""
    where = [f"{format_bytes(saved)} of device memory"] if saved else []
    where += [f"{format_bytes(on_host)} of host memory"] if on_host else []
    return (
        f"hint: nothing is donated; where results replace arguments (donate_argnums), "
        f"{' and '.join(where)} would be saved"
    )


def plan_text(plan: "MemoryPlan", name: str = "", shown: int = SHOWN) -> str:
    """All that a plan says, for reading; at most so many rows of each table."""
    parts = [_headline(plan, name), *filter(None, [hint(plan)])]
    for title, header, rows in _sections(plan, shown):
        parts += ["", title, aligned([header, *rows])]
    return "\n".join(parts)


def plan_tables(plan: "MemoryPlan", name: str = "", shown: int = SHOWN) -> Any:
    """The same as tables of rich."""
    from rich.console import Group
    from rich.text import Text

    summary = [Text(_headline(plan, name), style="bold" if plan.fits else "bold red")]
    summary += [Text(hint(plan))] if hint(plan) else []
    return Group(*summary, *(table(*section) for section in _sections(plan, shown)))


def _headline(plan: "MemoryPlan", name: str) -> str:
    return f"{name}: {verdict(plan)}" if name else verdict(plan)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines in columns; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [name in _NUMBERS for name in rows[0]]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """The same as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold")
    for name in header:
        number = name in _NUMBERS
        wraps = name not in (*_NUMBERS, "operation", "kind", "source", "called from")
        table.add_column(name, justify="right" if number else "left", no_wrap=not wraps)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _sections(plan: "MemoryPlan", shown: int) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table."""
    device, host = plan.device, plan.host
    names = ("arguments", "outputs", "aliased", "temporaries", "generated_code")
    rows = [
        [n.replace("_", " "), format_bytes(getattr(device, n)), format_bytes(getattr(host, n))]
        for n in names
    ]
    rows.append(["constants", format_bytes(plan.constant_bytes), format_bytes(0)])
    rows.append(["peak", format_bytes(plan.peak_device_bytes), format_bytes(host.total)])
    yield "bytes", ["", "device", "host"], rows

    groups = grouped(plan)
    rows = [
        [format_bytes(g.bytes), f"{g.count}×", g.kind, g.shape, short_name(g.operation), *_lines(g)]
        for g in groups[:shown]
    ]
    if rest := groups[shown:]:
        size, count = sum(g.bytes for g in rest), sum(g.count for g in rest)
        rows.append([format_bytes(size), f"{count}×", "", "smaller ones", "", "", ""])
    if lost := lost_in_packing(plan):
        rows.append([format_bytes(lost), "", "", "lost in packing", "", "", ""])
    yield "device memory at the peak", *_with_lines(["kind", "shape", "operation"], rows)

    rows = [
        [format_bytes(c.bytes), f"{c.count}×", c.kind, *_lines(c)] for c in plan.collectives[:shown]
    ]
    if rows:
        yield "collectives of a call", *_with_lines(["kind"], rows)
    rows = [
        [format_bytes(t.bytes), f"{t.count}×", t.direction.replace("_", " "), t.shape, *_lines(t)]
        for t in plan.transfers[:shown]
    ]
    if rows:
        yield "transfers of a call", *_with_lines(["direction", "shape"], rows)


def _lines(made: Any) -> list[str]:
    """The line that made it, and the user's that led there."""
    return [short_path(made.source), short_path(made.caller)]


def _with_lines(names: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; the user's lines have a column where there are any."""
    header = ["bytes", "count", *names, "source", "called from"]
    if any(row[-1] for row in rows):
        return header, rows
    return header[:-1], [row[:-1] for row in rows]


class Group(NamedTuple):
    """Buffers at the peak that one operation of one line made."""

    kind: str
    operation: str
    source: str
    caller: str
    shape: str  # of the largest
    count: int
    bytes: int  # of all


def grouped(plan: "MemoryPlan") -> list[Group]:
    """What is in device memory at the peak, by the line that made it; most bytes first."""
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in plan.peak_buffers:
        if buffer.source and buffer.kind != "argument":
            # Layers differ in their number only.
            operation = re.sub(r"\d+", "#", buffer.operation)
            key = buffer.kind, operation, buffer.source, buffer.caller
        else:
            key = buffer.kind, buffer.operation, buffer.source, buffer.caller, buffer.shape
        groups.setdefault(key, []).append(buffer)
    found = []
    for (kind, operation, source, caller, *_), buffers in groups.items():
        shapes = list(dict.fromkeys(buffer.shape for buffer in buffers))
        shape = shapes[0] + (" …" if len(shapes) > 1 else "")
        size = sum(buffer.bytes for buffer in buffers)
        found.append(Group(kind, operation, source, caller, shape, len(buffers), size))
    return sorted(found, key=lambda group: group.bytes, reverse=True)


def lost_in_packing(plan: "MemoryPlan") -> int:
    """Bytes of temporary memory that hold nothing at the peak."""
    live = sum(buffer.bytes for buffer in plan.peak_buffers if buffer.kind == "temporary")
    return max(plan.device.temporaries - live, 0)


def short_name(operation: str) -> str:
    """jit(step)/a/b/c/d → …/c/d, if it is long."""
    operation = re.sub(r"^jit\([^()]*\)/", "", operation).replace("\\'", "'")
    if len(operation) <= 44:
        return operation
    return "…" + operation[-43:]


def short_path(source: str) -> str:
    """From the package of a library; else the last two parts, the working directory left out."""
    if not source:
        return ""
    if in_library(source):
        return from_package(source)
    path = os.path.relpath(source)
    return "/".join((source if path.startswith("..") else path).split("/")[-2:])


def parts(plan: "MemoryPlan") -> dict[str, int]:
    """The peak by kind; the parts add up to it."""
    device = plan.device
    lost = lost_in_packing(plan)
    return {
        "argument": device.arguments,
        "output": device.outputs - device.aliased,
        "temporary": device.temporaries - lost,
        "lost in packing": lost,
        "constant": plan.constant_bytes + device.generated_code,
    }


def comparison_rows(plans: Mapping[str, "MemoryPlan"]) -> tuple[list[str], list[list[str]]]:
    """Header and a row for each plan."""
    first = next(iter(plans.values())).peak_device_bytes
    header = ["", "peak", "ratio", "arguments", "outputs", "temporaries", "host", "fits"]
    return header, [
        [
            name,
            format_bytes(plan.peak_device_bytes),
            f"{plan.peak_device_bytes / max(first, 1):.3f}",
            format_bytes(plan.device.arguments),
            format_bytes(plan.device.outputs - plan.device.aliased),
            format_bytes(plan.device.temporaries),
            format_bytes(plan.host.total),
            "yes" if plan.fits else "no",
        ]
        for name, plan in plans.items()
    ]


def batches_text(found: "MaxBatch") -> str:
    """The largest batch that fits, its plan in a line, and what was tried."""
    return f"{_batches_headline(found)}\n\n{aligned(_batches_rows(found))}"


def batches_table(found: "MaxBatch") -> Any:
    """The same as a table of rich."""
    from rich.console import Group
    from rich.text import Text

    header, *rows = _batches_rows(found)
    style = "bold" if found.batch_size else "bold red"
    return Group(Text(_batches_headline(found), style=style), table("", header, rows))


def _batches_headline(found: "MaxBatch") -> str:
    if found.batch_size:
        return f"batch {found.batch_size}: {verdict(found.plan)}"
    return f"no batch fits, not even {min(found.tried)}: {verdict(found.plan)}"


def _batches_rows(found: "MaxBatch") -> list[list[str]]:
    return [["batch", "peak", "fits"]] + [
        [str(batch), format_bytes(peak), "yes" if batch <= found.batch_size else "no"]
        for batch, peak in sorted(found.tried.items())
    ]


def residuals_text(found: "ResidualReport") -> str:
    """What is kept between the passes, and the largest arrays of it."""
    return f"{_residuals_headline(found)}\n\n{aligned(_residuals_rows(found))}"


def residuals_table(found: "ResidualReport") -> Any:
    """The same as a table of rich."""
    header, *rows = _residuals_rows(found)
    return table(_residuals_headline(found), header, rows)


def _residuals_headline(found: "ResidualReport") -> str:
    return (
        f"{format_bytes(found.bytes)} kept for the backward pass, of them "
        f"{format_bytes(found.argument_bytes)} arguments"
    )


def _residuals_rows(found: "ResidualReport") -> list[list[str]]:
    rows = [
        [format_bytes(size), f"{count}×", array_name(shape, dtype)]
        for shape, dtype, count, size in found.largest[:SHOWN]
    ]
    if rest := found.largest[SHOWN:]:
        size, count = sum(row[-1] for row in rest), sum(row[2] for row in rest)
        rows.append([format_bytes(size), f"{count}×", "smaller ones"])
    return [["bytes", "count", "shape"], *rows]


def array_name(shape: Sequence[int], dtype: str) -> str:
    """(8, 128), float32 → float32[8,128]"""
    return f"{dtype}[{','.join(map(str, shape))}]"
