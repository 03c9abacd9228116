"""Parser of XLA's buffer assignment: bytes by kind, and the arrays in device memory at the peak."""

import dataclasses
import re
from collections import Counter
from typing import Literal, NamedTuple

from .hlo import HOST_MEMORY, arrays

Kind = Literal["argument", "output", "temporary", "constant"]


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes in one memory, per device."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # of results that overwrite a donated argument: in `arguments` and in `outputs`
    generated_code: int

    @property
    def total(self) -> int:
        """The sum, with aliased bytes counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.generated_code


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in device memory."""

    shape: str  # f32[64,32,32,48]
    bytes: int  # per device, with padding
    kind: Kind
    # JAX's name: an argument's path, or a primitive with the functions around it. XLA's name of the
    # instruction if JAX has none.
    operation: str
    source: str = ""  # the line that computes it, "file.py:12"; empty if unknown
    caller: str = ""  # the user's line that called it, if `source` is in a library
    padding: int = 0  # unused: a TPU stores the last two axes in tiles of, e.g., 8 × 128 elements


class _PlacedValue(NamedTuple):
    name: str  # instruction{index}
    shape: str
    offset: int
    bytes: int
    is_phi: bool  # a loop variable or an element of one, which has no operation


class _Allocation(NamedTuple):
    number: int
    bytes: int
    space: int
    kind: Kind
    is_output: bool  # also of a donated argument
    shape: str  # of the argument or result; empty for temporaries
    values: list[_PlacedValue]


_LiveRanges = dict[str, tuple[int, int]]  # first and last time by value, inclusive


def live_at_peak(assignment: str, live_ranges: str, platform: str = "cuda") -> list[Buffer]:
    """Return the contents of device memory at the peak, largest first.

    The operation of a buffer is the name of its instruction; source lines are empty.

    Args:
        assignment: XLA's `…-buffer-assignment.txt`.
        live_ranges: XLA's `…-live-range.txt`.
        platform: "cuda" or "tpu".
    """
    # Arguments, results and constants are live during the whole program, temporaries while they
    # are in use. Values that share their place count once. Temporaries may add up to less than
    # XLA's temporary bytes, because of fragmentation.
    allocations = [a for a in _allocations(assignment) if _is_in_device_memory(a, platform)]
    matches = re.findall(r"^\s+(\S+\{[\d,]*\}):(\d+)-(\d+)$", live_ranges, re.MULTILINE)
    ranges = {name: (int(start), int(end)) for name, start, end in matches}
    peak = _peak_time(allocations, ranges)
    result = []
    for allocation in allocations:
        values = allocation.values
        if allocation.kind == "temporary":
            live = [v for v in values if v.name in ranges]
            at_peak = [v for v in live if ranges[v.name][0] <= peak <= ranges[v.name][1]]
            for place in _distinct_places(at_peak):
                latest = _latest_value(place, values, ranges, peak)
                result.append(_as_buffer(latest, "temporary"))
        elif values:
            # The memory of a donated argument is reused by other values. Choose the value that has
            # the shape of the argument or result.
            best = max(values, key=lambda v: (v.shape == allocation.shape, v.bytes, not v.is_phi))
            result.append(_as_buffer(best, allocation.kind))
    return sorted((b for b in result if b.bytes), key=lambda b: b.bytes, reverse=True)


def _is_in_device_memory(allocation: _Allocation, platform: str) -> bool:
    # The other memory spaces ("colors") of a TPU are on the chip, and one of a GPU is for
    # collectives.
    return allocation.space == 0 or (platform == "cuda" and allocation.space != HOST_MEMORY)


def allocated_bytes(assignment: str, platform: str, on_host: bool = False) -> Bytes:
    """Return the bytes of arguments, results and temporaries in device or host memory."""
    sizes = Counter[str]()
    for allocation in _allocations(assignment):
        on_device = _is_in_device_memory(allocation, platform)
        if allocation.space == HOST_MEMORY if on_host else on_device:
            sizes[allocation.kind] += allocation.bytes
            if allocation.kind == "argument" and allocation.is_output:
                sizes["aliased"] += allocation.bytes
    return Bytes(
        arguments=sizes["argument"], outputs=sizes["output"] + sizes["aliased"],
        temporaries=sizes["temporary"], aliased=sizes["aliased"], generated_code=0,
    )  # fmt: skip


_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (?:color (\d+), )?(.*)$")
_VALUE = re.compile(r"^ value: <\d+ (\S+)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")


def _allocations(assignment: str) -> list[_Allocation]:
    allocations: list[_Allocation] = []
    skip = True
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            number, size, space, flags = header.groups()
            skip = "thread-local" in flags
            if not skip:
                shape = re.search(r"shape (?:is )?\|([^|]*)\|", flags)
                allocations.append(
                    _Allocation(
                        int(number), int(size), int(space or 0), _allocation_kind(flags),
                        "maybe-live-out" in flags, shape[1] if shape else "", [],
                    )
                )  # fmt: skip
        elif not skip and (value := _VALUE.match(line)):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            if not value[5].startswith("("):  # a tuple is a few bytes of addresses
                shape = re.sub(r"\{[^}]*\}", "", value[5])
                allocations[-1].values.append(
                    _PlacedValue(name, shape, int(value[4]), int(value[3]), bool(value[2]))
                )
    return allocations


def _allocation_kind(flags: str) -> Kind:
    if re.search(r"\bparameter \d", flags):
        return "argument"
    if "maybe-live-out" in flags:
        return "output"
    return "constant" if "constant" in flags else "temporary"


def _peak_time(allocations: list[_Allocation], ranges: _LiveRanges) -> int:
    """Return the time at which temporaries take the most bytes."""
    temporaries = [
        (allocation.number, value)
        for allocation in allocations
        if allocation.kind == "temporary"
        for value in allocation.values
        if value.name in ranges
    ]
    temporaries.sort(key=lambda item: ranges[item[1].name][0])
    live: list[tuple[int, _PlacedValue]] = []
    most, peak = -1, 0
    for item in temporaries:
        time = ranges[item[1].name][0]
        live = [other for other in live if ranges[other[1].name][1] >= time] + [item]
        by_allocation: dict[int, list[_PlacedValue]] = {}
        for number, value in live:
            by_allocation.setdefault(number, []).append(value)
        total = sum(
            place.bytes for values in by_allocation.values() for place in _distinct_places(values)
        )
        if total > most:
            most, peak = total, time
    return peak


def _distinct_places(values: list[_PlacedValue]) -> list[_PlacedValue]:
    """Return one value per region of memory: the largest of those that overlap."""
    places: list[_PlacedValue] = []
    end = -1
    for value in sorted(values, key=lambda v: (v.offset, -v.bytes)):
        if value.offset >= end:
            places.append(value)
            end = value.offset + value.bytes
    return places


def _latest_value(
    place: _PlacedValue, values: list[_PlacedValue], ranges: _LiveRanges, peak: int
) -> _PlacedValue:
    """Return the last value in the same place that an operation made before the peak."""
    candidates = [
        value
        for value in values
        if (value.offset, value.bytes) == (place.offset, place.bytes)
        and not value.is_phi
        and ranges.get(value.name, (peak + 1, 0))[0] <= peak
    ]
    return max(candidates, key=lambda v: ranges[v.name][0], default=place)


def _as_buffer(value: _PlacedValue, kind: Kind) -> Buffer:
    needed = sum(array.bytes for array in arrays(value.shape))
    padding = max(value.bytes - needed, 0)
    name = value.name.partition("{")[0]
    return Buffer(value.shape, value.bytes, kind, name, padding=padding)
