"""What JAX and effjax find on this machine, and what to install for what is missing."""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "chex", "orbax-checkpoint", "numpy")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def examine() -> dict[str, Any]:
    """All findings, as plain data. Starts the JAX backend."""
    devices, trouble = _devices()
    plugins = {name: v for name in PLUGINS if (v := _version(name))}
    extras = missing_by_extra(_requirements())
    on_gpu = any(device["platform"] == "gpu" for device in devices)
    advice = [] if on_gpu else _advice_on_gpus(list(plugins), extras)
    advice += [
        f'for {extra} (missing: {", ".join(missing)}): pip install "effjax[{extra}]"'
        for extra, missing in extras.items()
        if missing and not extra.startswith("cuda")
    ]
    return {
        "effjax": _version("effjax") or "not installed (running from its source)",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda_plugins": plugins,
        "devices": devices,
        "backend_error": trouble,
        "pinned_host_memory": pinned_host_memory(),
        "native_kernels": native_kernels(),
        "extras": {
            extra: "missing" if missing else "installed" for extra, missing in extras.items()
        },
        "advice": advice,
    }


def lines(findings: dict[str, Any]) -> list[str]:
    """The findings for reading."""
    packages = findings["packages"] | findings["cuda_plugins"]
    out = [
        f"effjax {findings['effjax']}, Python {findings['python']}, {findings['platform']}",
        "packages: " + ", ".join(f"{name} {v or 'missing'}" for name, v in packages.items()),
    ]
    if findings["backend_error"]:
        out.append(f"devices: none, {findings['backend_error']}")
    for device in findings["devices"]:
        kinds = ", ".join(
            f"{kind} (default)" if kind == device["default_memory"] else kind
            for kind in device["memories"]
        )
        out.append(f"device {device['id']}: {device['platform']} {device['kind']}; memory: {kinds}")
    out.append(f"pinned host memory of GPUs: {findings['pinned_host_memory']}")
    kernels = findings["native_kernels"].items()
    out.append("native kernels: " + "; ".join(f"{name} {state}" for name, state in kernels))
    extras = ", ".join(f"{name} {state}" for name, state in findings["extras"].items())
    out.append(f"extras: {extras or 'unknown, as effjax is not installed: pip install -e .'}")
    return out + [
        f"to install {line}" if line.startswith("for") else line for line in findings["advice"]
    ]


def show(as_json: bool = False) -> None:
    """Prints the findings. Plain text: it must work where rich is what is missing."""
    findings = examine()
    print(json.dumps(findings, indent=2) if as_json else "\n".join(lines(findings)))


def missing_by_extra(requirements: Sequence[str]) -> dict[str, list[str]]:
    """For each extra, those of its packages that are not installed.

    Args:
        requirements: as `importlib.metadata.requires` gives them: `rich>=13; extra == "train"`.
    """
    wanted: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", requirement)
        if extra:
            wanted.setdefault(extra[1], []).append(requirement)

    def missing(extra: str) -> list[str]:
        names: list[str] = []
        for requirement in wanted.get(extra, []):
            package = _package(requirement)
            options = requirement.removeprefix(f"{package}[").partition("]")[0]
            if package == "effjax":  # an extra that includes others
                for other in options.split(","):
                    names += missing(other.strip())
            elif package == "jax" and (cuda := re.match(r"(cuda\d+)(-local)?$", options)):
                names += _missing_of_plugin(f"jax-{cuda[1]}-plugin", libraries=not cuda[2])
            else:
                names += [] if _version(package) else [package]
        return list(dict.fromkeys(names))

    return {extra: missing(extra) for extra in wanted}


def _missing_of_plugin(plugin: str, libraries: bool) -> list[str]:
    """JAX's plugin, and the packages of NVIDIA's libraries, which the planner does without."""
    if not _version(plugin):
        return [plugin]
    wanted = importlib.metadata.requires(plugin) or [] if libraries else []
    names = [_package(one) for one in wanted if re.search(r"extra\s*==\s*['\"]with-cuda", one)]
    return [name for name in names if not _version(name)]


def _package(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _advice_on_gpus(plugins: list[str], missing: dict[str, list[str]]) -> list[str]:
    """What to do where JAX finds no GPU; nothing where that is what was asked for."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return []
    extra = "cuda12" if "jax-cuda12-plugin" in plugins else "cuda13"
    install = f'pip install "effjax[{extra}]"'
    if not has_nvidia_gpu():
        quiet = f"{', '.join(plugins)} is for the planner alone, as no NVIDIA GPU is here; "
        return [f"{quiet}JAX_PLATFORMS=cpu keeps JAX from looking for one"] if plugins else []
    if not plugins:
        return [f"an NVIDIA GPU is here, JAX's plugin is not: {install}"]
    if missing.get(extra):
        return [f"an NVIDIA GPU is here, its libraries are not: {install}"]
    return ["an NVIDIA GPU is here and JAX does not find it: see to NVIDIA's driver"]


def has_nvidia_gpu() -> bool:
    """Whether this machine has one, with its driver (of Linux, or of Windows below WSL)."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def pinned_host_memory() -> str:
    """How much of it XLA takes for offloading, and where that is said."""
    from ..memory import host_memory_limit

    try:
        size = f"at most {host_memory_limit() / 2**30:g} GiB"
    except ValueError as error:
        return str(error)
    variable = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    if variable in os.environ:
        return f"{size}, as {variable} says"
    return f"{size}; {variable} takes more, for arrays that are offloaded"


def native_kernels() -> dict[str, str]:
    """For each platform, "loaded" or why there are none; and what the CUDA kernels can run on."""
    from ..native import LOADED, gpus, status

    states, found = status(), gpus()
    if states["cuda"] == LOADED and found:
        version = f"with CUDA {found.built // 1000}.{found.built % 1000 // 10}"
        here = f"{found.count} GPUs to run on" if found.count else "no GPU here: for plans alone"
        states["cuda"] += f" (built {version}; {here})"
    return states


def _devices() -> tuple[list[dict[str, Any]], str | None]:
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


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("effjax") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
