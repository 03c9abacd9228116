"""Devices to plan for, described by published figures: one row for each."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .._files import read_text
from ..ops._common.arguments import as_number, describe


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of one device. Bandwidths are in bytes per second, links in one direction.

    Change some of them with `dataclasses.replace(find_rates("h100"), to_device=25e9)`.

    Attributes:
        flops: FLOP/s of dense matrix products by dtype of the operands: "bf16", "f16", "f32" (at
            JAX's default precision: TF32 on GPUs, one pass of bfloat16 on TPUs), "f32_highest"
            (`jax.lax.Precision.HIGHEST`), "f64", "f8", "s8". A dtype without an entry runs at the
            rate of "bf16", or of "f32_highest" if it has more than 16 bits.
        memory: device memory.
        to_device: link from the host.
        to_host: link to the host.
        interconnect: what one device can send to the others.
    """

    flops: Mapping[str, float]
    memory: float
    to_device: float
    to_host: float
    interconnect: float

    def __post_init__(self) -> None:
        missing = {"bf16", "f32_highest"} - set(self.flops)
        if missing:
            raise ValueError(f"`flops` must have an entry {missing.pop()!r}.")
        for name, rate in self.flops.items():
            as_number(f"flops[{name!r}]", rate, lambda rate: rate > 0, "above 0")
        for name in ("memory", "to_device", "to_host", "interconnect"):
            as_number(name, getattr(self, name), lambda rate: rate > 0, "above 0")

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of products of a dtype, which may lack an entry."""
        bits = re.search(r"\d+", dtype)
        is_wide = bits is not None and int(bits[0]) > 16
        return self.flops.get(dtype, self.flops["f32_highest" if is_wide else "bf16"])


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU or TPU to compile for.

    Attributes:
        name: the name for `plan(target=name)`.
        description: the product name.
        memory_bytes: memory of the device as reported by CUDA; on a TPU, what its compiler allows
            a program to use. A device of tpu7x is one of the two cores of a chip.
        config: the text of an XLA `GpuTargetConfigProto`, the compiler's description of the device;
            on a TPU the name of its generation.
        platform: "cuda" or "tpu".
        devices_per_chip: number of JAX devices of a chip.
        host_bytes_per_device: host memory of a TPU's virtual machine in Google Cloud, divided by
            its devices; 0 for a GPU, whose host can be any machine.
        rates: published peak rates; None for those that follow from the figures of `config`.
    """

    name: str
    description: str
    memory_bytes: int
    config: str = dataclasses.field(repr=False)
    platform: Literal["cuda", "tpu"] = "cuda"
    devices_per_chip: int = 1
    host_bytes_per_device: int = 0
    rates: Rates | None = dataclasses.field(default=None, repr=False)

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
        config = read_text(path)
    except (OSError, ValueError) as error:
        close = suggest_targets(str(target))
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"`target` (={str(target)!r}) must be one of {', '.join(_TARGETS)}, or a file with the "
            f"text of a GpuTargetConfigProto ({getattr(error, 'strerror', error)}).{hint}"
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


def suggest_targets(text: str) -> list[str]:
    """Return the names of the targets that contain a text, such as those of "4090"."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return [name for name in _TARGETS if plain and plain in name.replace("-", "")]


def find_rates(target: str | Path | Target) -> Rates:
    """Return the published peak rates of a target.

    For a GPU that a file describes, they follow from its compute capability, number of
    multiprocessors, clock, memory bandwidth and links.

    Raises:
        ValueError: for an unknown target, or a file that lacks these figures.
    """
    target = find_target(target)
    return target.rates or _rates_from_config(target)


def _gpu(
    name: str,
    description: str,  # the product name
    *,
    memory_bytes: int,
    bandwidth: float,  # of the memory, bytes per second
    capability: tuple[int, int],
    cores: int,  # streaming multiprocessors
    fpus_per_core: int,  # float32 units
    clock_ghz: float,  # boost clock
    l2_bytes: int,
    shared_kib_per_core: int,  # one block can use all except one KiB
    bf16: float,  # TFLOP/s, also of float16, with sums in float32; TF32 has half that rate
    f32: float,  # TFLOP/s without tensor cores
    f64: float,  # TFLOP/s, on tensor cores if they support it
    host_link: float,  # bytes per second, one way
    f8: float | None = None,  # TFLOP/s; those of bfloat16 if None
    s8: float | None = None,  # TFLOP/s; twice those of bfloat16 if None
    threads_per_core: int = 2048,
    nvlinks: int = 0,  # active ones; without them, devices use the host link
) -> Target:
    """Return a GPU from the figures of its data sheet and compute capability."""
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
  pcie_bandwidth: {host_link:.0f}
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
    links = nvlinks * _nvlink_rate(capability)
    rates = _make_rates(_gpu_products(bf16, f32, f64, f8, s8), bandwidth, host_link, links)
    return Target(name, description, memory_bytes, config, rates=rates)


def _nvlink_rate(capability: tuple[int, int]) -> float:
    """Return the bytes per second of one NVLink, one way."""
    return 50e9 if capability >= (10, 0) else 25e9


def _gpu_products(
    bf16: float, f32: float, f64: float, f8: float | None, s8: float | None = None
) -> dict[str, float]:
    """Return the TFLOP/s of products on a GPU; the arguments are those of `_gpu`."""
    return {
        "f8": f8 or bf16, "s8": s8 or 2 * bf16, "bf16": bf16, "f16": bf16, "f32": bf16 / 2,
        "f32_highest": f32, "f64": f64,
    }  # fmt: skip


def _make_rates(
    products: Mapping[str, float], memory: float, host_link: float, interconnect: float
) -> Rates:
    flops = {dtype: rate * 1e12 for dtype, rate in products.items()}
    return Rates(flops, memory, host_link, host_link, interconnect or host_link)


def _tpu(
    generation: str,
    *,
    memory_gib: float,
    chip_host_gb: int,  # GB of the host's memory per chip; all else is per device
    bf16: float,  # TFLOP/s
    s8: float,
    f8: float,
    bandwidth: float,  # bytes per second
    host_link: float,
    interconnect: float,
    devices_per_chip: int = 1,
) -> Target:
    """Return a TPU from its published figures."""
    # float32 products take one pass of bfloat16 at JAX's default precision, six at the highest.
    products = {
        "f8": f8, "s8": s8, "bf16": bf16, "f16": bf16, "f32": bf16, "f32_highest": bf16 / 6,
    }  # fmt: skip
    return Target(
        generation, "TPU7x" if generation == "tpu7x" else f"TPU {generation}",
        int(memory_gib * 2**30), generation, "tpu", devices_per_chip,
        chip_host_gb * 10**9 // devices_per_chip,
        _make_rates(products, bandwidth, host_link, interconnect),
    )  # fmt: skip


_PCIE_4, _PCIE_5 = 32e9, 64e9  # 16 lanes, one way

_ampere = functools.partial(
    _gpu, capability=(8, 0), cores=108, fpus_per_core=64, clock_ghz=1.41, l2_bytes=40 * 2**20,
    shared_kib_per_core=164, bf16=312, f32=19.5, f64=19.5, host_link=_PCIE_4, nvlinks=12,
)  # fmt: skip
_ada = functools.partial(
    _gpu, capability=(8, 9), fpus_per_core=128, shared_kib_per_core=100, threads_per_core=1536,
    host_link=_PCIE_4,
)  # fmt: skip
_hopper = functools.partial(
    _gpu, capability=(9, 0), cores=132, fpus_per_core=128, clock_ghz=1.98, l2_bytes=50 * 2**20,
    shared_kib_per_core=228, bf16=989.4, f32=66.9, f64=66.9, f8=1978.9, host_link=_PCIE_5,
    nvlinks=18,
)  # fmt: skip
_blackwell = functools.partial(
    _gpu, capability=(10, 0), fpus_per_core=128, clock_ghz=1.965, l2_bytes=132_644_864,
    shared_kib_per_core=228, nvlinks=18,
)  # fmt: skip
# Google publishes no host bandwidth of TPUs. The figures here are assumptions: 16 GB/s, or 32 GB/s
# from v6e on, per chip. A device of tpu7x is half a chip.
_all_targets = (
    _hopper("h200", "NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, bandwidth=4.8e12),
    _hopper("h100", "NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, bandwidth=3.352e12),
    _hopper(
        "gh200", "NVIDIA GH200 480GB", memory_bytes=96_768 * 2**20, bandwidth=4.0e12,
        host_link=450e9,
    ),
    _blackwell(
        "b200", "NVIDIA B200", memory_bytes=191_514_411_008, bandwidth=7.672e12, cores=148,
        bf16=2250, f32=75, f64=37, f8=4500, host_link=_PCIE_5,
    ),
    _blackwell(
        "gb200", "NVIDIA GB200", memory_bytes=188_732 * 2**20, bandwidth=8e12, cores=152,
        bf16=2500, f32=80, f64=40, f8=5000,
        host_link=225e9,  # a Grace CPU's link is shared by two GPUs
    ),
    _ampere("a100-80", "NVIDIA A100-SXM4-80GB", memory_bytes=85_100_068_864, bandwidth=2.039e12),
    _ampere("a100-40", "NVIDIA A100-SXM4-40GB", memory_bytes=42_331_013_120, bandwidth=1.555e12),
    _ada(
        "l4", "NVIDIA L4", memory_bytes=22 * 2**30, bandwidth=3.0e11, cores=58, clock_ghz=2.04,
        l2_bytes=48 * 2**20, bf16=121, f32=30.3, f64=0.47, f8=242.5,
    ),
    _ada(
        "l40s", "NVIDIA L40S", memory_bytes=45_456 * 2**20, bandwidth=8.64e11, cores=142,
        clock_ghz=2.52, l2_bytes=96 * 2**20, bf16=362, f32=91.6, f64=1.43, f8=733,
    ),
    _ada(
        "rtx4090", "NVIDIA GeForce RTX 4090", memory_bytes=24_210 * 2**20, bandwidth=1.008e12,
        cores=128, clock_ghz=2.52, l2_bytes=72 * 2**20, bf16=165.2, f32=82.6, f64=1.29, f8=330.3,
        s8=660.6,
    ),
    _gpu(
        "rtx5090", "NVIDIA GeForce RTX 5090", memory_bytes=32_110 * 2**20, bandwidth=1.792e12,
        capability=(12, 0), cores=170, fpus_per_core=128, clock_ghz=2.407, l2_bytes=96 * 2**20,
        shared_kib_per_core=100, threads_per_core=1536, bf16=209.5, f32=104.8, f64=1.64, f8=419,
        s8=838, host_link=_PCIE_5,
    ),
    _tpu(
        "v4", memory_gib=30.75, chip_host_gb=102, bf16=275, s8=275, f8=275, bandwidth=1228e9,
        host_link=16e9, interconnect=300e9,
    ),
    _tpu(
        "v5e", memory_gib=15.75, chip_host_gb=48, bf16=197, s8=393, f8=197, bandwidth=819e9,
        host_link=16e9, interconnect=200e9,
    ),
    _tpu(
        "v5p", memory_gib=95.73, chip_host_gb=112, bf16=459, s8=918, f8=459, bandwidth=2765e9,
        host_link=16e9, interconnect=600e9,
    ),
    _tpu(
        "v6e", memory_gib=31.24, chip_host_gb=180, bf16=918, s8=1836, f8=918, bandwidth=1638e9,
        host_link=32e9, interconnect=400e9,
    ),
    _tpu(
        "tpu7x", memory_gib=94.74, chip_host_gb=240, bf16=1153.5, s8=1153.5, f8=2307,
        bandwidth=3690e9, host_link=16e9, interconnect=300e9, devices_per_chip=2,
    ),
)  # fmt: skip
_TARGETS = {target.name: target for target in _all_targets}

# Measured time of training steps relative to that of their products at the peak rates: the least
# and the largest ratio, see docs/measured/planned/published.json.
MEASURED_FACTORS = {
    "rtx4090": (1.1, 1.22), "rtx5090": (1.03, 1.12), "l40s": (2.12, 2.43), "h100": (1.6, 1.96),
    "v5e": (1.3, 1.44),
}  # fmt: skip


def expected_seconds(target: Target, seconds: float) -> tuple[float, float] | None:
    """Return the shortest and the longest time to expect of a step with a modelled time.

    None if no measurements of the device are known.
    """
    if _TARGETS.get(target.name) != target or target.name not in MEASURED_FACTORS:
        return None
    least, most = MEASURED_FACTORS[target.name]
    return least * seconds, most * seconds


# Dense bfloat16 FLOPs per clock of a multiprocessor's tensor cores, by compute capability. Where
# consumer and data center GPUs of one capability differ, the higher one.
_TENSOR_FLOPS = {
    (8, 0): 2048, (8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
    (10, 3): 8192, (12, 0): 1024, (12, 1): 1024,
}  # fmt: skip
# Rate of float64 as a fraction of that of float32; other GPUs have 1/64.
_F64_FRACTIONS = {(8, 0): 1, (9, 0): 1, (10, 0): 1 / 2}


def read_figure(target: Target, field: str) -> float | None:
    """Return a number of a target's `GpuTargetConfigProto`; None if it lacks the field.

    "major" and "minor" are those of the compute capability.
    """
    block = target.config
    if field in ("major", "minor"):
        match = re.search(r"cuda_compute_capability\s*{([^}]*)}", block)
        block = match[1] if match else ""
    match = re.search(rf"\b{field}:\s*([\d.eE+-]+)", block)
    return float(match[1]) if match else None


def _rates_from_config(target: Target) -> Rates:
    figures = {}
    for field in (
        "core_count", "clock_rate_ghz", "fpus_per_core", "memory_bandwidth", "pcie_bandwidth",
        "major",
    ):  # fmt: skip
        figures[field] = read_figure(target, field)
        if not figures[field]:
            raise ValueError(
                f"`target` (={target.name!r}) has no {field}, which the modelled time needs. Add "
                "it to the file, or give `rates`."
            )
    capability = int(figures["major"]), int(read_figure(target, "minor") or 0)
    # The last one that is not newer. GPUs older than all of them get the rate of the oldest.
    known = max((c for c in _TENSOR_FLOPS if c <= capability), default=min(_TENSOR_FLOPS))
    clocks = figures["core_count"] * figures["clock_rate_ghz"] / 1e3  # TFLOP/s of one FLOP a clock
    bf16, f32 = clocks * _TENSOR_FLOPS[known], clocks * 2 * figures["fpus_per_core"]
    links = (read_figure(target, "active_links") or 0) * _nvlink_rate(capability)
    f8 = 2 * bf16 if capability >= (8, 9) else None
    products = _gpu_products(bf16, f32, f32 * _F64_FRACTIONS.get(capability, 1 / 64), f8)
    return _make_rates(products, figures["memory_bandwidth"], figures["pcie_bandwidth"], links)
