"""Compiler processes: they leave the caller's process unchanged, and end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import plan
from effjax.memory.compiler import _compiler_shim, _source_info_shim, process
from tests.programs import needs_gpu_compiler

KEEPS_BACKEND = """
import jax, jax.numpy as jnp
from jax._src import xla_bridge
from effjax.memory import plan
x = jax.ShapeDtypeStruct((8,), jnp.float32)
assert plan(lambda x: x + 1, x, in_shardings=jax.P("data"), num_devices=2).num_devices == 2
assert set(xla_bridge._backends) <= {"cpu"}, xla_bridge._backends
assert jax.device_count() == 1
"""
WAITS = """
import os, sys, time
from pathlib import Path
from effjax.memory.compiler._compiler_shim import exit_when_closed
exit_when_closed(0, Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
PLANS = """
import jax, jax.numpy as jnp, effjax.memory
def many(x):
    for i in range(300):
        x = jnp.sin(x @ x) + i
    return x
effjax.memory.plan(many, jax.ShapeDtypeStruct((256, 256), jnp.float32))
"""


@needs_gpu_compiler
def test_keeps_the_backend():
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", KEEPS_BACKEND], check=True, env=env)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_files_in_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    for name in ("numpy", "jax", "sitecustomize", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # Entries of `python -c` and of `python -m`.
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *sys.path])
    plan(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert not (tmp_path / "imported").exists()


def test_exits_when_the_pipe_closes(tmp_path):
    folder = tmp_path / "folder"
    (folder / "dump").mkdir(parents=True)
    command = [sys.executable, "-c", WAITS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert child.poll() is None and folder.exists() and child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=20) == 1
    assert not folder.exists()


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_killed_process_leaves_nothing(tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PLANS], env=env) as parent:
        wait_until(lambda: list(tmp_path.glob("effjax-plan-*/dump/*")))
        processes = descendants(parent.pid)
        assert len(processes) == 3  # the server, the compiler, and what waits for it
        parent.kill()
        assert parent.wait(20) == -signal.SIGKILL
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    wait_until(lambda: not any(tmp_path.glob("effjax-plan-*")))


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [*children, *(process for child in children for process in descendants(child))]


@needs_gpu_compiler
def test_one_server_for_plans_of_an_environment(monkeypatch):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    plan(jnp.sin, x)
    first = process._servers["cuda"].process
    plan(jnp.cos, x)
    assert process._servers["cuda"].process is first and first.poll() is None
    monkeypatch.setenv("EFFJAX_TEST", "1")
    plan(jnp.sin, x)
    second = process._servers["cuda"].process
    assert second is not first
    wait_until(lambda: first.poll() == 0)
    second.kill()  # as the system does when memory is short
    second.wait()
    plan(jnp.sin, x)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_shim_names_its_jax_versions():
    for shim in (_compiler_shim, _source_info_shim):
        assert shim.__doc__ is not None and "Tested with jax 0.10.2" in shim.__doc__


COMPARES = """
import sys, jax, jax.numpy as jnp, effjax.memory
def many(x):
    for i in range(300):
        x = jnp.sin(x @ x) + i
    return x
x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
effjax.memory.compare({str(n): many for n in range(4)}, x, progress=True)
"""


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_ctrl_c_ends_the_compilers(tmp_path):
    # The signal goes to this process alone, as in a notebook.
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPARES]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as parent:
        wait_until(lambda: list(tmp_path.glob("effjax-plan-*/dump/*")))
        parent.send_signal(signal.SIGINT)
        _, err = parent.communicate(timeout=20)
    assert "KeyboardInterrupt" in err and "at the peak" not in err
    wait_until(lambda: not any(tmp_path.glob("effjax-plan-*")))
