"""Test configuration: devices, compiler settings, and the plain and exhaustive tiers."""

import gc
import mmap
import os
import pathlib
import signal
import sys
import time

# These variables must be set before JAX is imported.
# Use the CPU by default; `JAX_PLATFORMS=cuda,cpu pytest` runs the tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # pytest's processes share a GPU
# Eight simulated CPU devices, also in subprocesses of the tests.
if "xla_force_host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
# Some tests send SIGINT, which shells make background jobs ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest
from jax.sharding import AxisType, Mesh

_START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also run every combination of options, plans of deep networks and slow commands",
    )
    parser.addoption(
        "--minutes",
        type=float,
        metavar="N",
        help="skip the tests that have not begun after N minutes",
    )
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile all tests with XLA's default optimizations",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tracing allocates millions of containers that live until the caches are cleared after a file.
    # Looking for cycles among them took a tenth of the processor time.
    gc.set_threshold(200_000, 20, 50)
    # Compilation dominates the run time. Tests that need XLA's optimizations request the fixture
    # `optimized`.
    if not config.getoption("--optimized"):
        jax.config.update("jax_disable_most_optimizations", True)
        if jax.__version_info__ < (0, 11):
            # The older emitters compile in half the time. JAX 0.11 removed the flag.
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    examples = 25 if _is_exhaustive(config) else 8
    hypothesis.settings.register_profile(
        "tier", max_examples=examples, deadline=None, derandomize=True
    )
    hypothesis.settings.load_profile("tier")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if the time of --minutes is up."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _START > 60 * minutes:
        pytest.skip("the time of --minutes is up")


def _is_exhaustive(config: pytest.Config) -> bool:
    """Return True with --exhaustive, or if the command line names single tests."""
    return config.getoption("--exhaustive") or any("::" in arg for arg in config.args)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `exhaustive` unless --exhaustive is given."""
    if _is_exhaustive(config):
        return
    deselected = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()
    if len(devices) < 8:
        devices = jax.devices("cpu")  # with one GPU, multi-device tests stay on the CPU
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices[:8])


@pytest.fixture
def x64():
    """Enable float64, for oracles."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized():
    """Compile with XLA's default optimizations, for bitwise and memory assertions."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def mesh8() -> Mesh:
    """Mesh of eight devices on the axis `data`."""
    return _mesh((8,), ("data",))


@pytest.fixture(scope="session")
def mesh4x2() -> Mesh:
    """Mesh of four by two devices on the axes `data` and `model`."""
    return _mesh((4, 2), ("data", "model"))


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """Install the planner's compiler for GPUs, or skip."""
    from tests.programs import why_not

    if reason := why_not("cuda"):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def tpu_compiler() -> None:
    """Install the planner's compiler for TPUs, or skip."""
    from tests.programs import why_not

    if reason := why_not("tpu"):
        pytest.skip(reason)


def _resident_bytes() -> int:
    """Return the resident memory of this process, or a large number where it is not known."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return sys.maxsize


@pytest.fixture(scope="module", autouse=True)
def _free_compiled_programs():
    """Free compiled programs after a file if they take much memory.

    Files share the programs of single operations, which JAX would compile again in each of them.
    """
    yield
    if _resident_bytes() > 1.5e9:
        jax.clear_caches()
        gc.collect()
