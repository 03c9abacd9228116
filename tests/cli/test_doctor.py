import importlib.metadata
import json
import logging
import os
import subprocess
import sys

import pytest

from effjax import native
from effjax.cli import doctor

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def test_doctor_examines_this_machine():
    findings = doctor.examine()
    assert findings["packages"]["jax"] and findings["packages"]["flax"]
    assert len(findings["devices"]) >= 1
    assert findings["devices"][0]["default_memory"] in findings["devices"][0]["memories"]
    assert findings["backend_error"] is None
    text = "\n".join(doctor.lines(findings))
    assert "memory:" in text and "native kernels: cpu " in text and "extras:" in text


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (native.Gpus(13000, 13010, 2, 90), "loaded (built with CUDA 13.0; 2 GPUs to run on)"),
        (
            native.Gpus(12090, 0, 0, 0),
            "loaded (built with CUDA 12.9; no GPU here: for plans alone)",
        ),
        (None, "loaded"),
    ],
)
def test_doctor_tells_loading_from_running(monkeypatch, gpus, said):
    monkeypatch.setattr(native, "status", lambda: {"cpu": "loaded", "cuda": "loaded"})
    monkeypatch.setattr(native, "gpus", lambda: gpus)
    assert doctor.native_kernels() == {"cpu": "loaded", "cuda": said}


def test_doctor_says_what_to_install():
    missing = doctor.missing_by_extra(
        [
            "jax>=0.10.2",
            'numpy>=2; extra == "train"',
            "no-such-package>=1 ; extra == 'train'",
            'no-such-package[all]; python_version > "3" and extra == "plan"',
            'effjax[train,plan]; extra == "test"',
            'pytest>=8; extra == "test"',
            'jax[cuda99-local]; extra == "cuda99"',
        ]
    )
    none = ["no-such-package"]
    cuda = ["jax-cuda99-plugin"]
    assert missing == {"train": none, "plan": none, "test": none, "cuda99": cuda}


LIBRARIES = [
    "jax-cuda13-pjrt==1",
    "nvidia-cublas>=13; sys_platform == 'linux' and extra == 'with-cuda'",
    'nvidia-nvvm; extra == "with-cuda"',
]


@pytest.mark.parametrize("there", [{"jax-cuda13-plugin"}, {"jax-cuda13-plugin", "nvidia-nvvm"}])
def test_doctor_tells_the_planners_plugin_from_a_gpus(monkeypatch, there):
    """The extra `plan` brings the plugin without NVIDIA's libraries."""
    monkeypatch.setattr(doctor, "_version", lambda name: "1" if name in there else None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: LIBRARIES)
    missing = doctor.missing_by_extra(
        ['jax[cuda13]; extra == "cuda13"', 'jax[cuda13-local]; extra == "plan"']
    )
    libraries = [name for name in ("nvidia-cublas", "nvidia-nvvm") if name not in there]
    assert missing == {"cuda13": libraries, "plan": []}
    there |= {"nvidia-cublas", "nvidia-nvvm"}
    assert doctor.missing_by_extra(['jax[cuda13]; extra == "cuda13"']) == {"cuda13": []}


@pytest.mark.parametrize(
    ("gpu", "plugins", "missing", "platforms", "advice"),
    [
        (False, [], [], "", []),
        (False, ["jax-cuda13-plugin"], ["nvidia-cublas"], "", ["is for the planner alone"]),
        (False, ["jax-cuda13-plugin"], ["nvidia-cublas"], "cpu", []),  # as it advises
        (True, [], [], "", ["JAX's plugin is not: pip"]),
        (True, [], [], "cpu", []),
        (True, ["jax-cuda13-plugin"], ["nvidia-cublas"], "", ["its libraries are not: pip"]),
        (True, ["jax-cuda12-plugin"], [], "cuda,cpu", ["see to NVIDIA's driver"]),
    ],
)
def test_doctor_advises_what_is_not_set(monkeypatch, gpu, plugins, missing, platforms, advice):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: gpu)
    found = doctor._advice_on_gpus(plugins, {"cuda13": missing, "cuda12": missing})
    assert len(found) == len(advice) and all(a in f for a, f in zip(advice, found, strict=True))


def test_doctor_says_how_much_host_memory(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert doctor.pinned_host_memory().startswith("at most 64 GiB; XLA_PJRT_GPU_HOST_MEMORY_LIMIT")
    monkeypatch.setenv(VARIABLE, "512")
    assert doctor.pinned_host_memory() == f"at most 512 GiB, as {VARIABLE} says"
    monkeypatch.setenv(VARIABLE, "much")
    findings = doctor.examine()
    assert VARIABLE in findings["pinned_host_memory"]
    assert any("'much'" in line for line in doctor.lines(findings))


@pytest.mark.skipif(doctor.has_nvidia_gpu(), reason="JAX may have something to say of the GPU")
def test_a_command_without_jax_platforms_is_quiet():
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "effjax", "doctor", "--json"]
    ran = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    assert ran.stderr == "" and json.loads(ran.stdout)["devices"][0]["platform"] == "cpu"


def test_a_gpu_that_is_not_used_is_a_line(monkeypatch):
    from effjax.cli import _shorten_cuda_error

    def said(gpu):
        monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: gpu)
        try:
            raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
        except RuntimeError:
            record = logging.LogRecord(
                "jax", logging.ERROR, "", 1, "Exception when calling %s.initialize()",
                ("xla_cuda13",), sys.exc_info(),
            )  # fmt: skip
        return _shorten_cuda_error(record), record

    assert not said(gpu=False)[0]
    shown, record = said(gpu=True)
    line = logging.Formatter().format(record)
    assert shown and "\n" not in line and "Unable to load cuDNN. Is it installed? See" in line


def test_doctor_without_a_backend(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr("jax.local_devices", fail)
    findings = doctor.examine()
    assert findings["devices"] == []
    assert "devices: none, Unable to initialize backend 'cuda': no driver" in doctor.lines(findings)


def test_doctor_command(run):
    code, out, _ = run("doctor")
    assert code == 0 and "memory:" in out
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["packages"]["jax"]
