"""Counts the instructions of deformable convolution's CUDA kernels, in the machine code itself:
`python -m effjax.bench.sass LIBRARY`. It needs cuobjdump and nvdisasm, and no GPU.

A pack is 16 bytes of columns, or of dx: the part of a thread in one turn of the innermost loop. Its
instructions are all of that loop, and its share of what a block does once for each sample.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ._result import write_record

# Instructions a pack on sm_90 with 128 channels, for C++ types as mangled names have them.
BUDGETS = {
    ("columns", "float32"): 120,
    ("columns", "bfloat16"): 230,
    ("columns", "float16"): 230,
    ("gradients", "float32"): 320,
    ("gradients", "bfloat16"): 320,
    ("gradients", "float16"): 320,
}
CHANNELS = 128
_TYPES = {"f": "float32", "d": "float64", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}
_BITS = {"i": 32, "l": 64}
_NAME = re.compile(r"_ZN6effjax\d+(columns|gradients)_kernelI(f|d|\d+__\w+?)[fd]Li(\d+)E([il])E")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;", re.M)


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


class Kernel(NamedTuple):
    """A kernel of deformable convolution, by its template's arguments."""

    of: str  # "columns" or "gradients"
    dtype: str
    channels: int  # of a pack
    index_bits: int


def tool(name: str) -> str | None:
    """Where cuobjdump or nvdisasm is: on the PATH, beside nvcc, or of PyPI's packages."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", str(packages)]
    return shutil.which(name, path=os.pathsep.join(places))


def has_tools() -> bool:
    return bool(tool("cuobjdump") and tool("nvdisasm"))


def _cuobjdump(library: Path, *options: str) -> str:
    found = tool("cuobjdump"), tool("nvdisasm")
    if None in found:
        sys.exit("cuobjdump and nvdisasm are needed: pip install nvidia-cuda-cuobjdump "
                 "nvidia-cuda-nvdisasm")  # fmt: skip
    path = os.pathsep.join([str(Path(str(found[1])).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [str(found[0]), *options, str(library)],
        check=True, capture_output=True, text=True, env=os.environ | {"PATH": path},
    ).stdout  # fmt: skip


def kernels(library: Path, architecture: str = "sm_90") -> dict[Kernel, list[Instruction]]:
    """The instructions of the kernels that there are budgets for, and of their relatives."""
    text = _cuobjdump(library, "-sass", "-arch", architecture)
    found = {}
    for body in text.split("Function : ")[1:]:
        name = _NAME.match(body)
        if name:
            of, dtype, channels, index = name.groups()
            found[Kernel(of, _TYPES[dtype], int(channels), _BITS[index])] = [
                Instruction(int(at, 16), name, operands)
                for at, name, operands in _LINE.findall(body)
            ]
    return found


def registers(library: Path, architecture: str = "sm_90") -> dict[Kernel, dict[str, int]]:
    """Registers a thread, and bytes of local memory, which hold those that were too many."""
    text = _cuobjdump(library, "-res-usage", "-arch", architecture)
    found = {}
    for body in text.split("Function ")[1:]:
        name = _NAME.match(body)
        if name:
            of, dtype, channels, index = name.groups()
            sizes = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", body)}
            key = Kernel(of, _TYPES[dtype], int(channels), _BITS[index])
            found[key] = {
                "registers": sizes["REG"],
                "shared_bytes": sizes["SHARED"],
                "spilled_bytes": sizes["STACK"] + sizes["LOCAL"],
            }
    return found


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """The loops, as first and last index of their instructions: branches back."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for i, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)$", instruction.operands)
        if instruction.name.startswith("BRA") and target:
            start = at.get(int(target[1], 16), i)
            if start < i:
                found.append((start, i))
    return found


def count(kernel: Kernel, code: list[Instruction]) -> dict[str, int | float]:
    """What a pack costs on the way of a sample that lies inside: every corner is read."""
    stores, corners = ("STG", 1) if kernel.of == "columns" else ("RED", 4)
    all_loops = loops(code)
    storing = [(a, b) for a, b in all_loops if _number(code[a : b + 1], stores)]
    start, end = min(storing, key=lambda loop: loop[1] - loop[0])
    body = code[start : end + 1]
    packs = _number(body, stores) / corners
    around = [(a, b) for a, b in storing if a < start and end < b]
    first, last = min(around, default=(start, end))
    # Turns of the loop around it; in it there is another one, for what needs no dx.
    turn = set(range(first, last + 1)) if around else set()
    for a, b in all_loops:
        turn -= set(range(a, b + 1)) if (a, b) not in around else set()
    exits = next(i for i in range(last, len(code)) if code[i].name == "EXIT" and i > last)
    once = first + exits - last
    of_sample, lanes = CHANNELS / kernel.channels, 8
    share = once / of_sample + len(turn) * lanes / of_sample
    return {
        "in_the_loop": round(len(body) / packs, 1),
        "of_samples": round(share, 1),
        "a_pack": round(len(body) / packs + share, 1),
        "loads_in_flight": loads_in_flight(body),
    }


def _number(code: list[Instruction], name: str) -> int:
    return sum(instruction.name.startswith(name) for instruction in code)


def loads_in_flight(body: list[Instruction]) -> int:
    """How many loads from memory begin before the first number of one of them is used."""
    loaded: set[int] = set()
    loads = 0
    for instruction in body:
        into, _, others = instruction.operands.partition(",")
        if instruction.name.startswith("LDG"):
            size = re.search(r"\.(128|64)", instruction.name)
            first = int(re.sub(r"\D", "", into) or 0)
            loaded |= set(range(first, first + (int(size[1]) // 32 if size else 1)))
            loads += 1
            continue
        sources = instruction.operands if instruction.name.startswith(("ST", "RED")) else others
        if loaded & {int(n) for n in re.findall(r"\bR(\d+)", sources)}:
            break
    return loads


def measure(library: Path, architecture: str = "sm_90") -> list[dict[str, str | int | float]]:
    """A row for each kernel whose packs are 16 bytes and whose indices have 32 bits."""
    used = registers(library, architecture)
    return [
        {"name": f"{kernel.of}, {kernel.dtype}"}
        | count(kernel, code)
        | used[kernel]
        | {"budget": BUDGETS[kernel.of, kernel.dtype]}
        for kernel, code in sorted(kernels(library, architecture).items())
        if kernel.channels > 1 and kernel.index_bits == 32 and (kernel.of, kernel.dtype) in BUDGETS
    ]


def faults(rows: list[dict]) -> list[str]:
    """What is more than its budget."""
    found = []
    for row in rows:
        if row["a_pack"] > row["budget"]:
            found.append(f"{row['name']}: {row['a_pack']} instructions a pack, not {row['budget']}")
        if row["loads_in_flight"] < 4:
            found.append(f"{row['name']}: only {row['loads_in_flight']} loads in flight")
        if row["spilled_bytes"]:
            found.append(f"{row['name']}: {row['spilled_bytes']} bytes of spilled registers")
    return found


def main(
    library: Annotated[Path, typer.Argument(help="The CUDA library, or an object file.")],
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file.")] = None,
) -> None:
    """Counts, and fails where a budget is exceeded."""
    rows = measure(library)
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    if json:
        title = "deform_conv2d's CUDA kernels: sm_90 instructions a pack of 16 bytes"
        write_record(json / "deform_conv_sass.json", title, {"channels": CHANNELS}, rows)
    wrong = faults(rows)
    if wrong or not rows:
        sys.exit("\n".join(wrong) or f"no kernels of deformable convolution in {library}")


if __name__ == "__main__":
    typer.run(main)
