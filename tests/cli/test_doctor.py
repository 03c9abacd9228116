"""`effjax doctor`: versions, devices, and how to install what is missing."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys

import pytest

from effjax import cli, native
from effjax.cli import doctor
from effjax.cli.doctor import HOST_MEMORY_VARIABLE


def test_report_of_this_machine():
    report = doctor.examine()
    assert report["packages"]["jax"] and report["packages"]["flax"]
    assert report["devices"][0]["default_memory"] in report["devices"][0]["memories"]
    assert report["backend_error"] is None
    text = "\n".join(doctor.format_lines(report))
    assert "memory:" in text and "native kernels: cpu " in text and "extras:" in text


@pytest.mark.parametrize(
    ("gpus", "state"),
    [
        (native.Gpus(13000, 13010, 2, 90), "loaded (built with CUDA 13.0; 2 GPUs)"),
        (native.Gpus(12090, 0, 0, 0), "loaded (built with CUDA 12.9; no GPU: for plans only)"),
        (None, "loaded"),
    ],
)
def test_kernels_with_and_without_a_gpu(monkeypatch, gpus, state):
    monkeypatch.setattr(native, "status", lambda: {"cpu": "loaded", "cuda": "loaded"})
    monkeypatch.setattr(native, "gpus", lambda: gpus)
    assert doctor.describe_kernels() == {"cpu": "loaded", "cuda": state}


def test_missing_packages_of_an_extra(monkeypatch):
    """The planner needs the plugin of JAX without the libraries of CUDA."""
    required = {
        "effjax": [
            "jax>=0.10.2",
            'jax[cuda13]; extra == "cuda13"',
            "jax[cuda13-local] ; sys_platform == 'linux' and extra == 'plan'",
            'effjax[plan,train]; extra == "test"',
            'no-such-package>=1; extra == "train"',
        ],
        "jax": [
            'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
            'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13-local"',
        ],
        "jax-cuda13-plugin": ['nvidia-cublas>=13; extra == "with-cuda"'],
    }
    monkeypatch.setattr(doctor, "_version", lambda name: "1" if name in required else None)
    monkeypatch.setattr(importlib.metadata, "requires", required.get)
    for extra, missing in {
        "cuda13": ["nvidia-cublas"], "plan": [], "test": ["no-such-package"],
    }.items():  # fmt: skip
        assert doctor.missing_packages("effjax", extra) == missing


@pytest.mark.parametrize(
    ("gpu", "plugins", "missing", "platforms", "advice"),
    [
        (False, ["jax-cuda13-plugin"], ["nvidia-cublas"], "", ["is for the planner only"]),
        (False, ["jax-cuda13-plugin"], ["nvidia-cublas"], "cpu", []),
        (True, [], [], "", ["without JAX's plugin: pip"]),
        (True, ["jax-cuda13-plugin"], ["nvidia-cublas"], "", ["without its libraries: pip"]),
        (True, ["jax-cuda12-plugin"], [], "cuda,cpu", ["check NVIDIA's driver"]),
    ],
)
def test_advice_on_gpus(monkeypatch, gpu, plugins, missing, platforms, advice):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: gpu)
    lines = doctor._advise_on_gpus(plugins, {"cuda13": missing, "cuda12": missing})
    assert len(lines) == len(advice) and all(a in f for a, f in zip(advice, lines, strict=True))


def test_limit_of_host_memory(monkeypatch):
    monkeypatch.delenv(HOST_MEMORY_VARIABLE, raising=False)
    assert doctor.describe_host_memory().startswith("at most 64 GiB; set XLA_PJRT_GPU_HOST_MEMORY")
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "512")
    assert doctor.describe_host_memory() == f"at most 512 GiB, set by {HOST_MEMORY_VARIABLE}"
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "much")
    assert "'much'" in doctor.describe_host_memory()


@pytest.mark.skipif(doctor.has_nvidia_gpu(), reason="JAX may report about the GPU")
def test_no_warnings_without_jax_platforms():
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "effjax", "doctor", "--json"]
    ran = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    assert ran.stderr == "" and json.loads(ran.stdout)["devices"][0]["platform"] == "cpu"


@pytest.mark.parametrize("gpu", [False, True])
def test_cuda_error_is_one_line_if_there_is_a_gpu(monkeypatch, gpu):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: gpu)
    try:
        raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
    except RuntimeError:
        record = logging.LogRecord(
            "jax", logging.ERROR, "", 1, "Exception when calling %s.initialize()",
            ("jax_plugins.xla_cuda13",), sys.exc_info(),
        )  # fmt: skip
    assert cli._shorten_cuda_error(record) == gpu
    message = logging.Formatter().format(record)
    assert message.startswith("effjax: JAX does not use the GPU, Unable to load cuDNN. Is it")
    assert "\n" not in message


def test_report_without_a_backend(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr("jax.local_devices", fail)
    report = doctor.examine()
    assert report["devices"] == []
    assert "devices: none, Unable to initialize backend 'cuda': no driver" in doctor.format_lines(
        report
    )
