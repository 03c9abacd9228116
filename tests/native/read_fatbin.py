"""Command that prints the architectures of a library's CUDA code, such as "sm_90"."""

import pathlib
import struct
import sys
from collections.abc import Iterator

MAGIC = b"\x50\xed\x55\xba"  # fat binary: a header, then entries of machine code or PTX
KINDS = {1: "compute", 2: "sm"}
COMPRESSIONS = {0: "none", 0x2000: "lz4", 0x8000: "zstd"}  # bits of an entry's flags


def _entries(library: bytes) -> Iterator[int]:
    """Yield the offset of each entry."""
    start = library.find(MAGIC)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", library, start + 6)
        at, end = start + header, start + header + size
        while at + 32 <= end:
            kind, entry_header, entry_size = struct.unpack_from("<H2xIQ", library, at)
            if kind not in KINDS or entry_header < 32:
                break
            yield at
            at += entry_header + entry_size
        start = library.find(MAGIC, start + 4)


def architectures(library: bytes) -> set[str]:
    result = set()
    for at in _entries(library):
        (kind,) = struct.unpack_from("<H", library, at)
        (architecture,) = struct.unpack_from("<I", library, at + 28)
        result.add(f"{KINDS[kind]}_{architecture}")
    return result


def compressions(library: bytes) -> set[str]:
    flags = (struct.unpack_from("<Q", library, at + 40)[0] for at in _entries(library))
    return {COMPRESSIONS[number & 0xA000] for number in flags}


if __name__ == "__main__":
    print(*sorted(architectures(pathlib.Path(sys.argv[1]).read_bytes())))
