"""Compiles a StableHLO module for a GPU that is not there: `python -m …_gpu_compiler_shim FOLDER`.

Run as a process of its own, so that the caller's backends stay as they are and a compiler that
aborts ends nothing else. Private JAX modules are used in this file and in `_frames_shim` alone.
Seen to work with jax 0.10.2, 0.11.2 and 0.12.0.1.

The folder holds `module.mlirbc`, the target's `target.txtpb` and `request.json`; it receives
`result.json` (XLA's bytes, or its error), `program.hlo` and XLA's dump of the buffer assignment.
Standard input is a pipe that the caller holds: when it is closed, the process ends.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies

from ..native import status
from ._ends_with import end_with

KINDS = ("argument", "output", "temp", "alias", "generated_code")


def compile_in(folder: Path) -> dict[str, Any]:
    """Compiles the folder's module, and returns the bytes of each kind on device and host."""
    status()  # registers effjax's own custom calls: the compiler looks them up
    request = json.loads((folder / "request.json").read_text())
    count = request["num_devices"]
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(folder / "target.txtpb").read_text(),
        topology=f"1x1x{count}",
    )
    devices = tuple(topology.devices[:count])
    client: Any = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=count,
        device_assignment=np.arange(count).reshape(1, count),
        env_options_overrides=request["compiler_options"] | {"xla_dump_to": str(folder / "dump")},
        backend=client,
    )
    options.executable_build_options.use_spmd_partitioning = count > 1
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "module.mlirbc").read_bytes())
        # Not `compiler.backend_compile_and_load`, which starts a CUDA backend where there is one.
        executable = client.compile(
            module, executable_devices=_jax.DeviceList(devices), compile_options=options
        )
    stats = executable.get_compiled_memory_stats()
    hlo = "\n".join(module.to_string() for module in executable.hlo_modules())
    (folder / "program.hlo").write_text(hlo)
    return {
        place: {kind: getattr(stats, f"{prefix}{kind}_size_in_bytes") for kind in KINDS}
        for place, prefix in (("device", ""), ("host", "host_"))
    }


def main(folder: Path) -> None:
    end_with(0, folder)
    try:
        result = compile_in(folder)
    except Exception as error:  # whatever the compiler says is the caller's to read
        result = {"error": f"{error}"}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
