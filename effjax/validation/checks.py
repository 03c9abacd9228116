"""Comparison of a kernel with plain XLA in float64, on this process's default device."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .kernels import Call, Kernel

# Largest difference, relative to each value and to the largest one.
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}


Arrays = list[np.ndarray]  # the result and the gradients of a call, on the host


class Failure(NamedTuple):
    """A reason why a kernel must not be used."""

    # "value", "gradient", "repetition" (runs differ), "memory" (an access outside of an array),
    # "error", "crash" or "timeout"
    kind: str
    text: str


def new_row(kernel: str, dtype: str) -> dict[str, Any]:
    """Return the row of a report about a kernel and dtype of which nothing has run."""
    return {
        "kernel": kernel, "dtype": dtype, "passed": 0, "skipped": {}, "untested": {},
        "failures": [], "seconds": {}, "running": {"case": "start", "runs_kernel": False},
    }  # fmt: skip


def is_out_of_memory(error: Exception) -> bool:
    """Return True for errors that say nothing about a kernel: the device has too little memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def check_call(kernel: Kernel, call: Call, want: Arrays, dtype: str, repeats: int) -> list[Failure]:
    """Return the failures of a kernel in several runs of a call. `want` is the reference."""
    run, dy = make_program(kernel.candidate(call.apply), len(call.names)), _cotangent(call)
    runs = [_to_host(run(call.args, dy), call) for _ in range(1 if call.tail else repeats)]
    return compare_runs(call.names, runs, want, TOLERANCES[dtype], kernel.is_deterministic)


def compare_runs(
    names: tuple[str, ...], runs: list[Arrays], want: Arrays, tolerance: float, in_order: bool
) -> list[Failure]:
    """Return the failures of all runs: the result and the gradients of `names` in each run.

    Gradients that are summed `in_order` must have the same bits in all runs, as results do.
    """
    errors = [compare(names, got, want, tolerance) for got in runs]
    failures = []
    for i, label in enumerate(_labels(names)):
        wrong = [e[label] for e in errors if label in e]
        if wrong and len(wrong) == len(runs):
            failures.append(Failure("gradient" if i else "value", wrong[0]))
        elif wrong:
            text = f"{len(wrong)} of {len(runs)} runs: {wrong[0]}"
            failures.append(Failure("repetition", text))
        elif i == 0 or in_order:
            differing = sum(got[i].tobytes() != runs[0][i].tobytes() for got in runs)
            if differing:
                text = f"the bits of {label} differ from the first of {len(runs)} runs in"
                failures.append(Failure("repetition", f"{text} {differing}"))
    return failures


def compare(names: tuple[str, ...], got: Arrays, want: Arrays, tolerance: float) -> dict[str, str]:
    """Return descriptions of the wrong arrays by label."""
    wrong = {}
    for label, a, b in zip(_labels(names), got, want, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
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


def time_reference(call: Call) -> tuple[Arrays, float]:
    """Return the result and the gradients of plain XLA in the dtype of the call, and seconds."""
    return _run_and_time(functools.partial(call.apply, implementation="xla"), call)


def check_time(
    kernel: Kernel, call: Call, reference: tuple[Arrays, float], dtype: str
) -> tuple[list[Failure], dict[str, float]]:
    """Return failures, and the seconds of the kernel and of XLA for result and gradients."""
    want, xla = reference
    got, native = _run_and_time(kernel.candidate(call.apply), call)
    # The reference, in the same dtype, has errors of its own.
    wrong = compare(call.names, got, want, 4 * TOLERANCES[dtype])
    failures = [Failure("value", text) for text in wrong.values()]
    return failures, {"native": native, "xla": xla}


def _run_and_time(function: Callable, call: Call) -> tuple[Arrays, float]:
    run, dy = make_program(function, len(call.names)), _cotangent(call)
    return _to_host(run(call.args, dy), call), median_seconds(run, call.args, dy)


def _labels(names: tuple[str, ...]) -> list[str]:
    return ["the result", *(f"the gradient of {name}" for name in names)]


def _cotangent(call: Call) -> jax.Array:
    y = jax.eval_shape(functools.partial(call.apply, implementation="xla"), *call.args)
    values = np.random.default_rng(1).normal(size=y.shape[1:] if call.tail else y.shape)
    dy = jnp.asarray(values, y.dtype)
    return jnp.broadcast_to(dy, y.shape)


def run_reference(call: Call) -> Arrays:
    """Return the result and the gradients of plain XLA in float64."""
    args, dy = _last_images(call, call.args), _cotangent(call)[-1 if call.tail else 0 :]
    args = tuple(a.astype(jnp.float64) for a in args)
    reference = functools.partial(call.apply, implementation="xla")
    results = make_program(reference, len(call.names))(args, dy.astype(jnp.float64))
    return [np.asarray(a) for a in results]


def _to_host(results: list[jax.Array], call: Call) -> Arrays:
    """Return the result and the gradients of a call, or their last images."""
    y, *gradients = results
    return [np.asarray(a) for a in (y[-1 if call.tail else 0 :], *_last_images(call, gradients))]


def _last_images(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the arguments or gradients of a call, or their last images if only these count."""
    return [a[-1:] if call.tail and i not in call.shared else a for i, a in enumerate(arrays)]
