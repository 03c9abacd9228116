"""Times programs in turn, so that a ratio between them holds when the machine's speed drifts."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track


def threads() -> int:
    """The cores that this process may use, and so XLA's threads: `taskset` gives it fewer."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

    Returns a row a step: what `time_in_turn` says of it, XLA's temporary bytes, compile time, and
    the largest relative difference from the results of `reference`.
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
) -> dict[str, dict[str, Any]]:
    """Runs all programs `rounds` times in turn, each twice, and times the second run.

    Returns for each the median of its seconds, and of the ratios to `reference` round by round;
    with both their quartiles, between which half of the rounds lie.
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
            "seconds_quartiles": quartiles(own, 5),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": quartiles(ratios, 3),
        }
    return found


def quartiles(values: Sequence[float], digits: int) -> list[float]:
    """The first and the third; of one value, itself twice."""
    first, third = np.quantile(np.asarray(values), (0.25, 0.75)).tolist()
    return [round(first, digits), round(third, digits)]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of ``y = a · x^p``, by least squares in logarithms."""
    slope, _ = np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)
    return round(float(slope), 2)


def difference(got: Any, want: Any) -> float:
    """The largest difference of any leaf, relative to the largest value of that leaf; or NaN."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(jnp.asarray(v, jnp.float32)) for v in (a, b))
        worst = np.maximum(worst, np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return float(worst)
