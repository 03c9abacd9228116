"""Timing of several programs in turn, so that a drift of the machine's speed cancels in ratios."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track


def num_threads() -> int:
    """Return the number of cores this process may use, which is XLA's number of threads."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_program(fn: Callable, *args: Any) -> tuple[Callable, dict[str, Any]]:
    """Compile `fn`; return the executable, and its compile time and temporary bytes."""
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return compiled, {"temp_bytes": temp_bytes, "compile_seconds": round(seconds, 2)}


def measure(
    steps: Mapping[str, Callable],
    args: tuple,
    *,
    reference: str,
    rounds: int,
    peers: Mapping[str, Callable[[], Any]] | None = None,
    fragments: Mapping[str, Callable[[], Any]] | None = None,
) -> list[dict]:
    """Compile all steps and time them in turn.

    Args:
        steps: JAX functions of `args`.
        args: Arguments of every step.
        reference: Name of the step or peer that ratios and differences refer to.
        rounds: Number of timed runs of each program.
        peers: Functions of other frameworks without arguments. They return NumPy arrays in the
            layout of the steps' results.
        fragments: Functions without arguments that compute only a part of a step. Their results
            are not compared.

    Returns:
        A row per program: times and ratios of `time_in_turn`, XLA's temporary bytes, the compile
        time, and the largest difference from the reference's results, relative to their maximum.
    """
    peers, fragments = peers or {}, fragments or {}
    runs: dict[str, Callable[[], Any]] = {}
    compiler: dict[str, dict] = {}
    for name, fn in track(steps.items(), "compiling", transient=True):
        compiled, compiler[name] = compile_program(fn, *args)
        runs[name] = lambda compiled=compiled: compiled(*args)
    runs |= {**peers, **fragments}
    results = {name: jax.block_until_ready(run()) for name, run in runs.items()}
    times = time_in_turn(runs, reference=reference, rounds=rounds)
    rows = []
    for name in runs:
        row = {"name": name, **times[name]}
        row |= compiler.get(name, {"temp_bytes": None, "compile_seconds": 0.0})
        row["difference"] = None
        if name not in fragments:
            row["difference"] = relative_difference(results[name], results[reference])
        rows.append(row)
    return rows


def time_in_turn(
    runs: Mapping[str, Callable[[], Any]], *, reference: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Run all programs `rounds` times in turn; return medians and quartiles by name.

    "seconds" is the median time of a program, "ratio" the median of its ratios to the reference,
    taken round by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(rounds), "running", transient=True):
        for name, run in runs.items():
            # The first run fills the caches, which the program before it has used.
            jax.block_until_ready(run())
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    times = {}
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds[reference], strict=True)]
        times[name] = {
            "seconds": round(statistics.median(values), 5),
            "seconds_quartiles": quartiles(values, 5),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": quartiles(ratios, 3),
        }
    return times


def quartiles(values: Sequence[float], digits: int) -> list[float]:
    """Return the first and the third quartile."""
    first, third = np.quantile(np.asarray(values), (0.25, 0.75)).tolist()
    return [round(first, digits), round(third, digits)]


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return p of ``y = a · x^p``, by least squares in logarithms."""
    slope, _ = np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)
    return round(float(slope), 2)


def relative_difference(tree: Any, reference: Any) -> float:
    """Return the largest difference of any leaf, relative to the leaf's largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        a, b = (np.asarray(jnp.asarray(v, jnp.float32)) for v in (a, b))
        # np.maximum passes NaN on, where Python's max would drop it.
        worst = np.maximum(worst, np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return float(f"{worst:.1e}")
