"""Runs before JAX is imported: where the tests run, and how strict JAX is with them."""

import os
import signal

# The CPU unless the user names another: `JAX_PLATFORMS=cuda,cpu pytest` runs the tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight simulated devices, for commands that tests start as well.
if "xla_force_host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
# Some tests send Ctrl-C, which a shell makes its background jobs ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
from jax.sharding import AxisType, Mesh


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()
    if len(devices) < 8:
        devices = jax.devices("cpu")  # one GPU: the tests over several devices stay on the CPU
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices[:8])


@pytest.fixture(scope="session")
def mesh8() -> Mesh:
    """Eight devices on one axis, `data`."""
    return _mesh((8,), ("data",))


@pytest.fixture(scope="session")
def mesh4x2() -> Mesh:
    """Four by two devices, on the axes `data` and `model`."""
    return _mesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module", autouse=True)
def _free_compiled_programs():
    """Compiled programs are of no use to the next file, and all together they are gigabytes."""
    yield
    jax.clear_caches()
