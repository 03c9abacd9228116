"""Reads XLA's buffer assignment: which arrays are in device memory when it is fullest."""

import re
from typing import Literal, NamedTuple

from ._hlo import HOST_MEMORY

Kind = Literal["argument", "output", "temporary", "constant"]


class Value(NamedTuple):
    """An array of the program, placed in memory."""

    instruction: str
    shape: str  # f32[8,128]
    bytes: int
    kind: Kind


class _Placed(NamedTuple):
    name: str  # instruction{index}
    shape: str
    offset: int
    bytes: int
    is_phi: bool  # a loop's variable, or a part of one: it names no operation


class _Allocation(NamedTuple):
    number: int
    kind: Kind
    shape: str  # of the argument or the result that it is for; empty for temporaries
    values: list[_Placed]


def live_at_peak(assignment: str, live_ranges: str) -> list[Value]:
    """What device memory holds when it is fullest, largest first.

    Arguments, results and constants are there as long as the program runs; temporaries while they
    are needed. Values that share their place count once. The temporaries may add up to less than
    XLA's temporary bytes: the rest is lost in packing them.

    Args:
        assignment: XLA's `…-buffer-assignment.txt`.
        live_ranges: XLA's `…-live-range.txt`.
    """
    allocations = _device_allocations(assignment)
    ranges = _live_ranges(live_ranges)
    peak = _fullest(allocations, ranges)
    found = []
    for allocation in allocations:
        values = allocation.values
        if allocation.kind == "temporary":
            at_peak = [v for v in values if _is_live(ranges, v, peak)]
            for place in _places(at_peak):
                found.append(_value(_maker(place, values, ranges, peak), "temporary"))
        elif values:
            # A donated argument's place is used again: what the allocation is for names it.
            best = max(values, key=lambda v: (v.shape == allocation.shape, v.bytes, not v.is_phi))
            found.append(_value(best, allocation.kind))
    return sorted((value for value in found if value.bytes), key=lambda v: v.bytes, reverse=True)


_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (?:color (\d+), )?(.*)$")
_VALUE = re.compile(r"^ value: <\d+ (\S+)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")


def _device_allocations(assignment: str) -> list[_Allocation]:
    found: list[_Allocation] = []
    skip = True
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            on_host = int(header[2] or 0) == HOST_MEMORY
            skip = on_host or "thread-local" in header[3]
            if not skip:
                shape = re.search(r"shape (?:is )?\|([^|]*)\|", header[3])
                kind = _kind(header[3])
                found.append(_Allocation(int(header[1]), kind, shape[1] if shape else "", []))
        elif not skip and (value := _VALUE.match(line)):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            if not value[5].startswith("("):  # a tuple's place holds addresses, some bytes
                shape = re.sub(r"\{[^}]*\}", "", value[5])
                found[-1].values.append(
                    _Placed(name, shape, int(value[4]), int(value[3]), bool(value[2]))
                )
    return found


def _kind(flags: str) -> Kind:
    if re.search(r"\bparameter \d", flags):
        return "argument"
    if "maybe-live-out" in flags:
        return "output"
    return "constant" if "constant" in flags else "temporary"


def _live_ranges(text: str) -> dict[str, tuple[int, int]]:
    """For each value, when it is made and when it is last needed, both included."""
    found = re.findall(r"^\s+(\S+\{[\d,]*\}):(\d+)-(\d+)$", text, re.MULTILINE)
    return {name: (int(start), int(end)) for name, start, end in found}


def _is_live(ranges: dict[str, tuple[int, int]], value: _Placed, time: int) -> bool:
    start, end = ranges.get(value.name, (0, -1))
    return start <= time <= end


def _fullest(allocations: list[_Allocation], ranges: dict[str, tuple[int, int]]) -> int:
    """When temporaries take the most bytes."""
    temporaries = [
        (allocation.number, value)
        for allocation in allocations
        if allocation.kind == "temporary"
        for value in allocation.values
        if value.name in ranges
    ]
    temporaries.sort(key=lambda item: ranges[item[1].name][0])
    live: list[tuple[int, _Placed]] = []
    most, peak = -1, 0
    for item in temporaries:
        time = ranges[item[1].name][0]
        live = [other for other in live if ranges[other[1].name][1] >= time] + [item]
        by_allocation: dict[int, list[_Placed]] = {}
        for number, value in live:
            by_allocation.setdefault(number, []).append(value)
        total = sum(
            sum(place.bytes for place in _places(values)) for values in by_allocation.values()
        )
        if total > most:
            most, peak = total, time
    return peak


def _places(values: list[_Placed]) -> list[_Placed]:
    """One value for each stretch of memory: of those that overlap, the one that covers most."""
    found: list[_Placed] = []
    end = -1
    for value in sorted(values, key=lambda v: (v.offset, -v.bytes)):
        if value.offset >= end:
            found.append(value)
            end = value.offset + value.bytes
    return found


def _maker(
    place: _Placed, values: list[_Placed], ranges: dict[str, tuple[int, int]], peak: int
) -> _Placed:
    """Of the values in the same place, the last one before the peak that an operation made."""
    alike = [
        value
        for value in values
        if (value.offset, value.bytes) == (place.offset, place.bytes)
        and not value.is_phi
        and ranges.get(value.name, (peak + 1, 0))[0] <= peak
    ]
    return max(alike, key=lambda v: ranges[v.name][0], default=place)


def _value(placed: _Placed, kind: Kind) -> Value:
    return Value(placed.name.partition("{")[0], placed.shape, placed.bytes, kind)
