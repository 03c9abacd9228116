"""A report on JAX, effjax and this machine, and how to install what is missing."""

import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from .._extras import install_command
from ..train.host_memory import VARIABLE as HOST_MEMORY_VARIABLE
from ..train.host_memory import pinnable_bytes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "chex", "orbax-checkpoint", "numpy")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def examine() -> dict[str, Any]:
    """Return the report as JSON-serializable data. Initializes the JAX backend."""
    from ..native import defaults

    devices, backend_error = _describe_devices()
    software, extras = _describe_software(), missing_by_extra()
    on_gpu = any(device["platform"] == "gpu" for device in devices)
    plugins = list(software["cuda_plugins"])
    advice: list[str | None] = (
        [defaults.describe_slow_sums()] if on_gpu else [*_advise_on_gpus(plugins, extras)]
    )
    advice += [
        f"to install {extra} (missing: {', '.join(missing)}): {install_command(extra)}"
        for extra, missing in extras.items()
        if missing and not extra.startswith("cuda")
    ]
    return {
        **software,
        "devices": devices,
        "backend_error": backend_error,
        "pinned_host_memory": describe_host_memory(),
        "native_kernels": describe_kernels(),
        "extras": {
            extra: "missing" if missing else "installed" for extra, missing in extras.items()
        },
        "advice": list(filter(None, advice)),
    }


def _describe_software() -> dict[str, Any]:
    return {
        "effjax": _version("effjax") or "not installed (run from source)",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda_plugins": {name: v for name in PLUGINS if (v := _version(name))},
    }


def _format_software(report: dict[str, Any]) -> list[str]:
    packages = report["packages"] | report["cuda_plugins"]
    return [
        f"effjax {report['effjax']}, Python {report['python']}, {report['platform']}",
        "packages: " + ", ".join(f"{name} {v or 'missing'}" for name, v in packages.items()),
    ]


def format_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the report as text."""
    lines = _format_software(report)
    if report["backend_error"]:
        lines.append(f"devices: none, {report['backend_error']}")
    for device in report["devices"]:
        kinds = ", ".join(
            f"{kind} (default)" if kind == device["default_memory"] else kind
            for kind in device["memories"]
        )
        lines.append(
            f"device {device['id']}: {device['platform']} {device['kind']}; memory: {kinds}"
        )
    lines.append(f"pinned host memory of GPUs: {report['pinned_host_memory']}")
    kernels = report["native_kernels"].items()
    lines.append("native kernels: " + "; ".join(f"{name} {state}" for name, state in kernels))
    extras = ", ".join(f"{name} {state}" for name, state in report["extras"].items())
    lines.append(f"extras: {extras or 'unknown, effjax is not installed: pip install -e .'}")
    return lines + report["advice"]


def show(as_json: bool = False) -> None:
    """Print the report as plain text or JSON. Works without rich."""
    report = examine()
    print(json.dumps(report, indent=2) if as_json else "\n".join(format_lines(report)))


def validate_kernels(as_json: bool = False, platform: str = "cuda", **options: Any) -> int:
    """Validate the kernels on this machine's GPUs, store the verdict, and return the exit code.

    The code is 1 if a kernel or a planned peak is wrong, or if a kernel could not be tested.
    Lines about the progress go to stdout, or to stderr if the report is printed as JSON.

    Args:
        as_json: print the report as JSON.
        platform: "cpu" for the CPU kernels in place of CUDA kernels, as tests do.
        **options: options of `effjax.validation.validate`.
    """
    from ..native import defaults
    from ..validation import NoKernelsError, find_problems, measure_programs, outcomes, validate

    def report_line(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        defaults.cache_folder()
    except RuntimeError as error:
        print(f"effjax: {error} Set XDG_CACHE_HOME to store the verdict.", file=sys.stderr)
        return 1
    try:
        report = validate(platform=platform, report_line=report_line, **options)
    except NoKernelsError as error:
        print(f"effjax: {error}. See effjax doctor.", file=sys.stderr)
        return 1
    report |= _describe_software()
    report["outcomes"] = outcomes(report)
    stored = "No kernel was tested, so the verdict is unchanged."
    if report["outcomes"]:
        path = defaults.write_verdict(defaults.Key(**report["key"]), report["outcomes"])
        stored = f"The verdict is in {path}."
    if platform == "cuda":
        measure_programs(report, report_line=report_line)
    report["problems"] = find_problems(report)
    for line in ["", *format_outcomes(report), *report["problems"], stored]:
        report_line(line)
    if as_json:
        print(json.dumps(report, indent=2))
    return 1 if report["problems"] else 0


def format_outcomes(report: dict[str, Any]) -> list[str]:
    """Return a table of times and outcomes, and what compute-sanitizer checked."""
    key = report["key"]
    lines = [
        f"{key['gpu']}, driver {key['driver']}, CUDA {key['cuda']}",
        *_format_software(report),
        f"{'kernel':<28} {'dtype':<9} {'cases':>5} {'ms':>8} {'XLA':>8}  default",
    ]
    for row in report["kernels"]:
        outcome = report["outcomes"].get(row["kernel"], {}).get(row["dtype"])
        seconds = [row["seconds"].get(name) for name in ("native", "xla")]
        times = " ".join(f"{'-' if s is None else f'{1e3 * s:.3g}':>8}" for s in seconds)
        chosen = {
            "faster": "kernel", "slower": "XLA", "wrong": "XLA, the kernel is WRONG",
            None: "XLA, the kernel was not tested",
        }[outcome]  # fmt: skip
        lines.append(f"{row['kernel']:<28} {row['dtype']:<9} {row['passed']:>5} {times}  {chosen}")
    # Without it, accesses outside of arrays may be overlooked.
    sanitizer = report["sanitizer"]
    text = "compute-sanitizer checked {checked} of {kernels} kernels and dtypes".format(**sanitizer)
    return [*lines, f"{text}: {sanitizer['reason']}" if sanitizer["reason"] else text]


def missing_by_extra() -> dict[str, list[str]]:
    """Return the packages of each extra of effjax that are not installed."""
    extras: list[str] = []
    if _version("effjax"):
        extras = importlib.metadata.metadata("effjax").get_all("Provides-Extra") or []
    return {extra: list(dict.fromkeys(missing_packages("effjax", extra))) for extra in extras}


def missing_packages(package: str, extra: str) -> list[str]:
    """Return the packages of an extra, and of the extras that it includes, not installed."""
    missing = []
    for requirement in importlib.metadata.requires(package) or []:
        if not re.search(rf"""extra\s*==\s*['"]{extra}['"]""", requirement):
            continue
        # For example: jax-cuda13-plugin[with-cuda]>=0.10.2; extra == "cuda13"
        match = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", requirement)
        assert match is not None
        name, included = match[1], match[2] or ""
        if not _version(name):
            missing.append(name)
            continue
        for other in filter(None, included.split(",")):
            missing += missing_packages(name, other.strip())
    return missing


def _advise_on_gpus(plugins: list[str], missing: dict[str, list[str]]) -> list[str]:
    """Return advice if JAX uses no GPU, unless JAX_PLATFORMS asks for that."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    extra = "cuda12" if "jax-cuda12-plugin" in plugins else "cuda13"
    install = install_command(extra)
    if not has_nvidia_gpu():
        if not plugins:
            return []
        return [
            f"no NVIDIA GPU: {', '.join(plugins)} is for the planner only. JAX_PLATFORMS=cpu keeps "
            "JAX from searching for a GPU."
        ]
    if not plugins:
        return [f"NVIDIA GPU without JAX's plugin: {install}"]
    if missing.get(extra):
        return [f"NVIDIA GPU without its libraries: {install}"]
    return ["JAX does not find the NVIDIA GPU: check NVIDIA's driver"]


def has_nvidia_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU and its driver, on Linux or WSL."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def describe_host_memory() -> str:
    """Return the limit of pinned host memory for offloading, and what sets it."""
    from ..ops.offload.compiled import host_memory_limit

    try:
        size = f"at most {host_memory_limit() / 2**30:g} GiB"
    except ValueError as error:
        return str(error)
    if HOST_MEMORY_VARIABLE in os.environ:
        return f"{size}, set by {HOST_MEMORY_VARIABLE}"
    share = pinnable_bytes() // 2**30
    return f"{size}; set {HOST_MEMORY_VARIABLE}={share}, as commands that train do"


def describe_kernels() -> dict[str, str]:
    """Return the state of the native kernels of each platform."""
    from ..native import LOADED, gpus, status

    states, devices = status(), gpus()
    if states["cuda"] == LOADED and devices:
        version = f"CUDA {devices.built // 1000}.{devices.built % 1000 // 10}"
        usable = f"{devices.count} GPUs" if devices.count else "no GPU: for plans only"
        states["cuda"] += f" (built with {version}; {usable}{_describe_verdict()})"
    return states


def _describe_verdict() -> str:
    """Return which CUDA kernels run by default on the GPUs here, if there are any."""
    from ..native import defaults

    key = defaults.find_key("cuda")
    if key is None:
        return ""
    verdict = defaults.read_verdict(key)
    if verdict is None:
        return "; not validated here: run `effjax doctor --gpu`"
    faster = [
        f"{kernel} in {', '.join(dtypes)}"
        for kernel, by_dtype in verdict.items()
        if (dtypes := [dtype for dtype, outcome in by_dtype.items() if outcome == "faster"])
    ]
    return f"; validated, by default: {'; '.join(faster) or 'none'}"


def _describe_devices() -> tuple[list[dict[str, Any]], str | None]:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return [], " ".join(str(error).split())
    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "memories": sorted(memory.kind for memory in device.addressable_memories()),
            "default_memory": device.default_memory().kind,
        }
        for device in devices
    ], None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
