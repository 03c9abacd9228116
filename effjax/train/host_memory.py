"""The host memory that a run may pin. Imports no JAX: XLA reads the limit when it starts a GPU."""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Of a process, beside its pinned arrays: Python, JAX, CUDA's libraries, its data, and the slices in
# which arrays are read and written.
PROCESS_BYTES = 4 * 2**30
# Slices of arrays: of checkpoints, which are written some at a time, and of exported files.
SLICE_BYTES = 64 << 20  # unless a row of the first axis is larger
MAX_BYTES_IN_FLIGHT = 3 * SLICE_BYTES  # with what Orbax needs, less than 256 MiB
EXPORT_BYTES = 32 << 20
# Processes of a job on a machine, as launchers state them; SLURM may write "4(x2)".
_LOCAL_COUNTS = "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"
_CGROUPS = "memory.max", "memory/memory.limit_in_bytes"  # of versions 2 and 1


def physical_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine, or of its container if that may use less."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _CGROUPS:
        try:
            limit = (cgroups / name).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():  # not "max"
            sizes.append(int(limit))
    return min(sizes)


def count_local_processes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of the job on this machine, 1 if no launcher states it."""
    for name in _LOCAL_COUNTS:
        count = environment.get(name, "").partition("(")[0]
        if count.isdecimal() and int(count):
            return int(count)
    return 1


def pinnable_bytes(local_processes: int | None = None) -> int:
    """Return the host memory that this process may pin: `VARIABLE`, or a share of the machine's.

    The share is in whole GiB, as the variable is. `local_processes` is the number of processes on
    this machine, by default that of the launcher.
    """
    if (value := os.environ.get(VARIABLE, "")).strip().isdecimal():
        return int(value) * 2**30
    count = local_processes or count_local_processes()
    return pinnable_of(physical_bytes() // count)


def pinnable_of(memory_bytes: int) -> int:
    """Return what a process may pin of a memory of this size, in whole GiB and at least one."""
    return max((memory_bytes - PROCESS_BYTES) // 2**30, 1) * 2**30


def host_phases(state: tuple[int, int], step: int, copies: bool = True) -> dict[str, int]:
    """Return the host memory of the phases of a run in bytes, beside that of the process.

    Args:
        state: The bytes of the state on devices and in host memory.
        step: The bytes of a training step in host memory, those of the state included.
        copies: Whether what is written is copied before. On CPUs it is not.
    """
    on_host = state[1]
    read, saved, exported = (
        on_host + min(size, sum(state)) for size in (SLICE_BYTES, MAX_BYTES_IN_FLIGHT, EXPORT_BYTES)
    )
    if not copies:
        saved = exported = on_host
    return {"loading": read, "step": step, "saving": saved, "restoring": read, "export": exported}


def machine_bytes(state: tuple[int, int], step: int) -> int:
    """Return the memory of a machine that a run needs; the arguments are those of `host_phases`."""
    # The process has room for the slices.
    return max(host_phases(state, step).values()) + PROCESS_BYTES - MAX_BYTES_IN_FLIGHT


def set_pinned_limit(local_processes: int | None = None) -> None:
    """Let XLA pin as much host memory as this process may use, unless `VARIABLE` is set."""
    os.environ.setdefault(VARIABLE, str(pinnable_bytes(local_processes) // 2**30))
