"""Instruction counts of the CUDA kernels, read from their machine code.

`python -m benchmarks.checks.sass LIBRARY` needs cuobjdump and nvdisasm, and no GPU.

A pack is what a thread handles in one turn of the innermost loop: 16 bytes of columns, of an image
or of its gradient. Its cost is the instructions of that loop, and a share of those around it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..results import Result, write_json


class Spec(NamedTuple):
    """Rules to count the instructions of a kernel.

    Attributes:
        marker: an instruction of the innermost loop, by the beginning of its name.
        markers_per_pack: how often it occurs for one pack, if it stores or adds the whole pack. The
            sample lies inside, so that all four corners are read.
        turns: given the channels of a pack, the numbers of packs that a thread handles in one turn
            of each loop around the innermost one, from the inside out, and then in total.
        budgets: largest number of instructions per pack on every architecture, by dtype.
        loads: the loads of which at least `MIN_LOADS_IN_FLIGHT` must start together, by the
            beginning of their name. None for a kernel without them.
    """

    marker: str
    markers_per_pack: int
    turns: Callable[[int], tuple[float, ...]]
    budgets: dict[str, int]
    loads: str | None = "LDG"

    @property
    def most_adds(self) -> int:
        """Largest number of instructions that add a pack's gradients, with four numbers each."""
        return self.markers_per_pack if self.marker == "RED" else 0


def _budgets(float32: int, half: int) -> dict[str, int]:
    return {"float32": float32, "bfloat16": half, "float16": half}


CONV_CHANNELS = 128
CONV_LANES = 8  # threads that share a sample in the backward pass
HEAD_CHANNELS = 32  # one pack for each thread
POINTS = 16  # of a query
ENTRIES = 8  # corners of samples that share a pixel
ROI_CHANNELS = 256
ROI_SAMPLES = 2  # along each axis of a bin
ROI_PACKS = 2048 / 256  # of a thread: of a block, by threads
ROI_FOUND = 16  # bins near a tile, in one round of the search

KERNELS = {
    "columns": Spec("STG", 1, lambda v: (CONV_CHANNELS / v,), _budgets(120, 230)),
    "gradients": Spec(
        "RED", 4,
        lambda v: (CONV_CHANNELS / v / CONV_LANES, CONV_CHANNELS / v), _budgets(320, 320),
    ),
    "attend": Spec(
        "LDG.E.128", 4, lambda v: (HEAD_CHANNELS / v, POINTS, POINTS), _budgets(100, 180),
        loads="LDG.E.128",
    ),
    "attend_backward": Spec(
        "RED", 4, lambda v: (1, HEAD_CHANNELS / v, POINTS), _budgets(270, 300)
    ),
    "attend_scatter": Spec(
        "LDG.E.128", 1, lambda v: (ENTRIES, ENTRIES), _budgets(110, 130), loads="LDG.E.128"
    ),
    "roi_pool": Spec(
        "LDG.E.128", 4,
        lambda v: (ROI_SAMPLES, ROI_SAMPLES**2, ROI_SAMPLES**2 * ROI_PACKS), _budgets(150, 220),
        loads="LDG.E.128",
    ),
    "roi_gradients": Spec(
        "RED", 4,
        lambda v: (
            ROI_SAMPLES, ROI_SAMPLES**2, ROI_SAMPLES**2 * ROI_CHANNELS / v / CONV_LANES,
            ROI_SAMPLES**2 * ROI_CHANNELS / v,
        ), _budgets(220, 220),
    ),
    "roi_gather": Spec(
        "LDG.E.128", 1, lambda v: (ROI_FOUND, ROI_FOUND), _budgets(90, 110), loads="LDG.E.128"
    ),
}  # fmt: skip
MIN_LOADS_IN_FLIGHT = 4
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# C++ types as mangled names spell them.
_TYPES = {"f": "float32", "d": "float64", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}
_BITS = {"": 32, "i": 32, "l": 64}
_NAME = re.compile(r"_ZN6effjax\d+(\w+?)_kernelI(f|d|\d+__\w+?)[fd]Li(\d+)E([il]?)E")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;", re.M)


class Instruction(NamedTuple):
    """A line of machine code."""

    address: int
    name: str
    operands: str


class Kernel(NamedTuple):
    """A kernel, by its template's arguments."""

    function: str
    dtype: str
    channels: int  # per pack
    index_bits: int  # 32 if the kernel has no such argument


def find_tool(name: str) -> str | None:
    """Find cuobjdump or nvdisasm on the PATH, beside nvcc, or in PyPI's packages."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", str(packages)]
    return shutil.which(name, path=os.pathsep.join(places))


def has_tools() -> bool:
    return bool(find_tool("cuobjdump") and find_tool("nvdisasm"))


def _cuobjdump(library: Path, option: str, architecture: str) -> str:
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        sys.exit("cuobjdump and nvdisasm are missing. Run pip install '.[test]' here.")
    # cuobjdump calls nvdisasm by its name.
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ.get("PATH", "")])
    command = [cuobjdump, option, "-arch", architecture, str(library)]
    environment = os.environ | {"PATH": path}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


def _split_kernels(text: str, separator: str) -> dict[Kernel, str]:
    bodies = {}
    for body in text.split(separator)[1:]:
        if (match := _NAME.match(body)) and match[1] in KERNELS:
            function, dtype, channels, index = match.groups()
            bodies[Kernel(function, _TYPES[dtype], int(channels), _BITS[index])] = body
    return bodies


def read_kernels(library: Path, architecture: str) -> dict[Kernel, list[Instruction]]:
    """Return the instructions of each kernel."""
    bodies = _split_kernels(_cuobjdump(library, "-sass", architecture), "Function : ")
    return {kernel: parse_instructions(body) for kernel, body in bodies.items()}


def parse_instructions(text: str) -> list[Instruction]:
    lines = _LINE.findall(text)
    return [Instruction(int(address, 16), name, operands) for address, name, operands in lines]


def read_registers(library: Path, architecture: str) -> dict[Kernel, dict[str, int]]:
    """Return registers per thread, shared memory, and bytes of spilled registers."""
    usage = {}
    text = _cuobjdump(library, "-res-usage", architecture)
    for kernel, body in _split_kernels(text, "Function ").items():
        sizes = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", body)}
        usage[kernel] = {
            "registers": sizes["REG"],
            "shared_bytes": sizes["SHARED"],
            "spilled_bytes": sizes["STACK"] + sizes["LOCAL"],
        }
    return usage


def find_loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """Return the first and last index of each loop: the targets and places of branches back.

    Code behind the last exit is the continuation of a branch, for rare cases.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    end = max((i for i, instruction in enumerate(code) if instruction.name == "EXIT"), default=0)
    loops = []
    for i, instruction in enumerate(code[:end]):
        target = re.search(r"0x([0-9a-f]+)$", instruction.operands)
        if instruction.name.startswith("BRA") and target:
            start = index.get(int(target[1], 16), i)
            if start < i:
                loops.append((start, i))
    return loops


def count_instructions(kernel: Kernel, code: list[Instruction]) -> dict[str, int | float]:
    """Count instructions per pack."""
    spec = KERNELS[kernel.function]
    loops = find_loops(code)
    names = {spec.marker, spec.loads or spec.marker}
    marked = [(a, b) for a, b in loops if all(_count(code[a : b + 1], name) for name in names)]
    start, end = min(marked, key=lambda loop: loop[1] - loop[0])
    body = code[start : end + 1]
    if spec.marker == "RED":
        packs = _count_added(body) / (spec.markers_per_pack * kernel.channels)
    else:
        packs = _count(body, spec.marker) / spec.markers_per_pack
    exit_index = next(i for i in range(end + 1, len(code)) if code[i].name == "EXIT")

    # Other loops run instead of this one, for other arguments, or rarely. They do not count.
    around = sorted((a, b) for a, b in loops if a <= start and end <= b and (a, b) != (start, end))
    nest = [*reversed(around), (0, exit_index)]
    counted = set(range(start, end + 1))
    for a, b in set(loops) - set(around):
        counted |= set(range(a, b + 1))
    share = 0.0
    for (a, b), turns in zip(nest, spec.turns(kernel.channels), strict=True):
        own = set(range(a, b + 1)) - counted
        share += len(own) / turns
        counted |= own
    return {
        "loop_instructions": round(len(body) / packs, 1),
        "sample_instructions": round(share, 1),
        "per_pack": round(len(body) / packs + share, 1),
        "loads_in_flight": count_loads_in_flight(body, spec.loads) if spec.loads else 0,
        "adds_per_pack": round(_count(body, "RED") / packs, 1),
    }


def _count(code: list[Instruction], name: str) -> int:
    return sum(instruction.name.startswith(name) for instruction in code)


def _count_added(code: list[Instruction]) -> int:
    """Count the numbers added to memory: one per instruction before sm_90, up to four since."""
    adds = (instruction.name for instruction in code if instruction.name.startswith("RED"))
    return sum(4 if "x4" in name else 1 for name in adds)


def count_loads_in_flight(body: list[Instruction], name: str = "LDG") -> int:
    """Count the loads of this name that start before a register that they loaded is read."""
    loaded: set[int] = set()
    loads = 0
    for instruction in body:
        destination, _, sources = instruction.operands.partition(",")
        if instruction.name.startswith(name):
            size = re.search(r"\.(128|64)", instruction.name)
            first = int(re.sub(r"\D", "", destination) or 0)
            loaded |= set(range(first, first + (int(size[1]) // 32 if size else 1)))
            loads += 1
            continue
        if instruction.name.startswith(("ST", "RED")):  # these have no destination
            sources = instruction.operands
        if loaded & {int(n) for n in re.findall(r"\bR(\d+)", sources)}:
            break
    return loads


def measure(library: Path, architecture: str) -> list[dict[str, str | int | float]]:
    """Return a row for each kernel with packs of 16 bytes and indices of 32 bits."""
    registers = read_registers(library, architecture)
    rows = []
    for kernel, code in sorted(read_kernels(library, architecture).items()):
        budget = KERNELS[kernel.function].budgets.get(kernel.dtype)
        if budget and kernel.channels > 1 and kernel.index_bits == 32:
            counts = count_instructions(kernel, code) | registers[kernel]
            name = f"{kernel.function}, {kernel.dtype}, {architecture}"
            rows.append({"name": name, **counts, "budget": budget})
    return rows


def find_faults(rows: list[dict]) -> list[str]:
    """Return a message for each exceeded budget."""
    faults = []
    for row in rows:
        if row["per_pack"] > row["budget"]:
            count, budget = row["per_pack"], row["budget"]
            faults.append(f"{row['name']}: {count} instructions per pack, more than {budget}")
        function, _, architecture = row["name"].split(", ")
        spec = KERNELS[function]
        if spec.loads and row["loads_in_flight"] < MIN_LOADS_IN_FLIGHT:
            faults.append(f"{row['name']}: only {row['loads_in_flight']} loads in flight")
        if row["spilled_bytes"]:
            faults.append(f"{row['name']}: {row['spilled_bytes']} bytes of spilled registers")
        # One instruction adds four numbers, from sm_90 on.
        if int(architecture.removeprefix("sm_")) >= 90 and row["adds_per_pack"] > spec.most_adds:
            faults.append(f"{row['name']}: {row['adds_per_pack']} additions per pack")
    return faults


def kernel_names() -> set[str]:
    """Return the names of the rows of a complete library."""
    return {
        f"{function}, {dtype}, {architecture}"
        for function, spec in KERNELS.items()
        for dtype in spec.budgets
        for architecture in ARCHITECTURES
    }


def find_missing(rows: list[dict]) -> list[str]:
    """Return a message for each kernel that has a budget and was not found."""
    names = kernel_names()
    return [f"{name}: not in the library" for name in sorted(names - {row["name"] for row in rows})]


def main(argv: list[str] | None = None) -> int:
    """Count the instructions; return 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("library", type=Path, help="The CUDA library, or an object file.")
    parser.add_argument("--json", type=Path, help="Folder for cuda_sass.json.")
    parser.add_argument("--partial", action="store_true", help="Accept missing kernels.")
    options = parser.parse_args(argv)
    rows = [row for name in ARCHITECTURES for row in measure(options.library, name)]
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    if options.json is not None:
        title = "CUDA kernels: instructions per pack of 16 bytes"
        sizes = {
            "conv_channels": CONV_CHANNELS, "head_channels": HEAD_CHANNELS, "points": POINTS,
            "entries_per_pixel": ENTRIES, "roi_channels": ROI_CHANNELS, "roi_samples": ROI_SAMPLES,
            "roi_bins_per_round": ROI_FOUND,
        }  # fmt: skip
        result = Result("cuda_sass", title, sizes, rows)
        command = f"python -m benchmarks.checks.sass LIBRARY --json {options.json}"
        write_json(result, options.json, command)
    faults = find_faults(rows) + ([] if options.partial else find_missing(rows))
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
