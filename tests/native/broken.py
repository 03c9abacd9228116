"""Broken kernels, which the validation must catch."""

import ctypes
import functools
import itertools
import os
import pathlib
import shutil
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from effjax.validation.kernels import Kernel, make_attention

LIBRARY = "EFFJAX_TEST_BROKEN"  # environment variable with the path of broken.cc's library
FAULTS = (
    "none",
    "write after",
    "write before",
    "add after",
    "change operand",
    "read after",
    "skip",
)


def compile_library(folder: pathlib.Path, source: str) -> pathlib.Path:
    """Compile a file of this folder, or skip the test."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    path = folder / f"{source}.so"
    command = [compiler, "-std=c++17", "-O0", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, str(pathlib.Path(__file__).parent / source), "-o", path], check=True)
    return path


@functools.cache
def register_library() -> None:
    library = ctypes.CDLL(os.environ[LIBRARY])
    native.register("broken_copy", library.BrokenCopy, "cpu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def broken_copy(x, fault: str):
    register_library()
    call = jax.ffi.ffi_call("broken_copy", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, fault=np.int64(FAULTS.index(fault)))


broken_copy.defvjp(lambda x, fault: (broken_copy(x, fault), None), lambda fault, _, dy: (dy,))


def correct(apply):
    return functools.partial(apply, implementation="native")


def wrong_value(apply):
    return lambda *args: 1.001 * correct(apply)(*args)


def wrong_gradient(apply):
    def function(*args):
        y = correct(apply)(*args)
        return 0.5 * y + 0.5 * jax.lax.stop_gradient(y)

    return function


def wrong_only_at_nan(apply):
    def function(value, locations, weights):
        y = correct(apply)(value, locations, weights)
        return jnp.where(jnp.isfinite(locations).all(), y, jnp.nan)

    return function


def call_host(callback):
    """Return a candidate that multiplies the result by a number from the host."""

    def candidate(apply):
        def function(*args):
            y = correct(apply)(*args)
            factor = jax.pure_callback(callback, jax.ShapeDtypeStruct((), y.dtype))
            return y * jax.lax.stop_gradient(factor)

        return function

    return candidate


def vary(low):
    """Return a callback whose every third number is not 1."""
    counter = itertools.count(1)
    return lambda: np.float32(low if next(counter) % 3 == 0 else 1)


def sleep(seconds):
    def callback():
        time.sleep(seconds)
        return np.float32(1)

    return callback


def fail():
    raise RuntimeError("no kernel image is available")


def with_fault(fault):
    return lambda apply: lambda *args: broken_copy(correct(apply)(*args), fault)


CANDIDATES = {
    "correct": correct,
    "slow": call_host(sleep(0.2)),
    "wrong value": wrong_value,
    "wrong gradient": wrong_gradient,
    "NaN": wrong_only_at_nan,
    "race": call_host(vary(0.5)),
    "bits": call_host(vary(1 + 2e-7)),
    "error": call_host(fail),
    "abort": call_host(os.abort),
    "hang": call_host(sleep(1000)),
    **{f"copy: {fault}": with_fault(fault) for fault in FAULTS},
}
# What is found in each.
KINDS = {
    "correct": None,
    "slow": None,
    "wrong value": "value",
    "wrong gradient": "gradient",
    "NaN": "value",
    "race": "repetition",
    "bits": "repetition",
    "error": "error",
    "abort": "crash",
    "hang": "timeout",
    "copy: none": None,
    "copy: skip": "repetition",
} | {f"copy: {fault}": "guard" for fault in FAULTS[1:-1]}

_small = functools.partial(make_attention, queries=3, heads=1, c=2, points=1)
KERNELS = {
    name: Kernel(
        name,
        {"plain": _small, "NaN and infinity": functools.partial(_small, special=True)},
        _small,
        candidate=candidate,
    )
    for name, candidate in CANDIDATES.items()
}


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
# The first case of each is followed by "plain".
UNTESTED = {
    name: Kernel(name, {name: make, "plain": _small}, make)
    for name, make in {
        "kernel without memory": raise_in("native", EXHAUSTED),
        "reference without memory": raise_in("xla", EXHAUSTED),
        "wrong reference": raise_in("xla", INVALID),
        "wrong kernel": raise_in("native", INVALID),
        "large": lambda dtype: raise_in("native", EXHAUSTED)(dtype)._replace(tail=True),
    }.items()
}
