"""`effjax doctor`: versions, devices, and how to install what is missing."""

import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import pytest

from effjax import cli, native
from effjax.cli import doctor
from effjax.cli.doctor import HOST_MEMORY_VARIABLE
from effjax.native import defaults
from tests.native import broken


def test_report_of_this_machine():
    report = doctor.examine()
    assert report["packages"]["jax"] and report["packages"]["flax"]
    assert report["devices"][0]["default_memory"] in report["devices"][0]["memories"]
    assert report["backend_error"] is None
    text = "\n".join(doctor.format_lines(report))
    assert "memory:" in text and "native kernels: cpu " in text and "extras:" in text


KEY = defaults.Key("NVIDIA L4", "580.1", "13.0", "0" * 64)
L4 = native.Gpus(13000, 13010, 1, 89)
WRONG: defaults.Outcomes = {"roi_pool": {"float32": "wrong"}}
FASTER = {"roi_pool": {"float32": "faster", "float64": "slower", "float16": "faster"}}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("gpus", "key", "verdict", "text"),
    [
        (None, None, None, ""),
        (native.Gpus(12090, 0, 0, 0), None, None, "CUDA 12.9; no GPU: for plans only"),
        (L4, None, None, "CUDA 13.0; 1 GPUs"),  # which JAX does not use
        (L4, KEY, None, "CUDA 13.0; 1 GPUs; not validated here: run `effjax doctor --gpu`"),
        (L4, KEY, WRONG, "CUDA 13.0; 1 GPUs; validated, by default: none"),
        (L4, KEY, FASTER, "CUDA 13.0; 1 GPUs; validated, by default: roi_pool in float32, float16"),
    ],
)
def test_state_of_the_kernels(monkeypatch, gpus, key, verdict, text):
    monkeypatch.setattr(native, "status", lambda: {"cpu": "loaded", "cuda": "loaded"})
    monkeypatch.setattr(native, "gpus", lambda: gpus)
    monkeypatch.setattr(defaults, "find_key", lambda _: key)
    if verdict is not None:
        defaults.write_verdict(KEY, verdict)
    built = f" (built with {text})" if text else ""
    assert doctor.describe_kernels() == {"cpu": "loaded", "cuda": f"loaded{built}"}


def kernel(dtype, seconds, **change):
    """Return a row of a report on kernels."""
    row = {"kernel": "roi_pool", "dtype": dtype, "passed": 13, "skipped": {}}
    seconds = {"native": seconds, "xla": 0.002} if seconds else {}
    return row | {"seconds": seconds, "failures": [], "untested": {}} | change


SANITIZER = {"program": "/bin/compute-sanitizer", "kernels": 3, "checked": 2, "reason": "it hangs"}

MEMORY = {"case": "vmap", "kind": "memory", "text": "Invalid __global__ write of size 4 bytes"}
PEAK = {"case": "elementwise", "kind": "peak", "text": "!"}
NO_MEMORY = {"plain": "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize(
    ("last", "outcome", "default", "line"),
    [
        (kernel("float16", 0.001), "faster", "1 +2  kernel", ""),
        (kernel("float16", None, failures=[MEMORY]), "wrong", "- +-  XLA, .*WRONG", "4 bytes"),
        (kernel("float16", None, untested=NO_MEMORY), None, "- +-  XLA, .*not tested", "EXHAUST"),
    ],
)
def test_gpu_command(monkeypatch, tmp_path, capsys, last, outcome, default, line):
    """It stores the verdict, prints a table, and fails unless all kernels pass."""
    verdict = {"float32": "faster", "float64": "slower"} | ({"float16": outcome} if outcome else {})

    def validate(platform, report_line):
        report_line(f"testing on {platform}")
        rows = [kernel("float32", 0.001), kernel("float64", 0.003), last]
        return {"key": KEY._asdict(), "kernels": rows, "sanitizer": SANITIZER}

    def measure_programs(report, report_line):
        assert defaults.read_verdict(KEY) == {"roi_pool": verdict}  # stored before
        failures = [PEAK] * len(last["failures"])
        report["programs"] = [{"name": "elementwise", "failures": failures, "untested": {}}]

    monkeypatch.setattr("effjax.validation.validate", validate)
    monkeypatch.setattr("effjax.validation.measure_programs", measure_programs)
    assert cli.main(["doctor", "--gpu"]) == bool(line)
    table = capsys.readouterr().out
    assert "testing on cuda\n" in table and str(tmp_path) in table
    # The dtype, the milliseconds of the kernel and of XLA, and the default.
    for row in ("float32 +13 +1 +2  kernel", "float64 +13 +3 +2  XLA", f"float16 +13 +{default}"):
        assert re.search(rf"^roi_pool +{row}$", table, re.MULTILINE)
    assert re.search(rf"^roi_pool float16, (vmap|plain): .*{line}", table, re.MULTILINE) or not line
    assert ("memory, elementwise: peak: !" in table) == bool(last["failures"])
    assert "compute-sanitizer checked 2 of 3 kernels and dtypes: it hangs\n" in table
    assert cli.main(["doctor", "--gpu", "--json"]) == bool(line)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == table and report["key"] == KEY._asdict()
    assert report["packages"]["jax"] == jax.__version__
    assert len(report["problems"]) == 2 * len(last["failures"]) + len(last["untested"])


def test_gpu_command_that_tests_no_kernel(monkeypatch, capsys):
    defaults.write_verdict(KEY, WRONG)
    rows = [kernel("float32", None, untested={"plain": "RESOURCE_EXHAUSTED"})]
    report = {"key": KEY._asdict(), "kernels": rows, "sanitizer": SANITIZER}
    monkeypatch.setattr("effjax.validation.validate", lambda **_: report)
    monkeypatch.setattr("effjax.validation.measure_programs", lambda *_, **__: None)
    assert cli.main(["doctor", "--gpu"]) == 1
    assert "the verdict is unchanged" in capsys.readouterr().out
    assert defaults.read_verdict(KEY) == WRONG


def test_gpu_command_without_a_home_directory(monkeypatch, capsys):
    """The error comes before the kernels are tested, not after."""
    failure = RuntimeError("Could not determine home directory.")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", mock.Mock(side_effect=failure))
    assert cli.main(["doctor", "--gpu"]) == 1
    assert "Could not determine home directory. Set XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.skipif(doctor.has_nvidia_gpu(), reason="validates the GPU")
def test_gpu_command_without_a_gpu(capsys):
    assert cli.main(["doctor", "--gpu"]) == 1
    assert re.match(
        r"effjax: no (cuda kernels: .*|GPU with NVIDIA's driver)\. See effjax doctor\.\n",
        capsys.readouterr().err,
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(not native.is_available("cpu"), reason="built without native kernels")
def test_whole_path_with_the_cpu_kernels(monkeypatch, tmp_path, capsys):
    """Kernels that pass run by default. One that compute-sanitizer finds wrong does not."""
    body = "sys.exit(86 if json.loads(child[-1])['kernel'] == 'slow' else subprocess.call(child))"
    program = broken.write_sanitizer(tmp_path / "bin", f"log('Invalid access'); {body}")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    options: Any = dict(platform="cpu", table="tests.native.broken:KERNELS", dtypes=["float32"])
    with broken.quick_children():
        names = ["correct", "wrong value", "slow"]
        assert doctor.validate_kernels(kernels=names, repeats=3, **options) == 1
    text = capsys.readouterr().out
    assert "wrong value float32, plain: value: the result is wrong" in text
    assert "slow float32, compute-sanitizer: memory: Invalid access" in text
    assert "compute-sanitizer checked 2 of 2 kernels and dtypes\n" in text
    key = defaults.find_key("cpu")
    monkeypatch.setattr(defaults, "find_key", lambda _: key)
    verdict = defaults.read_verdict(key)
    assert verdict is not None
    assert verdict["wrong value"] == verdict["slow"] == {"float32": "wrong"}
    for name in names:
        is_faster = verdict[name]["float32"] == "faster"
        assert defaults.uses_cuda(name, "float32") == is_faster
    defaults._outcomes_here.cache_clear()


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
    missing = [doctor.missing_packages("effjax", extra) for extra in ("cuda13", "plan", "test")]
    assert missing == [["nvidia-cublas"], [], ["no-such-package"]]


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
    assert doctor.describe_host_memory().startswith("at most 64 GiB; set XLA_PJRT_GPU_HOST")
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
    failure = RuntimeError("Unable to initialize backend 'cuda':\n no driver")
    monkeypatch.setattr("jax.local_devices", mock.Mock(side_effect=failure))
    report = doctor.examine()
    line = "devices: none, Unable to initialize backend 'cuda': no driver"
    assert report["devices"] == [] and line in doctor.format_lines(report)
