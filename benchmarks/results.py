"""Tables of results: on the terminal, in Markdown and as JSON."""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import effjax

Size = Literal["small", "published"]
Row = dict[str, Any]
PACKAGES = ("effjax", "jax", "jaxlib", "flax", "numpy", "torch", "torchvision")


class UnavailableError(Exception):
    """A benchmark that cannot run here; the message says what is missing and how to get it."""


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
    rows: list[Row]
    notes: Sequence[str] = ()


def is_ours(result: Result, name: str) -> bool:
    """Return True if a row shows effjax."""
    return "effjax" in name or name in result.config.get("ours", ())


class Column(NamedTuple):
    """A column of a table.

    value: key of the rows, or a function of a row.
    form:  template of `str.format` for a number, or for each of several.
    unit:  the unit of the header; numbers are divided by it.
    only:  values that the rows of this column have, each one value or a tuple of them.
    """

    header: str
    value: str | Callable[[Row], Any]
    form: str = "{}"
    unit: float = 1
    only: Mapping[str, Any] = {}

    def show(self, row: Row) -> str | None:
        """Return the cell of a row, or None if it has none."""
        for key, wanted in self.only.items():
            if row.get(key) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
                return None
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is None or isinstance(value, str):
            return value
        numbers = value if isinstance(value, (list, tuple)) else (value,)
        return "–".join(self.form.format(v / self.unit if v else v) for v in numbers)


def make_table(
    rows: Iterable[Row], columns: Sequence[Column], by: Sequence[str] = ()
) -> list[list[str]]:
    """Return the header and the lines of a table, without columns that are empty in all lines.

    Rows that agree in all keys of `by` are one line. A cell has the values of all of them, or one
    if they are equal.
    """
    lines: dict[Any, list[Row]] = {}
    for i, row in enumerate(rows):
        lines.setdefault(tuple(row[key] for key in by) if by else i, []).append(row)
    table = [[column.header for column in columns]]
    for line in lines.values():
        shown = [[c for row in line if (c := column.show(row)) is not None] for column in columns]
        table.append([" / ".join(cells if len(set(cells)) > 1 else cells[:1]) for cells in shown])
    used = [i for i in range(len(columns)) if any(line[i] for line in table[1:])]
    return [[line[i] for i in used] for line in table]


# The columns of all subjects.
COLUMNS = (
    Column("program", "name"),
    Column("part", "of"),
    Column("passes", "passes"),
    Column("layers", "layers"),
    Column("batch", "batch_size"),
    Column("devices", "devices"),
    Column("mean", "mean", "{:g}"),
    Column("parameters [B]", "parameters", "{:.2f}", 1e9),
    Column("step [ms]", "seconds", "{:.1f}", 1e-3),
    Column("x reference", "ratio", "{:.2f}"),
    Column("quartiles", "ratio_quartiles", "{:.2f}"),
    Column("tokens/s", "tokens_per_second", "{:.0f}"),
    Column("images/s", "images_per_second", "{:.0f}"),
    Column("largest batch", "largest_batch"),
    Column("all-reduces", "all_reduces"),
    Column("loss", "loss", "{:.3f}"),
    Column("error of variance", "variance_error", "{:.1e}"),
    Column("temp [MB]", "temp_bytes", "{:.1f}", 1e6),
    Column("peak [MB]", "peak_bytes", "{:.1f}", 1e6),
    Column("kept [MB]", "kept_bytes", "{:.2f}", 1e6),
    Column("kept [x]", "kept", "{:.2f}"),
    Column("planned [GB]", "planned_device_bytes", "{:.3f}", 1e9),
    Column("on host [GB]", "planned_host_bytes", "{:.3f}", 1e9),
    Column("to device [GB]", "to_device_bytes", "{:.1f}", 1e9),
    Column("to host [GB]", "to_host_bytes", "{:.1f}", 1e9),
    Column("modelled step [ms]", "step_seconds", "{:.2f}", 1e-3),
    Column("compile [s]", "compile_seconds", "{:.1f}"),
    Column("max difference", "difference", "{:.1e}"),
)


def print_table(result: Result) -> None:
    """Print a table and its notes, as wide as the table needs."""
    header, *rows = ([Text(cell) for cell in line] for line in make_table(result.rows, COLUMNS))
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


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    header, *rows = (re.sub(" +", " ", f"| {' | '.join(line)} |\n") for line in table)
    return "".join([header, "|" + "---|" * len(table[0]) + "\n", *rows])


def headline(result: Result) -> str:
    """Return one line: effjax's ratios to the reference."""
    ratios = []
    for row in result.rows:
        ours = "effjax" in row["name"] or row["name"] in result.config.get("ours", ())
        if ours and "ratio" in row:
            quartiles = row.get("ratio_quartiles")
            spread = f" ({quartiles[0]:.2f}–{quartiles[1]:.2f})" if quartiles else ""
            ratios.append(f"{row['name']} {row['ratio']:.2f}{spread}")
    reference = result.config.get("reference", result.rows[0]["name"])
    text = f"{', '.join(ratios)} of {reference}" if ratios else ""
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
