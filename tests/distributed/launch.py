"""Processes on this machine, each with its own CPU devices, on JAX's distributed runtime."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT = 540  # seconds


def in_processes(count: int, devices: int, cases: list[str]) -> dict[str, np.ndarray]:
    """Return the results of `worker.py` in `count` processes of `devices` devices each."""
    with tempfile.TemporaryDirectory() as folder:
        path, port = pathlib.Path(folder), free_port()
        command = [sys.executable, "-W", "error", "-m", "tests.distributed.worker"]
        processes = []
        for i in range(count):
            with open(path / f"{i}.log", "w") as log:
                own = [port, count, i, devices, path / "found.npz", *cases]
                processes.append(
                    subprocess.Popen(
                        [*command, *map(str, own)], env=environment(), cwd=ROOT, stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        wait_for(processes)
        logs = [(path / f"{i}.log").read_text()[-4000:] for i in range(count)]
        codes = [process.returncode for process in processes]
        assert not any(codes), f"exit codes {codes}\n" + "\n----\n".join(logs)
        with np.load(path / "found.npz") as found:
            return dict(found)


def wait_for(processes: list[subprocess.Popen]) -> None:
    """Wait until all have ended; one that fails or takes too long ends all."""
    end = time.monotonic() + TIMEOUT
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.returncode for process in processes):
                time.sleep(1)  # the others may have something to say
                return
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def environment() -> dict[str, str]:
    """Return the environment of these tests without a number of devices."""
    import jax

    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    quick = jax.config.read("jax_disable_most_optimizations")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
    }
