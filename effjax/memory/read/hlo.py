"""Parser of XLA's optimized HLO text: collectives, and transfers between device and host."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from .source import source_and_caller

Direction = Literal["to_device", "to_host"]

HOST_MEMORY = 5  # XLA's memory space of pinned host memory; all others are on the device

COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Instructions without data movement.
NO_MOVEMENT = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "opt-barrier", "add-dependency", "partition-id", "replica-id", "domain",
}  # fmt: skip
_COPIES = {"copy", "copy-start", "copy-done", "bitcast"}


class Array(NamedTuple):
    """An array type of HLO."""

    text: str  # f32[8,128]
    bytes: int
    on_host: bool
    is_in_device_memory: bool = True  # False on the host and in a TPU's on-chip memory


class Instruction(NamedTuple):
    """An instruction of HLO, split into fields."""

    name: str
    opcode: str
    shape: str
    operands: str
    attributes: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size, from one line of the program."""

    kind: str  # of `COLLECTIVES`
    bytes: int  # of one of them per device: operands or results, the larger
    count: int  # of executions per call of the program, including loops
    source: str  # the line that requests it, "file.py:12"; empty if unknown
    caller: str = ""  # the user's line that called it, if `source` is in a library


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Copies of one size between device and host, from one line of the program."""

    direction: Direction
    shape: str  # f32[128,128]
    bytes: int  # of one copy per device
    count: int  # as in `Collective`
    source: str
    caller: str = ""


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A parsed module: its computations by name, the entry computation, and stack frames."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    frames: Mapping[int, tuple[str, int]]  # "file:line" and the calling frame, by frame

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name, and the elements of tuples that only operands name."""
        # From jax 0.12, an operand can be an element of a tuple, `%tuple#1`, without an instruction
        # that takes it.
        result = {i.name: i for body in self.computations.values() for i in body}
        for operand in {name for i in result.values() for name in operand_names(i) if "#" in name}:
            whole, *indices = operand.split("#")
            for index in indices if whole in result else ():
                name, shape = f"{whole}#{index}", elements(result[whole].shape)[int(index)]
                result[name] = Instruction(
                    name, "get-tuple-element", shape, f"%{whole}", f"index={index}"
                )
                whole = name
        return result

    def instruction_of(self, value: str) -> Instruction | None:
        """Return the instruction that computes a value, or None.

        For an asynchronous value it is the last instruction of the wrapped computation.
        """
        name, dot, number = value.partition(".")
        wrapped = self.computations.get(f"{name}_computation{dot}{number}", ())
        return self.instructions.get(value) or next(reversed(wrapped), None)

    def iter_executed(self, fusions: bool = False) -> Iterator[tuple[Instruction, int]]:
        """Yield each instruction with its number of executions per call.

        A loop with an unknown trip count counts once, and so does each branch of a conditional.

        Args:
            fusions: whether to include instructions inside fusions.
        """
        todo = [(self.entry, 1)]
        while todo:
            computation, times = todo.pop()
            for instruction in self.computations[computation]:
                yield instruction, times
                names, trips = self.nested(instruction), 1
                if instruction.opcode == "while":
                    trips = self.trip_count(instruction)
                elif fusions and instruction.opcode in ("fusion", "fusion-start", "async-start"):
                    names = called(instruction, "calls")
                todo += [(name, times * (1 if trips is None else trips)) for name in names]

    def nested(self, instruction: Instruction) -> list[str]:
        """Return the computations that a loop, a conditional or a call executes."""
        if instruction.opcode == "while":
            return called(instruction, "body", "condition")
        if instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
            return names + called(instruction, "true_computation", "false_computation")
        return called(instruction, "to_apply") if instruction.opcode == "call" else []

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the number of iterations of a while loop, or None if it is unknown."""
        # Where the number is data, `set_xla_metadata(max_trip_count=…)` around the loop states a
        # bound of it. XLA's own count comes first.
        root = self.computations[called(loop, "condition")[0]][-1]
        stated = r'"known_trip_count":\{"n":"(\d+)"', r'\bmax_trip_count="(\d+)"'
        for pattern in stated:
            # custom_partitioning keeps the attributes of the condition, and not of the loop.
            if trips := re.search(pattern, f"{loop.attributes} {root.attributes}"):
                return int(trips[1])
        # The compiler for TPUs does not state it, nor that for GPUs if the bound is in the state of
        # the loop. A scan compares its counter with a constant.
        compare, names = root, operand_names(root)
        if root.opcode == "fusion":
            compare = self.computations[called(root, "calls")[0]][-1]
            inputs = [self.instructions[name] for name in operand_names(compare)]
            if any(a.opcode != "parameter" for a in inputs):
                return None
            names = [names[int(a.operands)] for a in inputs]
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        counter, bound = names
        start, end = self._constant(counter, loop), self._constant(bound, loop)
        step = self._increment(counter, loop)
        if start is None or end is None or not step or step < 0:
            return None
        return max(-(-(end - start) // step), 0)

    def _increment(self, counter: str, loop: Instruction) -> int | None:
        """Return what an iteration adds to the counter of a loop; None if it is not constant."""
        root = self.computations[called(loop, "body")[0]][-1]
        index = _tuple_index(self._without_copies(counter))
        if index is None or root.opcode != "tuple":
            return 1
        new = self._without_copies(operand_names(root)[index])
        if new.opcode != "add":
            return 1  # XLA has fused the sum of a scan's counter
        others = [n for n in operand_names(new) if _tuple_index(self._without_copies(n)) != index]
        return self._constant(others[0], loop) if len(others) == 1 else None

    def _without_copies(self, name: str) -> Instruction:
        while (instruction := self.instructions[name]).opcode in _COPIES:
            name = operand_names(instruction)[0]
        return instruction

    def _constant(self, name: str, loop: Instruction) -> int | None:
        """Return the integer constant behind a value of a loop's condition, before the loop."""
        is_inside = True
        for _ in range(100):
            instruction = self.instructions.get(name)
            if instruction is None:
                return None
            if instruction.opcode == "constant":
                value = instruction.operands
                return int(value) if re.fullmatch(r"-?\d+", value) else None
            if instruction.opcode == "get-tuple-element":
                # An element of the loop's state starts as that element of the loop's operand.
                index = _tuple_index(instruction)
                initial = self.instructions.get(operand_names(loop)[0])
                if not (is_inside and index is not None and initial and initial.opcode == "tuple"):
                    return None
                is_inside = False
                name = operand_names(initial)[index]
            elif instruction.opcode in _COPIES:
                name = operand_names(instruction)[0]
            else:
                return None
        return None

    def source_and_caller(self, instruction: Instruction) -> tuple[str, str]:
        """Return the line that made an instruction, and the user's line that called it."""
        inline = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if inline:
            return f"{inline[1]}:{inline[2]}", ""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        stack: list[str] = []
        number = int(frame[1]) if frame else 0
        while number in self.frames and len(stack) < 100:
            place, caller = self.frames[number]
            stack.append(place)
            if caller == number:
                break
            number = caller
        return source_and_caller(stack)

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """Return the arrays that an instruction reads."""
        operands = [self.instructions.get(name) for name in operand_names(instruction)]
        return [array for operand in operands if operand for array in arrays(operand.shape)]


def parse(hlo: str) -> HloModule:
    """Parse the text of an optimized module of any backend."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = "", None, []
    for line in hlo.splitlines():
        if name is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$", line)
            if header:
                name, body = header[2], []
                entry = name if header[1] or not entry else entry
        elif line.startswith("}"):
            computations[name], name = tuple(body), None
        elif instruction := _instruction(line):
            body.append(instruction)
    return HloModule(computations, entry, _stack_frames(hlo))


def collectives(hlo: str | HloModule) -> tuple[Collective, ...]:
    """Return the collectives of a program, most bytes first, with equal ones merged.

    Args:
        hlo: optimized HLO: `jax.jit(f).lower(…).compile().as_text()` of any backend.

    Returns:
        A tuple with an entry for each kind and size of collectives on one line. It has their `kind`
        ("all-reduce", …), the `bytes` of one of them per device, the `count` of executions, and the
        `source` that requests it, "file.py:12", called from the user's line `caller`.
    """
    module = parse(hlo) if isinstance(hlo, str) else hlo
    counts: Counter[tuple[str, int, tuple[str, str]]] = Counter()
    for instruction, times in module.iter_executed(fusions=True):  # XLA fuses small all-reduces
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            results = elements(instruction.shape)
            # The shape of an asynchronous start is (operands, results, …), except for all-reduce
            # before jax 0.11: the results alone.
            is_start = instruction.opcode.endswith("-start")
            if is_start and (kind != "all-reduce" or results[0].startswith("(")):
                results = results[1:2]
            size = max(
                sum(array.bytes for part in results for array in arrays(part)),
                sum(array.bytes for array in module.operand_arrays(instruction)),
            )
            counts[kind, size, module.source_and_caller(instruction)] += times
    entries = [Collective(kind, size, n, *lines) for (kind, size, lines), n in counts.items()]
    return tuple(sorted(entries, key=lambda c: c.bytes * c.count, reverse=True))


def transfers(hlo: str | HloModule) -> tuple[Transfer, ...]:
    """Return the copies between device and host, most bytes first, with equal ones merged."""
    module = parse(hlo) if isinstance(hlo, str) else hlo
    counts: Counter[tuple[Direction, Array, tuple[str, str]]] = Counter()
    for instruction, times in module.iter_executed():
        if instruction.opcode in NO_MOVEMENT or instruction.opcode.endswith("-done"):
            continue
        for direction, array in copied_arrays(module, instruction):
            counts[direction, array, module.source_and_caller(instruction)] += times
    entries = [
        Transfer(direction, array.text, array.bytes, n, *lines)
        for (direction, array, lines), n in counts.items()
    ]
    return tuple(sorted(entries, key=lambda t: t.bytes * t.count, reverse=True))


def copied_arrays(module: HloModule, instruction: Instruction) -> list[tuple[Direction, Array]]:
    """Return the arrays that an instruction copies between device and host."""
    if instruction.opcode == "custom-call" and "AllocateBuffer" in instruction.attributes:
        return []
    parts = elements(instruction.shape)
    if instruction.opcode == "copy-start":  # (result, operand, context)
        parts = parts[:1]
    elif instruction.opcode.endswith("-start"):  # (operands, result, context)
        parts = parts[1:2]
    results = [a for part in parts for a in arrays(part) if a.bytes]
    operands = [a for a in module.operand_arrays(instruction) if a.bytes]
    from_host = [a for a in operands if a.on_host]
    to_host = [a for a in results if a.on_host]
    if from_host and not to_host:  # the whole array or a slice
        return [("to_device", a) for a in results]
    if to_host and from_host:  # an update in place: its operands on the device, without indices
        updates = [a for a in operands if not a.on_host and a.text.partition("[")[2] != "]"]
        return [("to_host", a) for a in updates]
    return [("to_host", a) for a in to_host]


def arrays(shape: str) -> list[Array]:
    """Return the arrays of a shape, including those of nested tuples."""
    result = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape):
        size = math.prod(int(d) for d in re.findall(r"\d+", dims))
        on_host = f"S({HOST_MEMORY})" in layout
        # Layouts of TPUs have tiles, T(8,128). Memory spaces of GPUs are all in device memory.
        on_chip = "T(" in layout and "S(" in layout and not on_host
        text, bits = f"{dtype}[{dims}]", size * _bits(dtype)
        result.append(Array(text, -(-bits // 8), on_host, not (on_host or on_chip)))
    return result


def elements(shape: str) -> list[str]:
    """Return the elements of a tuple's shape, or the shape itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for i, character in enumerate(shape):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth == (0 if character == ")" else 1) and character in ",)":
            parts.append(shape[start:i].strip())
            start = i + 1
            if depth == 0:
                break
    return [part for part in parts if part]


def _tuple_index(instruction: Instruction) -> int | None:
    """Return the element that an instruction takes from a tuple; None if it takes none."""
    index = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(index[1]) if index and instruction.opcode == "get-tuple-element" else None


def operand_names(instruction: Instruction) -> list[str]:
    """Return the names of an instruction's operands; `tuple#1` is an element of a tuple."""
    return re.findall(r"%([\w.\-]+(?:#\d+)*)", instruction.operands)


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred


def _instruction(line: str) -> Instruction | None:
    # `  ROOT %name = shape opcode(operands), attributes`
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    return Instruction(match[1], opcode, shape, rest[: end - 1], rest[end:])


def _closing(text: str) -> int:
    """Return the index after the bracket that closes the one at the start of `text`."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    return len(text)


def called(instruction: Instruction, *kinds: str) -> list[str]:
    """Return the computations that an instruction names by attributes of some kinds."""
    return re.findall(rf"\b(?:{'|'.join(kinds)})=%?([\w.\-]+)", instruction.attributes)


def _stack_frames(hlo: str) -> dict[int, tuple[str, int]]:
    """Parse the tables of files, locations and stack frames before the first computation."""
    files = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(hlo, "FileNames"), re.MULTILINE))
    place = r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)"
    places = {
        number: f"{files.get(file, '?')}:{line}"
        for number, file, line in re.findall(place, _table(hlo, "FileLocations"), re.MULTILINE)
    }
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    return {
        int(number): (places.get(location, "?"), int(caller or 0) - 1)
        for number, location, caller in re.findall(frame, _table(hlo, "StackFrames"), re.MULTILINE)
    }


def _table(hlo: str, title: str) -> str:
    start = hlo.find(f"\n{title}\n")
    return hlo[start + len(title) + 2 : hlo.find("\n\n", start + 1)] if start >= 0 else ""
