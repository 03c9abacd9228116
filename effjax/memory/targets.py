"""Target GPUs, described by published figures."""

import dataclasses
import functools
import re
from pathlib import Path

from ..ops._common.arguments import as_number, describe


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: the name for `plan(target=name)`.
        description: the product name.
        memory_bytes: memory of the device as reported by CUDA.
        config: the text of an XLA `GpuTargetConfigProto`, the compiler's description of the device.
    """

    name: str
    description: str
    memory_bytes: int
    config: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        for name in ("name", "description", "config"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"`{name}` must be a string, not {describe(value)}.")
        as_number("memory_bytes", self.memory_bytes, lambda size: size > 0, "above 0")


def list_targets() -> tuple[str, ...]:
    """Return the names of the built-in target GPUs.

    `plan` also accepts a path to the text of a `GpuTargetConfigProto`, for any other GPU. Its most
    important fields are `device_memory_size`, `cuda_compute_capability`, `core_count` and
    `shared_memory_per_block_optin`.
    """
    return tuple(_TARGETS)


def find_target(target: str | Path | Target) -> Target:
    """Return the target with a name, or the one described by a text proto file."""
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and target in _TARGETS:
        return _TARGETS[target]
    path = Path(target)
    try:
        config = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(
            f"`target` (={str(target)!r}) must be one of {', '.join(_TARGETS)}, or a file with the "
            f"text of a GpuTargetConfigProto ({error.strerror})."
        ) from error
    memory = re.search(r"\bdevice_memory_size:\s*(\d+)", config)
    if memory is None:
        raise ValueError(
            f"`target` (={str(target)!r}) must be the text of a GpuTargetConfigProto with a "
            "device_memory_size."
        )
    description = re.search(r'^device_description_str:\s*"([^"]*)"', config, re.MULTILINE)
    name = path.name.partition(".")[0]
    return Target(name, description[1] if description else name, int(memory[1]), config)


def _target(
    name: str,
    description: str,
    *,
    memory_bytes: int,
    bandwidth: float,
    capability: tuple[int, int],
    cores: int,
    fpus_per_core: int,
    clock_ghz: float,
    l2_bytes: int,
    shared_kib_per_core: int,
    threads_per_core: int = 2048,
    nvlinks: int = 0,
) -> Target:
    """Return a target from the figures of its data sheet and compute capability.

    Args:
        name: the target's name.
        description: the product name.
        memory_bytes: size of device memory.
        bandwidth: memory bandwidth in bytes per second.
        capability: CUDA compute capability.
        cores: number of streaming multiprocessors.
        fpus_per_core: float32 units per multiprocessor.
        clock_ghz: boost clock.
        l2_bytes: size of the L2 cache.
        shared_kib_per_core: KiB of shared memory per multiprocessor. One block can use all except
            one KiB.
        threads_per_core: resident threads per multiprocessor.
        nvlinks: number of active NVLinks.
    """
    major, minor = capability
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    suffix = "a" if major >= 9 else ""
    config = f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {(shared_kib_per_core - 1) * 1024}
  shared_memory_per_core: {shared_kib_per_core * 1024}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory_bytes}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  device_address_bits: 64
  pcie_bandwidth: {32 * 2**30}
  ecc_enabled: true
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {nvlinks} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{description}"
"""
    return Target(name, description, memory_bytes, config)


_ampere = functools.partial(
    _target, capability=(8, 0), cores=108, fpus_per_core=64, clock_ghz=1.41, l2_bytes=40 * 2**20,
    shared_kib_per_core=164, nvlinks=12,
)  # fmt: skip
_hopper = functools.partial(
    _target, capability=(9, 0), cores=132, fpus_per_core=128, clock_ghz=1.98, l2_bytes=50 * 2**20,
    shared_kib_per_core=228, nvlinks=18,
)  # fmt: skip
_all_targets = (
    _hopper("h200", "NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, bandwidth=4.8e12),
    _hopper("h100", "NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, bandwidth=3.352e12),
    _hopper("gh200", "NVIDIA GH200 480GB", memory_bytes=96_768 * 2**20, bandwidth=4.0e12),
    _target(
        "b200", "NVIDIA B200", memory_bytes=191_514_411_008, bandwidth=7.672e12,
        capability=(10, 0), cores=148, fpus_per_core=128, clock_ghz=1.965, l2_bytes=132_644_864,
        shared_kib_per_core=228, nvlinks=18,
    ),
    _ampere("a100-80", "NVIDIA A100-SXM4-80GB", memory_bytes=85_100_068_864, bandwidth=2.039e12),
    _ampere("a100-40", "NVIDIA A100-SXM4-40GB", memory_bytes=42_331_013_120, bandwidth=1.555e12),
    _target(
        "l4", "NVIDIA L4", memory_bytes=22 * 2**30, bandwidth=3.0e11, capability=(8, 9), cores=58,
        fpus_per_core=128, clock_ghz=2.04, l2_bytes=48 * 2**20, shared_kib_per_core=100,
        threads_per_core=1536,
    ),
)  # fmt: skip
_TARGETS = {target.name: target for target in _all_targets}
