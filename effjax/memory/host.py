"""Pinned host memory: what XLA gives a process that offloads from its GPUs."""

import os

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT = 64  # XLA's, GiB


def host_memory_limit() -> int:
    """Bytes of XLA's pool of pinned host memory: one for all GPUs of a process.

    It is 64 GiB unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise, whatever the machine has.

    Raises:
        ValueError: if that variable is no number of at least 1.
    """
    said = os.environ.get(VARIABLE, str(_DEFAULT))
    if not said.strip().isdecimal() or not int(said):
        raise ValueError(f"{VARIABLE} (={said!r}) must be a whole number of GiB, at least 1.")
    return int(said) * 2**30
