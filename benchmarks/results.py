"""Tables of results: on the terminal, in Markdown and as JSON."""

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import effjax

Size = Literal["small", "published"]
PACKAGES = ("effjax", "jax", "jaxlib", "flax", "numpy", "torch", "torchvision")


class UnavailableError(Exception):
    """A benchmark that cannot run here; the message says what is missing and how to get it."""


class Bars(NamedTuple):
    """A plot with a horizontal bar per row, and quartiles where a row has `KEY_quartiles`.

    groups: keys of the rows that are shown beside their names.
    unit: the unit of the label; values are divided by it.
    """

    key: str
    label: str
    groups: Sequence[str] = ()
    log: bool = False
    unit: float = 1.0


class Curves(NamedTuple):
    """A plot with a line per program, on logarithmic axes."""

    x: str
    y: str
    label: str
    unit: float = 1.0


RATIOS = Bars("ratio", "time relative to the reference (lines: quartiles of the rounds)")


class Result(NamedTuple):
    """One table of a benchmark.

    name:   stem of its files.
    config: settings, for the JSON. "reference" names the row that ratios refer to; "ours" names
            rows of effjax whose names do not say so.
    rows:   each has a "name", and values for some keys of `COLUMNS`.
    notes:  sentences below the table.
    """

    name: str
    title: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    plot: Bars | Curves | None = RATIOS
    notes: Sequence[str] = ()


def is_ours(result: Result, name: str) -> bool:
    """Return True if a row shows effjax."""
    return "effjax" in name or name in result.config.get("ours", ())


# Header, key of the row, format, unit.
COLUMNS = (
    ("part", "of", "", 0),
    ("passes", "passes", "", 0),
    ("layers", "layers", ".0f", 1),
    ("batch", "batch_size", ".0f", 1),
    ("devices", "devices", ".0f", 1),
    ("mean", "mean", "g", 1),
    ("parameters [B]", "parameters", ".2f", 1e9),
    ("step [ms]", "seconds", ".1f", 1e-3),
    ("x reference", "ratio", ".2f", 1),
    ("quartiles", "ratio_quartiles", ".2f", 1),
    ("tokens/s", "tokens_per_second", ".0f", 1),
    ("all-reduces", "all_reduces", ".0f", 1),
    ("loss", "loss", ".3f", 1),
    ("quartiles of the loss", "loss_quartiles", ".3f", 1),
    ("error of variance", "variance_error", ".1e", 1),
    ("temp [MB]", "temp_bytes", ".1f", 1e6),
    ("peak [MB]", "peak_bytes", ".1f", 1e6),
    ("traffic [MB]", "traffic_bytes", ".0f", 1e6),
    ("kept [MB]", "kept_bytes", ".2f", 1e6),
    ("kept [x]", "kept", ".2f", 1),
    ("exponent", "exponent", ".2f", 1),
    ("planned [GB]", "planned_device_bytes", ".3f", 1e9),
    ("on host [GB]", "planned_host_bytes", ".3f", 1e9),
    ("to device [GB]", "to_device_bytes", ".1f", 1e9),
    ("to host [GB]", "to_host_bytes", ".1f", 1e9),
    ("saving [GiB]", "save_bytes", ".2f", 2**30),
    ("restoring [GiB]", "restore_bytes", ".2f", 2**30),
    ("modelled step [ms]", "step_seconds", ".2f", 1e-3),
    ("compiled", "compiled", ".0f", 1),
    ("trace [s]", "trace_seconds", ".2f", 1),
    ("CPU [ms]", "cpu_seconds", ".1f", 1e-3),
    ("modules", "modules", ".0f", 1),
    ("plan [s]", "plan_seconds", ".1f", 1),
    ("compile [s]", "compile_seconds", ".1f", 1),
    ("max difference", "difference", ".1e", 1),
    ("same bits", "bit_identical", ".0f", 1),
    ("same as remat", "bit_identical_to_remat", ".0f", 1),
)


def format_cells(rows: Sequence[dict]) -> list[list[str]]:
    """Return the header and the rows as text, without columns that are empty in all rows."""
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]

    def cell(value: Any, form: str, unit: float) -> str:
        if value is None:
            return ""
        if isinstance(value, (list, tuple)):
            return "–".join(f"{v / unit:{form}}" for v in value)
        return f"{value / unit:{form}}" if form else str(value)

    lines = [["program", *(column[0] for column in columns)]]
    for row in rows:
        lines.append([row["name"], *(cell(row.get(key), f, u) for _, key, f, u in columns)])
    return lines


def print_table(result: Result) -> None:
    """Print a table and its notes, as wide as the table needs."""
    header, *rows = ([Text(cell) for cell in row] for row in format_cells(result.rows))
    table = Table(title=Text(result.title))
    for i, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    console = Console(width=max(console.width, width))
    console.print(table)
    for note in result.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def as_markdown(result: Result) -> str:
    """Return a Markdown section with the table and its notes."""
    header, *rows = format_cells(result.rows)
    line = ["---", *["---:"] * (len(header) - 1)]
    table = [f"| {' | '.join(row)} |" for row in (header, line, *rows)]
    notes = [text for note in result.notes for text in ("", note)]
    return "\n".join([f"## {result.title}", "", *table, *notes, ""])


def headline(result: Result) -> str:
    """Return one line: effjax's ratios to the reference, or the exponents of growth."""
    growth = [row for row in result.rows if "exponent" in row]
    ratios = []
    for row in result.rows:
        if not growth and "ratio" in row and is_ours(result, row["name"]):
            quartiles = row.get("ratio_quartiles")
            spread = f" ({quartiles[0]:.2f}–{quartiles[1]:.2f})" if quartiles else ""
            ratios.append(f"{row['name']} {row['ratio']:.2f}{spread}")
    text = ", ".join(f"{row['name']} ∝ depth^{row['exponent']:.2f}" for row in growth)
    if ratios:
        quantity = "time" if result.plot == RATIOS else "memory"
        reference = result.config.get("reference", result.rows[0]["name"])
        text = f"{', '.join(ratios)} of the {quantity} of {reference}"
    return ": ".join(filter(None, [result.title, text]))


def write_json(result: Result, folder: Path, command: str) -> None:
    """Write FOLDER/NAME.json: the rows, the settings, versions, the machine and the command."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "title": result.title,
        "command": command,
        "versions": versions(),
        "machine": machine(),
        **result.config,
        **({"notes": list(result.notes)} if result.notes else {}),
        "rows": result.rows,
    }
    (folder / f"{result.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages, and the kind of the device."""
    device = jax.devices()[0]
    packages = {}
    for name in PACKAGES:
        try:
            # A source tree has no metadata.
            packages[name] = effjax.__version__ if name == "effjax" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return packages | {
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def num_threads() -> int:
    """Return the number of cores this process may use, which is XLA's number of threads."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return the name of the CPU, its cores, and the threads of this process."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": num_threads()}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU."""
    if cpuinfo.exists():  # Linux. Not every ARM core has its name there.
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine() or "unknown"
