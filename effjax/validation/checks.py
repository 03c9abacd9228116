"""Comparison of a kernel with plain XLA in float64, on this process's default device."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import guards
from .kernels import Call, Kernel

# Largest difference, relative to each value and to the largest one.
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}


class Failure(NamedTuple):
    """A reason why a kernel must not be used.

    Attributes:
        kind: "value", "gradient", "repetition" (runs differ), "guard" (a write outside of the
            results), "error", "crash" or "timeout".
        text: details.
    """

    kind: str
    text: str


def is_out_of_memory(error: Exception) -> bool:
    """Return True for errors that say nothing about a kernel: the device has too little memory."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, (guards.OutOfMemoryError, MemoryError))


def check_call(
    kernel: Kernel, call: Call, want: list[np.ndarray], dtype: str, repeats: int
) -> list[Failure]:
    """Return the failures of a kernel in one call, in several runs and between guard bands.

    `want` is the result of `run_reference`. Call this within `guards.guarded_calls`.
    """
    names, tolerance = call.names, TOLERANCES[dtype]
    run = make_program(kernel.candidate(call.apply), len(names))
    dy = _cotangent(call)
    violations: list[str] = []
    if not call.tail:  # the copies of large arrays would not fit
        # First, because a write outside of the results may crash the process later.
        wrong: dict[str, str] = {}
        for pattern in (guards.NAN, guards.FINITE):
            with guards.guards(pattern) as found:
                wrong |= compare(names, _to_host(run(call.args, dy), call), want, tolerance)
            violations += found
        if violations:
            return [Failure("guard", text) for text in dict.fromkeys(violations)]
        violations += [f"{text}, between guard bands only" for text in wrong.values()]
    runs = [_to_host(run(call.args, dy), call) for _ in range(1 if call.tail else repeats)]
    failures = compare_runs(names, runs, want, tolerance, kernel.is_deterministic)
    # Only then the kernel reads other memory, or does not write all of its results.
    return failures or [Failure("guard", text) for text in violations]


def compare_runs(
    names: tuple[str, ...],
    runs: list[list[np.ndarray]],
    want: list[np.ndarray],
    tolerance: float,
    is_deterministic: bool,
) -> list[Failure]:
    """Return the failures of all runs: the result and the gradients of `names` in each run."""
    errors = [compare(names, got, want, tolerance) for got in runs]
    failures = []
    for i, label in enumerate(_labels(names)):
        wrong = [e[label] for e in errors if label in e]
        if wrong and len(wrong) == len(runs):
            failures.append(Failure("gradient" if i else "value", wrong[0]))
        elif wrong:
            text = f"{len(wrong)} of {len(runs)} runs: {wrong[0]}"
            failures.append(Failure("repetition", text))
        elif i == 0 or is_deterministic:
            differing = sum(got[i].tobytes() != runs[0][i].tobytes() for got in runs)
            if differing:
                text = f"the bits of {label} differ from the first of {len(runs)} runs in"
                failures.append(Failure("repetition", f"{text} {differing}"))
    return failures


def compare(
    names: tuple[str, ...], got: list[np.ndarray], want: list[np.ndarray], tolerance: float
) -> dict[str, str]:
    """Return descriptions of the wrong arrays by label."""
    wrong = {}
    for label, a, b in zip(_labels(names), got, want, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        if a.shape != b.shape:
            wrong[label] = f"{label} has shape {a.shape} instead of {b.shape}"
            continue
        difference = np.abs(a - b)
        scale = np.abs(b).max(initial=0)
        bad = ~(difference <= tolerance * (scale + np.abs(b)))  # also NaN
        if bad.any():
            worst = np.max(difference)  # NaN if any is
            wrong[label] = (
                f"{label} is wrong in {bad.sum()} of {bad.size} elements, by up to {worst:.2g} at "
                f"a largest value of {scale:.2g}"
            )
    return wrong


def make_program(function: Callable, num_gradients: int) -> Callable:
    """Return the compiled function of (args, dy): the result and the gradients."""

    def run(args, dy):
        rest = args[num_gradients:]
        y, backward = jax.vjp(lambda *a: function(*a, *rest), *args[:num_gradients])
        return [y, *backward(dy.astype(y.dtype))]

    return jax.jit(run)


def median_seconds(run: Callable, *args: Any, repeats: int = 15, limit: float = 3.0) -> float:
    """Return the median time of a call after two others; fewer calls if they exceed the limit."""
    seconds: list[float] = []
    while len(seconds) < repeats + 2 and (len(seconds) < 5 or sum(seconds[2:]) < limit):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def run_and_time(function: Callable, call: Call) -> tuple[list[np.ndarray], float]:
    """Return the result and the gradients of a call, and the median seconds that they take."""
    run, dy = make_program(function, len(call.names)), _cotangent(call)
    return _to_host(run(call.args, dy), call), median_seconds(run, call.args, dy)


def _labels(names: tuple[str, ...]) -> list[str]:
    return ["the result", *(f"the gradient of {name}" for name in names)]


def _cotangent(call: Call) -> jax.Array:
    y = jax.eval_shape(functools.partial(call.apply, implementation="xla"), *call.args)
    values = np.random.default_rng(1).normal(size=y.shape[1:] if call.tail else y.shape)
    dy = jnp.asarray(values, y.dtype)
    return jnp.broadcast_to(dy, y.shape)


def run_reference(call: Call) -> list[np.ndarray]:
    """Return the result and the gradients of plain XLA in float64."""
    args, dy = call.args, _cotangent(call)
    if call.tail:
        args = tuple(a if i in call.shared else a[-1:] for i, a in enumerate(args))
        dy = dy[-1:]
    args = tuple(a.astype(jnp.float64) for a in args)
    reference = functools.partial(call.apply, implementation="xla")
    results = make_program(reference, len(call.names))(args, dy.astype(jnp.float64))
    return [np.asarray(a) for a in results]


def _to_host(results: list[jax.Array], call: Call) -> list[np.ndarray]:
    """Return the result and the gradients of a call, or their last images."""
    if call.tail:
        y, *gradients = results
        last = (a if i in call.shared else a[-1:] for i, a in enumerate(gradients))
        results = [y[-1:], *last]
    return [np.asarray(a) for a in results]
