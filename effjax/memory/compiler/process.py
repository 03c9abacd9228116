"""Compilation for a GPU or TPU that is not attached, in separate processes."""

import atexit
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

from ..devices import Target
from .lower import SPLITS_ITSELF, LoweredProgram, PlanError
from .packages import find_compiler

# Without a GPU, XLA cannot choose convolution algorithms by timing them.
_COMPILER_OPTIONS = {"cuda": {"xla_gpu_autotune_level": "0"}, "tpu": {}}
_ENVIRONMENTS = {
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""},
    # libtpu asks the metadata server of Google Cloud which TPU it is on, and locks a file for the
    # only process that may use a TPU.
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
    },
}


_DAMAGED = "No module named", "cannot open shared object", "invalid ELF header", "file too short"


class CompiledProgram(NamedTuple):
    """The compiler's output; bytes are per device, by kind."""

    num_devices: int
    device_bytes: dict[str, int]  # of a TPU; empty for a program that the compiler refused
    host_bytes: dict[str, int]
    hlo: str
    buffer_assignment: str  # XLA's text
    live_ranges: str  # XLA's text
    refusal: str  # the compiler's error for a program that does not fit, or empty


def compile_for(
    lowered: LoweredProgram,
    target: Target,
    compiler_options: Mapping[str, Any] | None,
    pipe: IO[bytes],
) -> CompiledProgram:
    """Compile a program for the target in a process that ends when `pipe` closes.

    Raises:
        PlanError: with the compiler's error message.
    """
    options = lowered.compiler_options | dict(compiler_options or {})
    options = _COMPILER_OPTIONS[target.platform] | {k: str(v) for k, v in options.items()}
    request = {
        "platform": target.platform,
        "topology": target.topology(lowered.num_devices),
        "num_devices": lowered.num_devices,
        "compiler_options": options,
    }
    with tempfile.TemporaryDirectory(prefix="effjax-plan-") as name:
        folder = Path(name)
        module: Any = lowered.module.compiler_ir("stablehlo")
        with open(folder / "module.mlirbc", "wb") as file:
            module.operation.write_bytecode(file)
        (folder / "target.txtpb").write_text(target.config)
        (folder / "request.json").write_text(json.dumps(request))
        code, message = _run(folder, target, pipe)
        if code:
            fatal = re.search(r"^F\d{4} .*", message, re.MULTILINE)  # of a failed check in XLA
            message = fatal[0] if fatal else message[-4000:].strip()
            raise PlanError(
                f"the compiler for {target.description} ended with exit code {code}: "
                f"{message or 'no message'}"
            )
        result = json.loads((folder / "result.json").read_text())
        if "custom_partitioner" in result.get("error", ""):
            raise PlanError(SPLITS_ITSELF)
        if any(text in result.get("error", "") for text in _DAMAGED):
            raise PlanError(
                f"the compiler in {find_compiler(target.platform)} is damaged "
                f"({result['error']:.200}). Remove this folder; a plan installs it again."
            )
        if "error" in result:
            raise PlanError(
                f"the program cannot be compiled for {target.description}: {result['error']}"
            )
        return CompiledProgram(
            num_devices=lowered.num_devices,
            device_bytes=result.get("device", {}),
            host_bytes=result.get("host", {}),
            hlo=(folder / "program.hlo").read_text(),
            buffer_assignment=_read_dump(folder, "buffer-assignment"),
            live_ranges=_read_dump(folder, "live-range"),
            refusal=result.get("refusal", ""),
        )


class _Server(NamedTuple):
    """A process that compiles in children of its own."""

    environment: dict[str, str]
    process: subprocess.Popen
    requests: socket.socket

    def close(self) -> None:
        """End the server; its running compilations go on."""
        self.requests.close()
        self.process.wait()


_servers: dict[str, _Server] = {}  # by platform
_lock = threading.Lock()


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()


def _run(folder: Path, target: Target, pipe: IO[bytes]) -> tuple[int, str]:
    """Compile the module in a folder; return the compiler's exit code and what it printed."""
    read_end, write_end = os.pipe()
    log = folder / "stderr"
    with open(read_end, "rb") as done:
        with _lock:
            server = _find_server(target, log)
            with open(write_end, "wb"), contextlib.suppress(BrokenPipeError):
                message, pipes = str(folder).encode(), [pipe.fileno(), write_end]
                socket.send_fds(server.requests, [message], pipes)
        reply = done.read()
    # Without a reply, the server could not start, or it was killed.
    code = int(reply) if reply else server.process.wait()
    return code, log.read_text(errors="replace") if log.exists() else ""


def _find_server(target: Target, log: Path) -> _Server:
    """Return the running server for the target and the current environment, or start one.

    A server that is started writes its errors to `log`.
    """
    environment = _environment(target)
    server = _servers.get(target.platform)
    if server is not None:
        if server.environment == environment and server.process.poll() is None:
            return server
        server.close()
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(log, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}._compiler_shim", str(theirs.fileno())],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    _servers[target.platform] = _Server(environment, process, requests)
    return _servers[target.platform]


@contextlib.contextmanager
def open_pipe() -> Iterator[IO[bytes]]:
    """Yield the end of a pipe that closes after the block or with this process, even if killed."""
    read_end, write_end = os.pipe()
    try:
        with open(read_end, "rb") as file:
            yield file
    finally:
        os.close(write_end)


def _environment(target: Target) -> dict[str, str]:
    compiler = find_compiler(target.platform)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(compiler), *_search_path()]),
    }
    if target.platform == "cuda":
        # JAX sets this where a kernel is traced, but only if the CUDA plugin is importable there.
        runtime = compiler / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
        environment["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    return environment | effort_variables() | _ENVIRONMENTS[target.platform]


def effort_variables() -> dict[str, str]:
    """Return JAX's options for the effort of the compiler, as environment variables."""
    names = "optimization_level", "memory_fitting_level"
    return {f"JAX_{name.upper()}": str(getattr(jax.config, f"jax_{name}")) for name in names}


def _search_path() -> list[str]:
    """Return the caller's search path without the working directory."""
    # A file in the working directory could shadow a module. If effjax or JAX is installed there,
    # the directory comes last.
    paths = [path for path in sys.path if path and Path(path).absolute() != Path.cwd()]
    homes = (str(Path(file).parents[level]) for file, level in ((__file__, 3), (jax.__file__, 1)))
    return list(dict.fromkeys([*paths, *homes]))


def _read_dump(folder: Path, name: str) -> str:
    """Read an XLA dump; of the largest module, if the compiler split the program."""
    files = (folder / "dump").glob(f"*after_optimizations-{name}.txt")
    return max((file.read_text() for file in files), key=len, default="")
