"""What `import effjax` adds to `import jax`: each import timed in a fresh interpreter, in turn."""

import json as json_module
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ._measure import write_record

IMPORTS = ("jax", "effjax", "effjax.nnx", "effjax.linen", "effjax.models", "effjax.memory")
# One interpreter: jax first, then the other one, both in files that were read and compiled before.
TIMED = """
import importlib, json, sys, time

def timed(name):
    loaded, wall, cpu = len(sys.modules), time.perf_counter(), time.process_time()
    importlib.import_module(name)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": seconds[0], "cpu_seconds": seconds[1], "modules": len(sys.modules) - loaded}

found = {name: timed(name) for name in sys.argv[1:]}
print(json.dumps(found[sys.argv[-1]]))
"""


def import_once(name: str) -> dict[str, float]:
    """Seconds, CPU seconds and modules of one import, in an interpreter that has imported jax."""
    first = [] if name == "jax" else ["jax"]
    command = [sys.executable, "-c", TIMED, *first, name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json_module.loads(done.stdout)


def measure_imports(rounds: int) -> list[dict]:
    """A row an import: medians of all rounds, and the fastest."""
    found: dict[str, list[dict[str, float]]] = {name: [import_once(name)] for name in IMPORTS}
    for name in IMPORTS:
        found[name].clear()  # the first time reads the disk
    for _ in track(range(rounds), "importing", transient=True):
        for name in IMPORTS:
            found[name].append(import_once(name))
    return [
        {
            "name": "import jax" if name == "jax" else f"import {name}, after jax",
            "seconds": round(statistics.median(run["seconds"] for run in runs), 4),
            "fastest": round(min(run["seconds"] for run in runs), 4),
            "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 4),
            "modules": int(runs[0]["modules"]),
        }
        for name, runs in found.items()
    ]


def main(
    rounds: Annotated[int, typer.Option(help="Interpreters for each import, in turn.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Times `import effjax` and its rooms, beyond `import jax`."""
    rows, title = measure_imports(rounds), "import time"
    table = Table("", "median [s]", "fastest [s]", "CPU [s]", "modules", title=title)
    for row in rows:
        table.add_row(
            row["name"], f"{row['seconds']:.3f}", f"{row['fastest']:.3f}",
            f"{row['cpu_seconds']:.3f}", str(row["modules"]),
        )  # fmt: skip
    Console().print(table)
    if json:
        write_record(json / "import_time.json", title, {"rounds": rounds}, rows)


if __name__ == "__main__":
    typer.run(main)
