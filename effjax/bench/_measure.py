"""Times programs in turn, so that a ratio between them holds when the machine's speed drifts."""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import effjax


def compile_step(fn: Callable, *args: Any) -> dict:
    """Compiles fn and reads what XLA says of its memory."""
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp = None if memory is None else memory.temp_size_in_bytes
    return {"run": compiled, "compile_seconds": round(seconds, 2), "temp_bytes": temp}


def measure(
    steps: dict[str, Callable],
    args: tuple,
    *,
    reference: str,
    rounds: int,
    foreign: dict[str, Callable] | None = None,
    parts: dict[str, Callable] | None = None,
) -> list[dict]:
    """Compiles every step, and runs all of them in turn `rounds` times.

    `foreign` are functions of another framework, without arguments: they return NumPy arrays like
    the steps' results. `parts`, without arguments too, compute only some of it: their results are
    compared with nothing.

    Returns a row a step: median seconds, the median of the ratios to `reference` round by round,
    XLA's temporary bytes, compile time, and the largest relative difference from the results of
    `reference`.
    """
    programs = {
        name: compile_step(fn, *args)
        for name, fn in track(steps.items(), "compiling", transient=True)
    }
    for name, fn in {**(foreign or {}), **(parts or {})}.items():
        run = lambda *_, fn=fn: fn()  # noqa: E731
        programs[name] = {"run": run, "compile_seconds": 0.0, "temp_bytes": None}
    results = {name: jax.block_until_ready(p["run"](*args)) for name, p in programs.items()}
    runs = {name: lambda p=p: p["run"](*args) for name, p in programs.items()}
    times = time_in_turn(runs, reference=reference, rounds=rounds)
    rows = []
    for name, program in programs.items():
        found = None if name in (parts or {}) else difference(results[name], results[reference])
        rows.append(
            {
                "name": name,
                **times[name],
                "temp_bytes": program["temp_bytes"],
                "compile_seconds": program["compile_seconds"],
                "difference": None if found is None else float(f"{found:.1e}"),
            }
        )
    return rows


def time_in_turn(
    runs: dict[str, Callable[[], Any]], *, reference: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Runs all programs `rounds` times in turn, each twice, and times the second run.

    Returns for each the median of its seconds, and of the ratios to `reference` round by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(rounds), "running", transient=True):
        for name, run in runs.items():
            jax.block_until_ready(run())  # as in a loop: what ran before has taken the caches
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds[reference], strict=True)]
        found[name] = {
            "seconds": round(statistics.median(own), 5),
            "ratio": round(statistics.median(ratios), 3),
        }
    return found


def report(title: str, config: dict, rows: list[dict], json_path: Path | None) -> None:
    """Prints the rows and, if asked, writes them with versions and the command that made them.

    A row may say "kept": bytes kept for the backward pass, as a multiple of the input's.
    """
    table = Table(title=title)
    table.add_column("program", no_wrap=True)
    columns = "step [ms]", "x reference", "temp [MB]", "compile [s]", "max difference", "kept [x]"
    for column in columns if "kept" in rows[0] else columns[:-1]:
        table.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        temp = "" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 1e6:.0f}"
        compared = "" if row["difference"] is None else f"{row['difference']:.1e}"
        kept = [str(row["kept"])] if "kept" in row else []
        table.add_row(
            row["name"], f"{row['seconds'] * 1e3:.1f}", f"{row['ratio']:.2f}", temp,
            f"{row['compile_seconds']:.1f}", compared, *kept,
        )  # fmt: skip
    Console(width=max(Console().width, 120)).print(table)
    if json_path:
        write_record(json_path, title, config, rows)


def write_record(path: Path, title: str, config: dict, rows: list[dict]) -> None:
    """Writes what was found as JSON, with versions and the command that made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join([f"python -m effjax.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    record = {"title": title, "command": command, "versions": versions()} | config
    path.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


def versions() -> dict:
    device = jax.devices()[0]
    return {
        "effjax": effjax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def difference(got: Any, want: Any) -> float:
    """The largest difference of any leaf, relative to the largest value of that leaf; or NaN."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(jnp.asarray(v, jnp.float32)) for v in (a, b))
        worst = np.maximum(worst, np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return float(worst)
