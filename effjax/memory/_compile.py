"""Compilation for a GPU that is not attached, in a separate process."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._extras import install_command
from ._lower import SPLITS_ITSELF, LoweredProgram, PlanError
from .targets import Target

# Without a GPU, XLA cannot choose convolution algorithms by timing them.
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class CompiledProgram(NamedTuple):
    """The compiler's output; bytes are per device, by kind."""

    num_devices: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    hlo: str
    buffer_assignment: str  # XLA's text
    live_ranges: str  # XLA's text


def check_compiler() -> None:
    """Raise PlanError with the command to run if the GPU compiler is not installed."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        map(importlib.util.find_spec, _PLUGINS)
    ):
        raise PlanError(
            f"the GPU compiler is not installed. Run {install_command('plan')}, on Linux."
        )


def compile_for(
    lowered: LoweredProgram, target: Target, compiler_options: Mapping[str, Any] | None
) -> CompiledProgram:
    """Compile a program for the target; raise PlanError with the compiler's error message."""
    options = lowered.compiler_options | dict(compiler_options or {})
    options = _COMPILER_OPTIONS | {k: str(v) for k, v in options.items()}
    with tempfile.TemporaryDirectory(prefix="effjax-plan-") as name:
        folder = Path(name)
        module: Any = lowered.module.compiler_ir("stablehlo")
        with open(folder / "module.mlirbc", "wb") as file:
            module.operation.write_bytecode(file)
        (folder / "target.txtpb").write_text(target.config)
        request = {"num_devices": lowered.num_devices, "compiler_options": options}
        (folder / "request.json").write_text(json.dumps(request))
        with _open_pipe() as pipe:
            process = subprocess.run(
                [sys.executable, "-P", "-m", f"{__package__}._gpu_compiler_shim", name],
                env=_environment(), stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, errors="replace", check=False,
            )  # fmt: skip
        result_file = folder / "result.json"
        if process.returncode or not result_file.exists():
            raise PlanError(
                f"the compiler for {target.description} ended with exit code {process.returncode}: "
                f"{process.stderr[-4000:].strip() or 'no message'}"
            )
        result = json.loads(result_file.read_text())
        if "custom_partitioner" in result.get("error", ""):
            raise PlanError(SPLITS_ITSELF)
        if "error" in result:
            raise PlanError(
                f"the program cannot be compiled for {target.description}: {result['error']}"
            )
        return CompiledProgram(
            num_devices=lowered.num_devices,
            device_bytes=result["device"],
            host_bytes=result["host"],
            hlo=(folder / "program.hlo").read_text(),
            buffer_assignment=_read_dump(folder, "buffer-assignment"),
            live_ranges=_read_dump(folder, "live-range"),
        )


@contextlib.contextmanager
def _open_pipe() -> Iterator[int]:
    """Yield the end of a pipe that closes when this process ends, even if it is killed."""
    ends = os.pipe()
    try:
        yield ends[0]
    finally:
        for end in ends:
            os.close(end)


def _environment() -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(_search_path()),
    }


def _search_path() -> list[str]:
    """Return the caller's search path without the working directory.

    A file in the working directory could shadow a module. If effjax or JAX is installed there, the
    directory comes last.
    """
    paths = [path for path in sys.path if path and Path(path).absolute() != Path.cwd()]
    homes = (str(Path(file).parents[level]) for file, level in ((__file__, 2), (jax.__file__, 1)))
    return list(dict.fromkeys([*paths, *homes]))


def _read_dump(folder: Path, name: str) -> str:
    """Read an XLA dump; of the largest module, if the compiler split the program."""
    files = (folder / "dump").glob(f"*gpu_after_optimizations-{name}.txt")
    return max((file.read_text() for file in files), key=len, default="")
