"""Time that effjax's modules add to `import jax`, in fresh interpreters.

`import effjax` loads the operators at their first use; `import effjax.ops` loads all of them.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from rich.progress import track

from .measure import quartiles
from .results import Bars, Result, Size

IMPORTS = (
    "jax", "effjax", "effjax.ops", "effjax.nnx", "effjax.linen", "effjax.models", "effjax.memory",
)  # fmt: skip
# Imports the given modules in order and prints what the last one took.
PROGRAM = """
import importlib, json, sys, time

for name in sys.argv[1:]:
    loaded, wall, cpu = len(sys.modules), time.perf_counter(), time.process_time()
    importlib.import_module(name)
    row = {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "modules": len(sys.modules) - loaded,
    }
print(json.dumps(row))
"""


def time_import(name: str) -> dict[str, float]:
    """Import a module in an interpreter that has imported jax before."""
    first = [] if name == "jax" else ["jax"]
    command = [sys.executable, "-c", PROGRAM, *first, name]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(process.stdout)


def measure_imports(rounds: int, names: Sequence[str] = IMPORTS) -> Result:
    for name in names:
        time_import(name)  # the first import reads the disk
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in track(range(rounds), "importing", transient=True):
        for name in names:
            runs[name].append(time_import(name))
    rows = []
    for name, values in runs.items():
        seconds = [value["seconds"] for value in values]
        rows.append(
            {
                "name": "import jax" if name == "jax" else f"import {name}, after jax",
                "seconds": round(statistics.median(seconds), 4),
                "seconds_quartiles": quartiles(seconds, 4),
                "cpu_seconds": round(statistics.median(v["cpu_seconds"] for v in values), 4),
                "modules": int(values[0]["modules"]),
            }
        )
    return Result(
        "import_time",
        "import time",
        {"rounds": rounds},
        rows,
        Bars("seconds", "seconds of an import (lines: quartiles of the rounds)"),
        ["Each import runs in a new interpreter, whose files were read and compiled before."],
    )


def run(size: Size) -> Iterator[Result]:
    yield measure_imports(rounds={"small": 5, "published": 15}[size])
