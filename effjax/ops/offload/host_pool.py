"""XLA's pool of pinned host memory: one for all GPUs of a process."""

import os
import warnings

import jax

HOST_MEMORY_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT = 64  # XLA's, GiB


def host_memory_limit() -> int:
    """Bytes of XLA's pool of pinned host memory: one for all GPUs of a process.

    It is 64 GiB unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise, whatever the machine has.

    Raises:
        ValueError: if that variable is no number of at least 1.
    """
    said = os.environ.get(HOST_MEMORY_VARIABLE, str(_DEFAULT))
    if not said.strip().isdecimal() or not int(said):
        raise ValueError(
            f"{HOST_MEMORY_VARIABLE} (={said!r}) must be a whole number of GiB, at least 1."
        )
    return int(said) * 2**30


def pinned_bytes(program: jax.stages.Compiled) -> int:
    """What a program for GPUs holds of the pool: arguments, other results and temporaries."""
    stats = program.memory_analysis()  # of one device; an XLA may have none
    size = {
        kind: getattr(stats, f"host_{kind}_size_in_bytes", 0)
        for kind in ("argument", "output", "temp", "alias")
    }
    places = jax.tree.leaves((program.input_shardings, program.output_shardings))
    here = frozenset().union(*(place.addressable_devices for place in places))
    return (size["argument"] + size["output"] + size["temp"] - size["alias"]) * len(here)


def warn_beyond_pool(program: jax.stages.Compiled) -> None:
    """Warns of a program for GPUs that needs more than the pool has."""
    needed, limit = pinned_bytes(program), host_memory_limit()
    if needed > limit:
        warnings.warn(
            f"a program needs {needed} bytes ({needed / 2**30:.1f} GiB) of pinned host memory, of "
            f"which XLA takes {limit / 2**30:g} GiB for a process. Where the machine has more, set "
            f"{HOST_MEMORY_VARIABLE} (in GiB) before JAX starts.",
            RuntimeWarning,
            stacklevel=2,
        )
