"""Compiler process: compile StableHLO modules for GPUs or TPUs that are not attached.

`python -m effjax.memory.compiler._compiler_shim FD` serves requests from the Unix socket FD until
its other end closes. A request is the path of a folder and two pipes. The folder holds
`module.mlirbc`, `target.txtpb` and `request.json`. It receives `result.json` (for a TPU, bytes by
kind, or the message of a compiler that refuses a program that does not fit; or another error),
`program.hlo`, XLA's dump of the buffer assignment, and `stderr`. When the first pipe closes, the
folder is deleted and the compilation ends. The exit code is written to the second.

Separate processes keep the caller's backends unchanged and survive a compiler that aborts. The
server imports JAX, which takes a second, and forks a process for each request. The search path
starts with the directory of the compiler. Uses private JAX modules. Tested with jax 0.10.2, 0.11.2
and 0.12.0.1.
"""

import concurrent.futures
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jax._src import compiler, xla_bridge
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies

# Names of `Bytes` and of XLA.
KINDS = {
    "arguments": "argument", "outputs": "output", "temporaries": "temp", "aliased": "alias",
    "generated_code": "generated_code",
}  # fmt: skip


def compile_in(folder: Path) -> dict[str, Any]:
    """Compile the folder's module; return bytes by kind on device and host if it is for a TPU."""
    request = json.loads((folder / "request.json").read_text())
    count = request["num_devices"]
    devices = _describe_devices(request, folder / "target.txtpb")[:count]
    client: Any = devices[0].client
    dump = folder / "dump"
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=count,
        device_assignment=np.arange(count).reshape(1, count),
        env_options_overrides=request["compiler_options"] | {"xla_dump_to": str(dump)},
        backend=client,
    )
    options.executable_build_options.use_spmd_partitioning = count > 1

    def compile_module() -> Any:
        with mlir.make_ir_context():
            module = ir.Module.parse((folder / "module.mlirbc").read_bytes())
            # `compiler.backend_compile_and_load` would start a CUDA backend on a machine with a
            # GPU.
            return client.compile(
                module, executable_devices=_jax.DeviceList(devices), compile_options=options
            )

    if request["platform"] == "cuda":
        if any(name.startswith("xla_dump_") for name in request["compiler_options"]):
            compile_module()  # the options may dump what follows the assignment, such as PTX
        else:
            _assign_buffers(compile_module, dump)
        (folder / "program.hlo").write_text(_read_dumped_program(dump))
        return {}
    try:
        executable = compile_module()
    except Exception as error:
        # The compiler for TPUs refuses a program that does not fit. It has assigned the buffers
        # by then, unless they are far too large.
        if "Ran out of memory" not in str(error):
            raise
        (folder / "program.hlo").write_text(_read_dumped_program(dump))
        return {"refusal": str(error)}
    stats = executable.get_compiled_memory_stats()
    hlo = "\n".join(module.to_string() for module in executable.hlo_modules())
    (folder / "program.hlo").write_text(hlo)
    return {
        place: {n: getattr(stats, f"{prefix}{kind}_size_in_bytes") for n, kind in KINDS.items()}
        for place, prefix in (("device", ""), ("host", "host_"))
    }


def _assign_buffers(compile_module: Callable[[], Any], dump: Path) -> None:
    """Compile for a GPU until XLA has assigned the buffers, or raise the compiler's error."""
    # What follows is the machine code of each kernel. It takes two thirds of the time of a deep
    # network, and a plan does not read it.
    compilation = concurrent.futures.ThreadPoolExecutor().submit(compile_module)
    while not (is_dumped := _is_dumped(dump)) and not compilation.done():
        concurrent.futures.wait([compilation], timeout=0.05)
    if not is_dumped:
        compilation.result()


def _is_dumped(dump: Path) -> bool:
    """Return True if the files that a plan reads are there, and closed by XLA's threads."""
    names = {file.name for file in dump.glob("*after_optimizations*.txt")}
    endings = "after_optimizations.txt", "-buffer-assignment.txt", "-live-range.txt"
    # XLA may write these files of a part of the program, too; the debug options come last.
    has_all = all(any(name.endswith(end) for name in names) for end in endings)
    return has_all and any(dump.glob("*.debug_options")) and not names & _open_files()


def _open_files() -> set[str]:
    """Return the names of the files that this process has open."""
    names = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed
            names.add(descriptor.readlink().name)
    return names


def _describe_devices(request: dict[str, Any], config: Path) -> tuple[Any, ...]:
    """Return compile-only devices of the target."""
    if request["platform"] == "tpu":
        options: dict[str, Any] = {"topology_name": request["topology"]}
        if request["topology"].endswith(":1x1") or request["topology"].endswith(":1x1x1"):
            # libtpu of jax 0.10 assumes hosts of four chips otherwise.
            options["chips_per_host_bounds"] = (1, 1, 1)
        if request["topology"].startswith("v4:"):
            options["chip_config_name"] = "megacore"  # JAX uses both cores as one device
    else:
        options = {"target_config": config.read_text(), "topology": request["topology"]}
        # Start the plugin of the planner's directory, and none of the user's environment.
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
        xla_bridge.discover_pjrt_plugins = plugin.initialize
    return tuple(topologies.get_topology_desc(platform=request["platform"], **options).devices)


def _read_dumped_program(dump: Path) -> str:
    files = dump.glob("*after_optimizations.txt")
    return max((file.read_text() for file in files), key=len, default="")


def exit_when_closed(descriptor: int, folder: Path) -> None:
    """End this process and delete `folder` when the other end of a pipe is closed."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def compile_and_exit(folder: Path, pipe: int) -> NoReturn:
    """Compile, write `result.json`, and end this process."""
    code = 1
    try:
        exit_when_closed(pipe, folder)
        stderr = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        try:
            result = compile_in(folder)
        except Exception as error:  # reported by the caller
            result = {"error": f"{error}"}
        (folder / "result.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def serve(requests: socket.socket) -> None:
    """Compile in a process for each request, several at a time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who closes the pipe
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait leave no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 65536, 2)
        if not message:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        # This process waits for the compiler, which may abort, and reports how it ended.
        requests.close()
        pipe, done = descriptors
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not (process := os.fork()):
            os.close(done)
            compile_and_exit(Path(message.decode()), pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])  # negative: a signal
        with contextlib.suppress(BrokenPipeError):
            os.write(done, str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
