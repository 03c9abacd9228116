"""What `import effjax` adds to `import jax`: each import timed in a fresh interpreter, in turn."""

import json as json_module
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from ._measure import quartiles
from ._result import Bars, Result, Size, publish

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


def bench(rounds: int) -> Result:
    """A row an import: medians of all rounds, and quartiles of the seconds."""
    found: dict[str, list[dict[str, float]]] = {name: [import_once(name)] for name in IMPORTS}
    for name in IMPORTS:
        found[name].clear()  # the first time reads the disk
    for _ in track(range(rounds), "importing", transient=True):
        for name in IMPORTS:
            found[name].append(import_once(name))
    rows = []
    for name, runs in found.items():
        seconds, cpu = ([run[key] for run in runs] for key in ("seconds", "cpu_seconds"))
        rows.append(
            {
                "name": "import jax" if name == "jax" else f"import {name}, after jax",
                "seconds": round(statistics.median(seconds), 4),
                "seconds_quartiles": quartiles(seconds, 4),
                "cpu_seconds": round(statistics.median(cpu), 4),
                "modules": int(runs[0]["modules"]),
            }
        )
    return Result(
        "import_time",
        "import time",
        {"rounds": rounds},
        rows,
        Bars("seconds", "seconds of an import (lines: quartiles of the rounds)"),
        ["Each import in an interpreter of its own, whose files were read and compiled before."],
    )


def results(size: Size) -> Iterator[Result]:
    yield bench(rounds={"small": 5, "published": 15}[size])


def main(
    rounds: Annotated[int, typer.Option(help="Interpreters for each import, in turn.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Times `import effjax` and its rooms, beyond `import jax`."""
    publish(bench(rounds), json)


if __name__ == "__main__":
    typer.run(main)
