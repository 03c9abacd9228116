"""What a benchmark found: as a table on the terminal and in Markdown, and as JSON."""

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import effjax

from ..memory import PlanError, check_compiler
from ._measure import threads

Size = Literal["small", "published"]
PACKAGES = ("effjax", "jax", "jaxlib", "flax", "numpy", "torch", "torchvision")


class Unavailable(Exception):
    """A benchmark that cannot run here; it says what is missing and how to get it."""


def need_compiler() -> None:
    """Raises `Unavailable` where nothing can be planned for a GPU."""
    try:
        check_compiler()
    except PlanError as error:
        raise Unavailable(f"what is planned for a GPU: {error}") from error


class Bars(NamedTuple):
    """A plot: a horizontal bar a row, with its quartiles where the row has `KEY_quartiles`."""

    key: str
    label: str
    groups: Sequence[str] = ()  # what else tells rows apart
    log: bool = False


class Curves(NamedTuple):
    """A plot: a line a program, on logarithmic axes."""

    x: str
    y: str
    label: str
    unit: float = 1.0


RATIOS = Bars("ratio", "time beside the reference (lines: quartiles of the rounds)")


class Result(NamedTuple):
    """One table of a benchmark.

    name:   of its files.
    rows:   by column; each has a "name", and a value for some of `COLUMNS`.
    notes:  what to know beside the numbers, peers that are missing among it.
    """

    name: str
    title: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    plot: Bars | Curves | None = RATIOS
    notes: Sequence[str] = ()


def is_ours(result: Result, name: str) -> bool:
    """Whether a row is effjax's: by its name, or by `config["ours"]`."""
    return "effjax" in name or name in result.config.get("ours", ())


# Header, key of the row, format, unit.
COLUMNS = (
    ("of", "of", "", 0), ("layers", "layers", ".0f", 1), ("batch", "batch_size", ".0f", 1),
    ("devices", "devices", ".0f", 1), ("mean", "mean", "g", 1),
    ("parameters [B]", "parameters", ".2f", 1e9), ("step [ms]", "seconds", ".1f", 1e-3),
    ("x reference", "ratio", ".2f", 1), ("quartiles", "ratio_quartiles", ".2f", 1),
    ("tokens/s", "tokens_per_second", ".0f", 1), ("all-reduces", "all_reduces", ".0f", 1),
    ("error of variance", "variance_error", ".1e", 1), ("temp [MB]", "temp_bytes", ".1f", 1e6),
    ("peak [MB]", "peak_bytes", ".1f", 1e6), ("kept [MB]", "kept_bytes", ".2f", 1e6),
    ("kept [x]", "kept", ".2f", 1), ("grows by", "exponent", ".2f", 1),
    ("peak [GB]", "device_peak_bytes", ".3f", 1e9),
    ("planned [GB]", "planned_device_bytes", ".3f", 1e9),
    ("on host [GB]", "planned_host_bytes", ".3f", 1e9), ("trace [s]", "trace_seconds", ".2f", 1),
    ("CPU [ms]", "cpu_seconds", ".1f", 1e-3), ("modules", "modules", ".0f", 1),
    ("plan [s]", "plan_seconds", ".1f", 1), ("compile [s]", "compile_seconds", ".1f", 1),
    ("max difference", "difference", ".1e", 1), ("same bits", "bit_identical", ".0f", 1),
    ("as remat", "bit_identical_to_remat", ".0f", 1),
)  # fmt: skip


def cells(rows: Sequence[dict]) -> list[list[str]]:
    """The header and the rows; columns of which no row has a value are left out."""
    shown = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]

    def cell(value: Any, form: str, unit: float) -> str:
        if isinstance(value, (list, tuple)):
            return "–".join(f"{v / unit:{form}}" for v in value)
        return "" if value is None else f"{value / unit:{form}}" if form else str(value)

    header = ["program", *(column[0] for column in shown)]
    return [header, *([r["name"], *(cell(r.get(k), f, u) for _, k, f, u in shown)] for r in rows)]


def show(result: Result) -> None:
    """Prints it as a table."""
    header, *rows = ([Text(cell) for cell in row] for row in cells(result.rows))  # no markup
    table = Table(title=Text(result.title))
    for i, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    whole = console.measure(table, options=console.options.update(width=1000)).maximum
    console = Console(width=max(console.width, whole))  # nothing is cut
    console.print(table)
    for note in result.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def as_markdown(result: Result) -> str:
    """A section: the table and the notes."""
    header, *rows = cells(result.rows)
    line = ["---", *["---:"] * (len(header) - 1)]
    table = [f"| {' | '.join(row)} |" for row in (header, line, *rows)]
    notes = [text for note in result.notes for text in ("", note)]
    return "\n".join([f"## {result.title}", "", *table, *notes, ""])


def publish(result: Result, folder: Path | None, command: str | None = None) -> None:
    """Prints a result and, where there is a folder, writes its JSON there."""
    show(result)
    if folder:
        config = result.config | ({"notes": list(result.notes)} if result.notes else {})
        path = folder / f"{result.name}.json"
        write_record(path, result.title, config, result.rows, command)


def write_record(
    path: Path, title: str, config: dict, rows: list[dict], command: str | None = None
) -> None:
    """Writes what was found as JSON, with versions, the machine and the command that made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = command or " ".join(
        [f"python -m effjax.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    )
    record = {"title": title, "command": command, "versions": versions(), "machine": machine()}
    path.write_text(json.dumps(record | config | {"rows": rows}, indent=1) + "\n")


def versions() -> dict[str, str]:
    device = jax.devices()[0]
    found = {name: _version(name) for name in PACKAGES}
    return {
        **{name: version for name, version in found.items() if version},
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def _version(package: str) -> str | None:
    if package == "effjax":  # from its source it has no metadata
        return effjax.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The CPU that milliseconds are those of."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": threads()}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system calls it."""
    if cpuinfo.exists():  # Linux; not every ARM core has its name there
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"
