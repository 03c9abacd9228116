"""Peak rates of devices, from their data sheets, for the modelled time of a step."""

import dataclasses
import re
from collections.abc import Mapping

from ..ops._common.arguments import as_number
from .targets import Target, find_target


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
        for field in dataclasses.fields(self)[1:]:
            as_number(field.name, getattr(self, field.name), lambda rate: rate > 0, "above 0")

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of products of a dtype, which may lack an entry."""
        bits = re.search(r"\d+", dtype)
        is_wide = bits is not None and int(bits[0]) > 16
        return self.flops.get(dtype, self.flops["f32_highest" if is_wide else "bf16"])


def find_rates(target: str | Target) -> Rates:
    """Return the published peak rates of a target.

    For a GPU that a file describes, they follow from its compute capability, number of
    multiprocessors, clock, memory bandwidth and links.

    Raises:
        ValueError: for an unknown target, or a file that lacks these figures.
    """
    if isinstance(target, Target):
        # A file can have the name of a built-in target.
        is_built_in = target.name in _RATES and target.config == find_target(target.name).config
        return _RATES[target.name] if is_built_in else _rates_from_config(target)
    if target in _RATES:
        return _RATES[target]
    raise ValueError(f"`target` (={target!r}) must be one of {', '.join(_RATES)}.")


def _nvidia(
    bf16: float,
    f32: float,
    *,
    memory: float,
    link: float,
    interconnect: float,
    f64: float,
    f8: float | None = None,
    s8: float | None = None,
) -> Rates:
    """Return the rates of a GPU; products in TFLOP/s, bandwidths in GB/s.

    Args:
        bf16: bfloat16 and float16 with accumulation in float32. TF32 has half that rate.
        f32: float32 without tensor cores.
        memory: device memory.
        link: host link, one way.
        interconnect: NVLink, one way; the host link on GPUs without NVLink.
        f64: float64, on tensor cores if they support it.
        f8: float8; the rate of bfloat16 if None.
        s8: int8; twice the rate of bfloat16 if None.
    """
    tera = {
        "f8": f8 or bf16, "s8": s8 or 2 * bf16, "bf16": bf16, "f16": bf16, "f32": bf16 / 2,
        "f32_highest": f32, "f64": f64,
    }  # fmt: skip
    flops = {dtype: rate * 1e12 for dtype, rate in tera.items()}
    return Rates(flops, memory * 1e9, link * 1e9, link * 1e9, interconnect * 1e9)


def _tpu(
    bf16: float, *, memory: float, interconnect: float, link: float, s8: float, f8: float
) -> Rates:
    """Return the rates of a TPU device; products in TFLOP/s, bandwidths in GB/s.

    float32 products take one pass of bfloat16 at JAX's default precision, and six at the highest.
    """
    tera = {
        "f8": f8, "s8": s8, "bf16": bf16, "f16": bf16, "f32": bf16, "f32_highest": bf16 / 6,
    }  # fmt: skip
    flops = {dtype: rate * 1e12 for dtype, rate in tera.items()}
    return Rates(flops, memory * 1e9, link * 1e9, link * 1e9, interconnect * 1e9)


_PCIE_4, _PCIE_5 = 32, 64  # 16 lanes, one way

# Google publishes no host bandwidth of TPUs. The figures here are assumptions: 16 GB/s, or 32 GB/s
# from v6e on, per chip. A device of v4 and tpu7x is half a chip.
_RATES = {
    "h100": _nvidia(989.4, 66.9, f8=1978.9, f64=66.9, memory=3352, link=_PCIE_5, interconnect=450),
    "h200": _nvidia(989.4, 66.9, f8=1978.9, f64=66.9, memory=4800, link=_PCIE_5, interconnect=450),
    "gh200": _nvidia(989.4, 66.9, f8=1978.9, f64=66.9, memory=4000, link=450, interconnect=450),
    "b200": _nvidia(2250, 75, f8=4500, f64=37, memory=7672, link=_PCIE_5, interconnect=900),
    # A Grace CPU's link is shared by two GPUs.
    "gb200": _nvidia(2500, 80, f8=5000, f64=40, memory=8000, link=225, interconnect=900),
    "a100-80": _nvidia(312, 19.5, f64=19.5, memory=2039, link=_PCIE_4, interconnect=300),
    "a100-40": _nvidia(312, 19.5, f64=19.5, memory=1555, link=_PCIE_4, interconnect=300),
    "l4": _nvidia(121, 30.3, f8=242.5, f64=0.47, memory=300, link=_PCIE_4, interconnect=_PCIE_4),
    "l40s": _nvidia(362, 91.6, f8=733, f64=1.43, memory=864, link=_PCIE_4, interconnect=_PCIE_4),
    "rtx4090": _nvidia(
        165.2, 82.6, f8=330.3, s8=660.6, f64=1.29, memory=1008, link=_PCIE_4, interconnect=_PCIE_4
    ),
    "rtx5090": _nvidia(
        209.5, 104.8, f8=419, s8=838, f64=1.64, memory=1792, link=_PCIE_5, interconnect=_PCIE_5
    ),
    "v4": _tpu(137.5, s8=137.5, f8=137.5, memory=614, link=8, interconnect=150),
    "v5e": _tpu(197, s8=393, f8=197, memory=819, link=16, interconnect=200),
    "v5p": _tpu(459, s8=918, f8=459, memory=2765, link=16, interconnect=600),
    "v6e": _tpu(918, s8=1836, f8=918, memory=1638, link=32, interconnect=400),
    "tpu7x": _tpu(1153.5, s8=1153.5, f8=2307, memory=3690, link=16, interconnect=300),
}

# Dense bfloat16 FLOPs per clock of a multiprocessor's tensor cores, by compute capability. Where
# consumer and data center GPUs of one capability differ, the higher one.
_TENSOR_FLOPS = {
    (8, 0): 2048, (8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
    (10, 3): 8192, (12, 0): 1024, (12, 1): 1024,
}  # fmt: skip


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
    # Newer than all of them, or between two: the last one before.
    known = max((c for c in _TENSOR_FLOPS if c <= capability), default=min(_TENSOR_FLOPS))
    clocks = figures["core_count"] * figures["clock_rate_ghz"] / 1e3  # TFLOP/s of one FLOP a clock
    bf16, f32 = clocks * _TENSOR_FLOPS[known], clocks * 2 * figures["fpus_per_core"]
    pcie = figures["pcie_bandwidth"] / 1e9
    nvlink = (read_figure(target, "active_links") or 0) * (50 if capability >= (10, 0) else 25)
    return _nvidia(
        bf16, f32, f8=2 * bf16 if capability >= (8, 9) else None,
        f64=f32 if capability in ((8, 0), (9, 0)) else f32 / 64,
        memory=figures["memory_bandwidth"] / 1e9, link=pcie, interconnect=nvlink or pcie,
    )  # fmt: skip
