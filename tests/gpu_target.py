"""Compile for an H200 on a machine without a GPU, and read what XLA says about the program.

XLA's CPU backend drops optimization barriers and host transfers, so it cannot show what
recomputation saves. The CUDA plugin can: given the figures of a GPU (`tests/data/h200.txtpb`) it
compiles without a GPU or a driver.

    program = compile_for_h200(train_step, params, batch, donate_argnums=0)
    assert program.temp_bytes <= 400e6

All private JAX modules that the tests use are in this file. Seen to work with jax 0.10.2, 0.11.2
and 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import compiler
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies

H200 = (pathlib.Path(__file__).parent / "data" / "h200.txtpb").read_text()

# There is no GPU to time kernels on. Given with each compile: the environment stays as it is.
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """A program compiled for the H200, not to be run: bytes on ONE device, and optimized HLO."""

    temp_bytes: int  # everything the program allocates beside its arguments and results
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # results that reuse a donated argument; counted in both of the above
    host_temp_bytes: int
    hlo: str

    @property
    def total_bytes(self) -> int:
        """Device bytes the program needs while it runs."""
        return self.temp_bytes + self.argument_bytes + self.output_bytes - self.alias_bytes


def compile_for_h200(
    fn: Callable[..., Any],
    *specs: Any,
    num_devices: int | None = None,
    compiler_options: dict[str, str] | None = None,
    **jit_kwargs: Any,
) -> GpuProgram:
    """Compiles `jax.jit(fn, **jit_kwargs)` for H200s; skips the test where the compiler is missing.

    `specs` are arrays or `jax.ShapeDtypeStruct`s; nothing is computed. A program over several
    devices is written as for the simulated CPU devices (a CPU mesh, `jax.shard_map`, shardings on
    the specs): lowering from a CPU mesh keeps memory kinds, which a topology's own mesh loses.

    Args:
      fn: The function, jitted or not.
      *specs: Its arguments, any pytrees.
      num_devices: What the program must span; None takes what it does span.
      compiler_options: More XLA flags for this compile, without the leading dashes.
      **jit_kwargs: For `jax.jit`, such as `donate_argnums` or `in_shardings`.

    Raises:
      ValueError: If the program spans another number of devices than `num_devices`.
    """
    _skip_without_compiler()
    # A function that is jitted already keeps its own shardings and donations.
    jitted: Any = fn if hasattr(fn, "trace") and not jit_kwargs else jax.jit(fn, **jit_kwargs)
    lowered = jitted.trace(*specs).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    spanned = int(module.operation.attributes["mhlo.num_partitions"].value)
    if num_devices not in (None, spanned):
        raise ValueError(
            f"`num_devices` is {num_devices} but the program spans {spanned} devices: give its "
            f"arguments shardings over a mesh of {num_devices} devices."
        )

    devices = _h200_devices(spanned)
    client: Any = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=spanned,
        device_assignment=np.arange(spanned).reshape(1, spanned),
        env_options_overrides=_COMPILER_OPTIONS | (compiler_options or {}),
        backend=client,
    )
    options.executable_build_options.use_spmd_partitioning = spanned > 1
    # Not `compiler.backend_compile_and_load`, which would start a CUDA backend where there is one.
    executable = client.compile(
        module, executable_devices=_jax.DeviceList(devices), compile_options=options
    )
    stats = executable.get_compiled_memory_stats()
    return GpuProgram(
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        hlo="\n".join(m.to_string() for m in executable.hlo_modules()),
    )


@functools.cache
def _h200_devices(count: int) -> tuple[Any, ...]:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{count}"
    )
    return tuple(topology.devices[:count])


def _skip_without_compiler() -> None:
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None or not any(
        map(importlib.util.find_spec, plugins)
    ):
        pytest.skip("no GPU compiler: pip install 'effjax[plan]'")


_COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<shape>[^=]*?) (?P<kind>{_COLLECTIVES})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+)\[(?P<dims>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program; XLA merges several into one with several operands."""

    kind: str  # "all-reduce", "all-gather", ...
    elements: int  # of all results together, on one device


def collectives(hlo: str) -> list[Collective]:
    """The collectives in optimized HLO, of any backend, in the order of the text."""
    found = []
    for match in _COLLECTIVE.finditer(hlo):
        arrays = [
            int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
            for _, dims in _ARRAY.findall(match["shape"])
        ]
        # An asynchronous all-gather or permute names its operands too: (operands, results).
        if match["start"] and match["kind"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]
        found.append(Collective(match["kind"], sum(arrays)))
    return found
