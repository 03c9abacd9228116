"""Target GPUs and TPUs, described by published figures."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Literal

from ..ops._common.arguments import as_number, describe


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU or TPU to compile for.

    Attributes:
        name: the name for `plan(target=name)`.
        description: the product name.
        memory_bytes: memory of the device as reported by CUDA; on a TPU, what its compiler allows
            a program to use. A device of v4 and tpu7x is one of the two cores of a chip.
        config: the text of an XLA `GpuTargetConfigProto`, the compiler's description of the device;
            on a TPU the name of its generation.
        platform: "cuda" or "tpu".
        devices_per_chip: number of JAX devices of a chip.
        host_bytes_per_device: host memory of a TPU's virtual machine in Google Cloud, divided by
            its devices; 0 for a GPU, whose host can be any machine.
    """

    name: str
    description: str
    memory_bytes: int
    config: str = dataclasses.field(repr=False)
    platform: Literal["cuda", "tpu"] = "cuda"
    devices_per_chip: int = 1
    host_bytes_per_device: int = 0

    def __post_init__(self) -> None:
        for name in ("name", "description", "config"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"`{name}` must be a string, not {describe(value)}.")
        as_number("memory_bytes", self.memory_bytes, lambda size: size > 0, "above 0")

    @property
    def is_gpu(self) -> bool:
        """True for a GPU, False for a TPU."""
        return self.platform == "cuda"

    @property
    def default_memory_fraction(self) -> float:
        """The fraction of `memory_bytes` that JAX reserves by default."""
        return 0.75 if self.is_gpu else 1.0

    @property
    def device_kind(self) -> str:
        """The name by which Pallas kernels recognize the generation."""
        capability = re.search(r"cuda_compute_capability \{ major: (\d+)", self.config)
        generation = capability[1] if capability else ""
        return _PALLAS_KINDS.get(generation, "NVIDIA H100") if self.is_gpu else self.description

    def topology(self, num_devices: int) -> str:
        """Return the name of the smallest topology with at least this many devices.

        Raises:
            ValueError: for more devices than the largest topology.
        """
        if self.is_gpu:
            return f"1x1x{num_devices}"
        shapes = _FLAT_SHAPES if self.config in ("v5e", "v6e") else _CUBIC_SHAPES
        for shape in shapes:
            if math.prod(shape) * self.devices_per_chip >= num_devices:
                return f"{self.config}:{'x'.join(map(str, shape))}"
        most = math.prod(shapes[-1]) * self.devices_per_chip
        raise ValueError(
            f"`num_devices` (={num_devices}) must be at most {most} for {self.description}."
        )


# By major compute capability.
_PALLAS_KINDS = {"8": "NVIDIA A100", "9": "NVIDIA H100", "10": "NVIDIA B200"}
# Chips of the topologies of TPUs: a flat or a three-dimensional torus.
_FLAT_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC_SHAPES = (
    (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
    (8, 8, 8),
)  # fmt: skip


def list_targets() -> tuple[str, ...]:
    """Return the names of the built-in targets, GPUs and TPUs.

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


def _gpu(
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
    """Return a GPU from the figures of its data sheet and compute capability.

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


def _tpu(
    generation: str, *, memory_gib: float, chip_host_gb: int, devices_per_chip: int = 1
) -> Target:
    """Return a TPU from figures per device and of the host per chip; the compiler knows more."""
    description = "TPU7x" if generation == "tpu7x" else f"TPU {generation}"
    memory_bytes = int(memory_gib * 2**30)
    host_bytes = chip_host_gb * 10**9 // devices_per_chip
    return Target(
        generation, description, memory_bytes, generation, "tpu", devices_per_chip, host_bytes
    )


_ampere = functools.partial(
    _gpu, capability=(8, 0), cores=108, fpus_per_core=64, clock_ghz=1.41, l2_bytes=40 * 2**20,
    shared_kib_per_core=164, nvlinks=12,
)  # fmt: skip
_ada = functools.partial(
    _gpu, capability=(8, 9), fpus_per_core=128, shared_kib_per_core=100, threads_per_core=1536,
)  # fmt: skip
_hopper = functools.partial(
    _gpu, capability=(9, 0), cores=132, fpus_per_core=128, clock_ghz=1.98, l2_bytes=50 * 2**20,
    shared_kib_per_core=228, nvlinks=18,
)  # fmt: skip
_blackwell = functools.partial(
    _gpu, capability=(10, 0), fpus_per_core=128, clock_ghz=1.965, l2_bytes=132_644_864,
    shared_kib_per_core=228, nvlinks=18,
)  # fmt: skip
_all_targets = (
    _hopper("h200", "NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, bandwidth=4.8e12),
    _hopper("h100", "NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, bandwidth=3.352e12),
    _hopper("gh200", "NVIDIA GH200 480GB", memory_bytes=96_768 * 2**20, bandwidth=4.0e12),
    _blackwell("b200", "NVIDIA B200", memory_bytes=191_514_411_008, bandwidth=7.672e12, cores=148),
    _blackwell("gb200", "NVIDIA GB200", memory_bytes=188_732 * 2**20, bandwidth=8e12, cores=152),
    _ampere("a100-80", "NVIDIA A100-SXM4-80GB", memory_bytes=85_100_068_864, bandwidth=2.039e12),
    _ampere("a100-40", "NVIDIA A100-SXM4-40GB", memory_bytes=42_331_013_120, bandwidth=1.555e12),
    _ada(
        "l4", "NVIDIA L4", memory_bytes=22 * 2**30, bandwidth=3.0e11, cores=58, clock_ghz=2.04,
        l2_bytes=48 * 2**20,
    ),
    _ada(
        "l40s", "NVIDIA L40S", memory_bytes=45_456 * 2**20, bandwidth=8.64e11, cores=142,
        clock_ghz=2.52, l2_bytes=96 * 2**20,
    ),
    _ada(
        "rtx4090", "NVIDIA GeForce RTX 4090", memory_bytes=24_210 * 2**20, bandwidth=1.008e12,
        cores=128, clock_ghz=2.52, l2_bytes=72 * 2**20,
    ),
    _gpu(
        "rtx5090", "NVIDIA GeForce RTX 5090", memory_bytes=32_110 * 2**20, bandwidth=1.792e12,
        capability=(12, 0), cores=170, fpus_per_core=128, clock_ghz=2.407, l2_bytes=96 * 2**20,
        shared_kib_per_core=100, threads_per_core=1536,
    ),
    _tpu("v4", memory_gib=15.25, chip_host_gb=102, devices_per_chip=2),
    _tpu("v5e", memory_gib=15.75, chip_host_gb=48),
    _tpu("v5p", memory_gib=95.73, chip_host_gb=112),
    _tpu("v6e", memory_gib=31.24, chip_host_gb=180),
    _tpu("tpu7x", memory_gib=94.74, chip_host_gb=240, devices_per_chip=2),
)  # fmt: skip
_TARGETS = {target.name: target for target in _all_targets}
