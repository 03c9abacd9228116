"""Compiler processes: one server for all plans, and compilations that end with their caller."""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import effjax
from effjax.memory import PlanError, choose_options, compare, plan
from effjax.memory.compiler import process
from effjax.memory.compiler.packages import find_compiler
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

pytestmark = needs_gpu_compiler

X = jax.ShapeDtypeStruct((8,), jnp.float32)


def slow(x):
    """Sum windows of constants, which XLA evaluates itself: it compiles for minutes."""
    long = lax.iota(jnp.float32, 400_000)
    return x + lax.reduce_window(long, 0.0, lax.add, (40_000,), (1,), "SAME").sum()


STEPS = f"""
import jax, jax.numpy as jnp
from jax import lax
{inspect.getsource(slow)}
def steps(batch):
    return {{"slow": (slow, jax.ShapeDtypeStruct((batch,), jnp.float32))}}
"""


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def descendants(pid):
    files = Path(f"/proc/{pid}/task").glob("*/children")  # those of each thread
    children = [child for file in files for child in file.read_text().split()]
    return [*children, *(process for child in children for process in descendants(child))]


def is_compiling(folder):
    return any(folder.glob("effjax-plan-*/dump/*"))


@pytest.mark.exhaustive
def test_files_in_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    for name in ("numpy", "jax", "sitecustomize", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # Entries of `python -c` and of `python -m`.
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *sys.path])
    plan(jnp.sin, X)
    assert not (tmp_path / "imported").exists()


def test_packages_in_the_working_directory_come_last(monkeypatch):
    project = Path(effjax.__file__).parents[1]
    monkeypatch.chdir(project)  # a clone that is not installed
    monkeypatch.setattr("sys.path", [str(project), *sys.path])
    assert str(project) in process._search_path()[1:]


def test_one_server_for_plans_of_an_environment(monkeypatch):
    plan(jnp.sin, X)
    first = process._servers["cuda"].process
    plan(jnp.cos, X)
    assert process._servers["cuda"].process is first and first.poll() is None
    first.kill()  # as the system does when memory is short
    first.wait()
    plan(jnp.sin, X)
    second = process._servers["cuda"].process
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    monkeypatch.setenv("EFFJAX_TEST", "1")
    with pytest.raises(PlanError, match="exit code 1"):
        plan(jnp.sin, X)
    wait_until(lambda: second.poll() == 0)


def interrupted_plan(wait):
    """Press Ctrl-C while a program is compiled."""
    with interrupt_after(wait), pytest.raises(KeyboardInterrupt):
        plan(slow, X)


def interrupted_search(wait):
    with interrupt_after(wait), pytest.raises(KeyboardInterrupt):
        choose_options(lambda n: (slow, X), {"n": [2, 1]})


def failed_comparison(wait):
    """Raise an error in one program while another is compiled."""

    def fails(x):
        wait()
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        compare({"slow": slow, "fails": fails}, X)


@contextlib.contextmanager
def interrupt_after(wait):
    """Send SIGINT to this thread when `wait` returns."""
    caller = threading.get_ident()

    def interrupt():
        wait()
        signal.pthread_kill(caller, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


@vary("stop", [interrupted_plan, failed_comparison, interrupted_search])
def test_a_compilation_that_is_not_needed_ends(stop, tmp_path, monkeypatch):
    """The caller goes on, as a notebook does, and so does the server."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan(jnp.sin, X)
    server, compilers = process._servers["cuda"].process, []

    def wait():
        wait_until(lambda: is_compiling(tmp_path))
        compilers.extend(descendants(server.pid))

    stop(wait)
    assert len(compilers) == 2  # the compiler, and what waits for it
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in compilers))
    wait_until(lambda: not list(tmp_path.iterdir()))
    assert server.poll() is None and plan(jnp.sin, X).fits
    assert process._servers["cuda"].process is server


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_the_compilers_of_a_command_end_with_it(number, code, tmp_path):
    """On Ctrl-C, and at a time limit. The signal reaches the process of the command alone."""
    pytest.importorskip("typer")
    (tmp_path / "own_steps.py").write_text(STEPS)
    (tmp_path / "tmp").mkdir()
    command = [
        sys.executable, "-c", "from effjax.cli import main; raise SystemExit(main())",
        "memory", "step", "own_steps:steps", "--batch-size", "8",
    ]  # fmt: skip
    env = os.environ | {
        "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "EFFJAX_COMPILERS": str(find_compiler("cuda").parent),
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    ) as parent:
        wait_until(lambda: is_compiling(tmp_path / "tmp"))
        processes = descendants(parent.pid)
        assert len(processes) == 3  # the server, the compiler, and what waits for it
        parent.send_signal(number)
        _, err = parent.communicate(timeout=20)
    assert parent.returncode == code and "Traceback" not in err
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    wait_until(lambda: not any((tmp_path / "tmp").glob("effjax-plan-*")))
