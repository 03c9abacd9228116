"""How plans look: as text, as a table, as a picture."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .plan import Buffer, MemoryPlan

SHOWN = 12  # rows of a table
_NUMBERS = {
    "bytes", "count", "device", "host", "peak", "ratio", "arguments", "outputs", "temporaries",
}  # fmt: skip
_COLORS = {
    "argument": "tab:blue", "output": "tab:green", "temporary": "tab:orange",
    "constant": "tab:purple", "lost in packing": "tab:gray",
}  # fmt: skip


def format_bytes(count: float) -> str:
    """12345678 → 12.3 MB"""
    size, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{count:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def verdict(plan: "MemoryPlan") -> str:
    """One line: the peak, and whether it fits."""
    answer = "fits in" if plan.fits else "DOES NOT FIT in"
    each = f", each of {plan.num_devices}" if plan.num_devices > 1 else ""
    return (
        f"{format_bytes(plan.peak_device_bytes)} at the peak {answer} "
        f"{format_bytes(plan.available_bytes)} ({plan.memory_fraction:.0%} of "
        f"{plan.target.description}{each})"
    )


def plan_text(plan: "MemoryPlan", name: str = "", shown: int = SHOWN) -> str:
    """All that a plan says, for reading; at most so many rows of each table."""
    parts = [_headline(plan, name)]
    for title, header, rows in _sections(plan, shown):
        parts += ["", title, aligned([header, *rows])]
    return "\n".join(parts)


def plan_tables(plan: "MemoryPlan", name: str = "", shown: int = SHOWN) -> Any:
    """The same as tables of rich."""
    from rich.console import Group
    from rich.text import Text

    summary = Text(_headline(plan, name), style="bold" if plan.fits else "bold red")
    return Group(summary, *(table(*section) for section in _sections(plan, shown)))


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
        wraps = name not in (*_NUMBERS, "operation", "kind", "source")
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
    header = ["bytes", "count", "kind", "shape", "operation", "source"]
    rows = [
        [format_bytes(g.bytes), f"{g.count}×", g.kind, g.shape, short_name(g.operation),
         short_path(g.source)]
        for g in groups[:shown]
    ]  # fmt: skip
    if rest := groups[shown:]:
        size, count = sum(g.bytes for g in rest), sum(g.count for g in rest)
        rows.append([format_bytes(size), f"{count}×", "", "smaller ones", "", ""])
    if lost := lost_in_packing(plan):
        rows.append([format_bytes(lost), "", "", "lost in packing", "", ""])
    yield "device memory at the peak", header, rows

    if plan.collectives:
        header = ["bytes", "count", "kind", "source"]
        yield (
            "collectives of a call",
            header,
            [
                [format_bytes(c.bytes), f"{c.count}×", c.kind, short_path(c.source)]
                for c in plan.collectives[:shown]
            ],
        )
    if plan.transfers:
        header = ["bytes", "count", "direction", "shape", "source"]
        yield "transfers of a call", header, [
            [format_bytes(t.bytes), f"{t.count}×", t.direction.replace("_", " "), t.shape,
             short_path(t.source)]
            for t in plan.transfers[:shown]
        ]  # fmt: skip


class Group(NamedTuple):
    """Buffers at the peak that one operation of one line made."""

    kind: str
    operation: str
    source: str
    shape: str  # of the largest
    count: int
    bytes: int  # of all


def grouped(plan: "MemoryPlan") -> list[Group]:
    """What is in device memory at the peak, by the line that made it; most bytes first."""
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in plan.peak_buffers:
        if buffer.source and buffer.kind != "argument":
            # Layers differ in their number only.
            key = buffer.kind, re.sub(r"\d+", "#", buffer.operation), buffer.source
        else:
            key = buffer.kind, buffer.operation, buffer.source, buffer.shape
        groups.setdefault(key, []).append(buffer)
    found = []
    for (kind, operation, source, *_), buffers in groups.items():
        shapes = list(dict.fromkeys(buffer.shape for buffer in buffers))
        shape = shapes[0] + (" …" if len(shapes) > 1 else "")
        size = sum(buffer.bytes for buffer in buffers)
        found.append(Group(kind, operation, source, shape, len(buffers), size))
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
    """Relative to the working directory where that is shorter, and the last two parts at most."""
    if not source:
        return ""
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


def plot_plan(plan: "MemoryPlan", ax: Any, most: int) -> Any:
    """Bars of the largest groups of buffers."""
    from matplotlib.patches import Patch

    ax = ax or _new_axes()
    groups = grouped(plan)[:most]
    labels = [
        f"{g.count}× {g.shape}  {short_path(g.source) or short_name(g.operation)}" for g in groups
    ]
    kinds = [group.kind for group in groups]
    ax.barh(
        range(len(groups)), [group.bytes / 1e9 for group in groups],
        color=[_COLORS[kind] for kind in kinds],
    )  # fmt: skip
    ax.set_yticks(range(len(groups)), labels, fontsize="small")
    ax.invert_yaxis()
    ax.legend(
        handles=[Patch(color=_COLORS[kind], label=kind) for kind in dict.fromkeys(kinds)],
        loc="lower right",
    )
    ax.set_xlabel("GB in device memory at the peak")
    ax.set_title(verdict(plan), fontsize="medium")
    return ax


def plot_comparison(plans: Mapping[str, "MemoryPlan"], ax: Any) -> Any:
    """A bar for each plan, by kind, and the memory there is."""
    ax = ax or _new_axes()
    left = [0.0] * len(plans)
    for kind, color in _COLORS.items():
        sizes = [parts(plan)[kind] / 1e9 for plan in plans.values()]
        if any(sizes):
            ax.barh(range(len(plans)), sizes, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    first = next(iter(plans.values()))
    available = first.available_bytes / 1e9
    if max(left) > available / 3:  # else it would flatten the bars
        ax.axvline(available, color="black", linestyle="--", label="available")
    ax.set_yticks(range(len(plans)), list(plans))
    ax.invert_yaxis()
    ax.legend()
    ax.set_xlabel(f"GB at the peak, of {available:.1f} on {first.target.description}")
    return ax


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


def _new_axes() -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(9, 4), layout="constrained")[1]
