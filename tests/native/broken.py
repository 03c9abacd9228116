"""Broken kernels, which the validation must catch."""

import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.validation import kernels
from effjax.validation.kernels import Kernel, make_attention


@contextlib.contextmanager
def quick_children() -> Iterator[None]:
    """Let children compile as this process does, for two devices."""
    jax.devices()  # the devices of this process stay as they are
    flags = re.sub(r"(device_count=)\d+", r"\g<1>2", os.environ["XLA_FLAGS"])
    quick = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(quick)))
        yield


def changed(change):
    """Return a candidate with the result `change(y, *args)` in place of y."""

    def candidate(apply):
        correct = functools.partial(apply, implementation="native")
        return lambda *args: change(correct(*args), *args)

    return candidate


def times_host(callback):
    """Return a candidate that multiplies the result by a number from the host."""

    def change(y, *_):
        factor = jax.pure_callback(callback, jax.ShapeDtypeStruct((), y.dtype))
        return y * jax.lax.stop_gradient(factor)

    return changed(change)


def vary(low):
    """Return a candidate that multiplies by a number which is not 1 in every third call."""
    counter = itertools.count(1)
    return times_host(lambda: np.float32(low if next(counter) % 3 == 0 else 1))


def sleep(seconds):
    def callback():
        time.sleep(seconds)
        return np.float32(1)

    return times_host(callback)


correct = changed(lambda y, *_: y)
wrong_value = changed(lambda y, *_: 1.001 * y)
wrong_gradient = changed(lambda y, *_: 0.5 * y + 0.5 * jax.lax.stop_gradient(y))
wrong_only_at_nan = changed(
    lambda y, value, locations, weights: jnp.where(jnp.isfinite(locations).all(), y, jnp.nan)
)
_small = functools.partial(make_attention, queries=3, heads=1, c=2, points=1)
_special = functools.partial(_small, special=True)


def raise_in(implementation, error):
    """Return a case whose kernel ("native") or reference ("xla") raises an error."""

    def make(dtype):
        call = _small(dtype)

        def apply(*args, **options):
            if options["implementation"] == implementation:
                raise error
            return call.apply(*args, **options)

        return call._replace(apply=apply)

    return make


EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")
INVALID = jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access was encountered")
# Errors of the kernel ("native") and of the reference, as calls, with what they say of the kernel:
# a part of the row, and whether the process must end.
ERRORS = {
    "no memory": (raise_in("native", EXHAUSTED), "untested", False),
    "no memory for XLA": (raise_in("xla", EXHAUSTED), "untested", False),
    kernels.LARGE: (raise_in("native", EXHAUSTED), "skipped", False),
    "wrong reference": (raise_in("xla", INVALID), "untested", True),
    "wrong kernel": (raise_in("native", INVALID), "failures", True),
}


def of_candidate(candidate, **more_cases):
    return Kernel("", {"plain": _small, **more_cases}, _small, candidate=candidate)


# Each kernel with the kind of the first failure, or None, and a part of the report.
_TABLE = {
    "correct": (of_candidate(correct, special=_special), None, ""),
    "abort": (of_candidate(times_host(os.abort)), "crash", "Aborted (signal 6)"),
    "wrong value": (of_candidate(wrong_value), "value", "the result is wrong"),
    "slow": (of_candidate(sleep(0.2)), None, ""),
    "wrong gradient": (of_candidate(wrong_gradient), "gradient", "the gradient of value is wrong"),
    "NaN": (of_candidate(wrong_only_at_nan, special=_special), "value", "special: value"),
    "race": (of_candidate(vary(0.5)), "repetition", "of 4 runs: the result is wrong"),
    "bits": (of_candidate(vary(1 + 2e-7)), "repetition", "bits of the result differ"),
    "hang": (of_candidate(sleep(1000)), "timeout", "no end in 20 s"),
}
KERNELS = {name: kernel._replace(name=name) for name, (kernel, _, _) in _TABLE.items()}
FINDINGS = {name: finding for name, (_, *finding) in _TABLE.items()}
# The kernels of effjax, timed with small arrays.
ACTUAL = {k.name: k._replace(timed=k.cases["plain"]) for k in kernels.KERNELS.values()}

# `child` is the command that it starts.
_SANITIZER = """#!{python}
import json, os, pathlib, subprocess, sys
start = next(i for i, argument in enumerate(sys.argv[1:], 1) if not argument.startswith("--"))
options, child = dict(a.split("=", 1) for a in sys.argv[1:start]), sys.argv[start:]
assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform" and options["--padding"]

def log(*lines):
    text = "".join(f"========= {{line}}" + chr(10) for line in ("COMPUTE-SANITIZER", *lines))
    pathlib.Path(options["--log-file"]).write_text(text)

def show(passed, *failures):
    row = dict(passed=passed, skipped={{}}, untested={{}}, failures=failures)
    print(json.dumps(dict(row=row)), flush=True)

{body}
"""


def write_sanitizer(folder: pathlib.Path, body: str) -> pathlib.Path:
    """Write a program in place of compute-sanitizer that ends with these statements."""
    folder.mkdir()
    program = folder / "compute-sanitizer"
    program.write_text(_SANITIZER.format(python=sys.executable, body=body))
    program.chmod(0o700)
    return program
