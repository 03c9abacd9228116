"""Time of several programs, and their planned memory.

Programs are timed in turn, so that a drift of the machine's speed cancels in their ratios. Memory
is planned for a GPU that need not be present.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from effjax.memory import MemoryPlan, PlanError, compare
from effjax.memory.compiler.packages import find_compiler
from effjax.memory.devices import find_target
from effjax.native import is_available

from .results import Result, UnavailableError, num_threads

TARGET = "h200"


def has_native_kernels() -> bool:
    """Return True if effjax's kernels are available for JAX's default backend."""
    # JAX calls the platform of an NVIDIA GPU "gpu"; the kernels call it "cuda".
    return is_available(jax.default_backend().replace("gpu", "cuda"))


def add_gradients(fn: Callable, backward: bool) -> Callable:
    """Return a function of the operands of `fn` and the cotangent of its result.

    It returns the result, and with `backward` also the gradients of all operands.
    """

    def step(*args: Any) -> Any:
        *operands, dy = args
        if not backward:
            return fn(*operands)
        y, vjp = jax.vjp(fn, *operands)
        return y, *vjp(dy)

    return step


def compile_program(fn: Callable, *args: Any) -> tuple[Callable, dict[str, Any]]:
    """Compile `fn`; return the executable, and its compile time and temporary bytes."""
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return compiled, {"temp_bytes": temp_bytes, "compile_seconds": round(seconds, 2)}


def time_steps(
    name: str,
    title: str,
    config: Mapping[str, Any],
    steps: Mapping[str, Callable],
    args: tuple,
    *,
    reference: str,
    rounds: int,
    peers: Mapping[str, Callable[[], Any]] | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """Compile all steps and time them in turn.

    Args:
        name: Stem of the result's files.
        title: Title of the table.
        config: Settings for the JSON.
        steps: JAX functions of `args`.
        args: Arguments of every step.
        reference: Name of the step or peer that ratios and differences refer to.
        rounds: Number of timed runs of each program.
        peers: Functions of other frameworks without arguments. They return NumPy arrays in the
            layout of the steps' results.
        notes: Sentences below the table. Empty ones are dropped.

    Returns:
        A result with a row per program: times and ratios of `time_in_turn`, XLA's temporary bytes,
        the compile time, and the largest difference from the reference's results, relative to
        their maximum.
    """
    peers = peers or {}
    runs: dict[str, Callable[[], Any]] = {}
    compiler: dict[str, dict] = {}
    for program, fn in track(steps.items(), "compiling", transient=True):
        compiled, compiler[program] = compile_program(fn, *args)
        runs[program] = lambda compiled=compiled: compiled(*args)
    runs |= peers
    results = {program: jax.block_until_ready(run()) for program, run in runs.items()}
    times = time_in_turn(runs, reference=reference, rounds=rounds)
    rows = []
    for program in runs:
        row = {"name": program, **times[program]}
        row |= compiler.get(program, {"temp_bytes": None, "compile_seconds": 0.0})
        row["difference"] = relative_difference(results[program], results[reference])
        rows.append(row)
    settings = {"threads": num_threads(), "rounds": rounds, "reference": reference}
    return Result(name, title, {**config, **settings}, rows, notes=list(filter(None, notes)))


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


def relative_difference(tree: Any, reference: Any) -> float:
    """Return the largest difference of any leaf, relative to the leaf's largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        a, b = (np.asarray(jnp.asarray(v, jnp.float32)) for v in (a, b))
        # np.maximum passes NaN on, where Python's max would drop it.
        worst = np.maximum(worst, np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return float(f"{worst:.1e}")


def need_compiler(target: str = TARGET) -> None:
    """Raise `UnavailableError` if no compiler for the target is installed."""
    try:
        find_compiler(find_target(target).platform)
    except PlanError as error:
        raise UnavailableError(str(error)) from error


def plan_steps(steps: Mapping[str, tuple], target: str = TARGET) -> dict[str, MemoryPlan]:
    """Plan steps given as `(fn, *args)` by name."""
    return dict(compare(steps, target=target, progress=True))


def plan_training(
    name: str, title: str, config: Mapping[str, Any], steps: Mapping[str, tuple], target: str
) -> Result:
    """Plan training steps; "ratio" is relative to the peak of the first one.

    The target is appended to the name, the title and the settings.
    """
    plans = plan_steps(steps, target)
    first = next(iter(plans.values())).peak_device_bytes
    rows = [
        {
            "name": step,
            "peak_bytes": plan.peak_device_bytes,
            "temp_bytes": plan.device.temporaries,
            "ratio": round(plan.peak_device_bytes / first, 4),
        }
        for step, plan in plans.items()
    ]
    return Result(
        f"{name}_{target}",
        f"{title}, planned for {target}",
        {**config, "target": target},
        rows,
    )
