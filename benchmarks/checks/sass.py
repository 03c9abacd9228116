"""Instruction counts of deformable convolution's CUDA kernels, read from their machine code.

`python -m benchmarks.checks.sass LIBRARY` needs cuobjdump and nvdisasm, and no GPU.

A pack is 16 bytes of columns or of dx, which a thread handles in one turn of the innermost loop.
Its cost is the instructions of that loop, and a share of the work per sample of the whole block.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from ..results import Result, write_json

# Largest number of instructions per pack with 128 channels, on each architecture.
BUDGETS = {
    ("columns", "float32"): 120,
    ("columns", "bfloat16"): 230,
    ("columns", "float16"): 230,
    ("gradients", "float32"): 320,
    ("gradients", "bfloat16"): 320,
    ("gradients", "float16"): 320,
}
MIN_LOADS_IN_FLIGHT = 4
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CHANNELS = 128
LANES = 8  # threads that share a sample
# C++ types as mangled names spell them.
_TYPES = {"f": "float32", "d": "float64", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}
_BITS = {"i": 32, "l": 64}
_NAME = re.compile(r"_ZN6effjax\d+(columns|gradients)_kernelI(f|d|\d+__\w+?)[fd]Li(\d+)E([il])E")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;", re.M)


class Instruction(NamedTuple):
    """A line of machine code."""

    address: int
    name: str
    operands: str


class Kernel(NamedTuple):
    """A kernel of deformable convolution, by its template's arguments."""

    function: str  # "columns" or "gradients"
    dtype: str
    channels: int  # per pack
    index_bits: int


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
        if match := _NAME.match(body):
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
    """Return the first and last index of each loop: the targets and places of branches back."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    loops = []
    for i, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)$", instruction.operands)
        if instruction.name.startswith("BRA") and target:
            start = index.get(int(target[1], 16), i)
            if start < i:
                loops.append((start, i))
    return loops


def count_instructions(kernel: Kernel, code: list[Instruction]) -> dict[str, int | float]:
    """Count instructions per pack of a sample that lies inside, so that all corners are read."""
    # Columns are stored once; a gradient is added to four pixels.
    store = "STG" if kernel.function == "columns" else "RED"
    loops = find_loops(code)
    storing = [(a, b) for a, b in loops if _count(code[a : b + 1], store)]
    start, end = min(storing, key=lambda loop: loop[1] - loop[0])
    body = code[start : end + 1]
    packs = _count(body, store) if store == "STG" else _count_added(body) / (4 * kernel.channels)

    # The loop around the innermost one turns once per sample. Loops inside of it that store
    # nothing run only where no dx is needed, and do not count.
    outer = [(a, b) for a, b in storing if a < start and end < b]
    first, last = min(outer, default=(start, end))
    per_turn = set(range(first, last + 1)) if outer else set()
    for a, b in loops:
        if (a, b) not in outer:
            per_turn -= set(range(a, b + 1))
    exit_index = next(i for i in range(last + 1, len(code)) if code[i].name == "EXIT")
    per_block = first + exit_index - last
    packs_per_sample = CHANNELS / kernel.channels
    share = (per_block + len(per_turn) * LANES) / packs_per_sample
    return {
        "loop_instructions": round(len(body) / packs, 1),
        "sample_instructions": round(share, 1),
        "per_pack": round(len(body) / packs + share, 1),
        "loads_in_flight": count_loads_in_flight(body),
    }


def _count(code: list[Instruction], name: str) -> int:
    return sum(instruction.name.startswith(name) for instruction in code)


def _count_added(code: list[Instruction]) -> int:
    """Count the numbers added to memory: one per instruction before sm_90, up to four since."""
    adds = (instruction.name for instruction in code if instruction.name.startswith("RED"))
    return sum(4 if "x4" in name else 1 for name in adds)


def count_loads_in_flight(body: list[Instruction]) -> int:
    """Count the loads from memory that start before a loaded register is read."""
    loaded: set[int] = set()
    loads = 0
    for instruction in body:
        destination, _, sources = instruction.operands.partition(",")
        if instruction.name.startswith("LDG"):
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
        budget = BUDGETS.get((kernel.function, kernel.dtype))
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
        if row["loads_in_flight"] < MIN_LOADS_IN_FLIGHT:
            faults.append(f"{row['name']}: only {row['loads_in_flight']} loads in flight")
        if row["spilled_bytes"]:
            faults.append(f"{row['name']}: {row['spilled_bytes']} bytes of spilled registers")
    return faults


def main(argv: list[str] | None = None) -> int:
    """Count the instructions; return 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("library", type=Path, help="The CUDA library, or an object file.")
    parser.add_argument("--json", type=Path, help="Folder for deform_conv_sass.json.")
    options = parser.parse_args(argv)
    rows = []
    faults = []
    for architecture in ARCHITECTURES:
        found = measure(options.library, architecture)
        if not found:
            faults.append(f"{options.library} has no deform_conv2d kernels for {architecture}")
        rows += found
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    if options.json is not None:
        title = "deform_conv2d's CUDA kernels: instructions per pack of 16 bytes"
        result = Result("deform_conv_sass", title, {"channels": CHANNELS}, rows)
        command = f"python -m benchmarks.checks.sass LIBRARY --json {options.json}"
        write_json(result, options.json, command)
    faults += find_faults(rows)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
