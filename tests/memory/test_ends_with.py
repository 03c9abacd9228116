"""The compiler's process ends with the one that plans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effjax.memory import _ends_with
from tests.programs import needs_gpu_compiler

CHILD = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("ends", sys.argv[1])
ends = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ends)
ends.end_with(0, sys.argv[2])
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import jax, jax.numpy as jnp, effjax.memory
def many(x):
    for i in range(300):
        x = jnp.sin(x @ x) + i
    return x
effjax.memory.plan(many, jax.ShapeDtypeStruct((256, 256), jnp.float32))
"""


def test_the_folder_goes_with_the_process(tmp_path):
    folder = tmp_path / "folder"
    (folder / "dump").mkdir(parents=True)
    command = [sys.executable, "-c", CHILD, _ends_with.__file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert child.poll() is None and folder.exists() and child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=20) == 1
    assert not folder.exists()


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_plan_that_is_killed(tmp_path, number):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=env) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        until(lambda: list(tmp_path.glob("effjax-plan-*/dump/*")))
        (child,) = [int(pid) for pid in children.read_text().split()]
        parent.send_signal(number)
        assert parent.wait(20) == -number
    until(lambda: not Path(f"/proc/{child}").exists())
    until(lambda: not any(tmp_path.glob("effjax-plan-*")))


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
