"""Command that prints the architectures of a library's CUDA code, such as "sm_90"."""

import pathlib
import struct
import sys

MAGIC = b"\x50\xed\x55\xba"  # fat binary: a header, then entries of machine code or PTX
KINDS = {1: "compute", 2: "sm"}


def architectures(library: bytes) -> set[str]:
    result = set()
    start = library.find(MAGIC)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", library, start + 6)
        at, end = start + header, start + header + size
        while at + 32 <= end:
            kind, entry_header, entry_size = struct.unpack_from("<H2xIQ", library, at)
            if kind not in KINDS or entry_header < 32:
                break
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            result.add(f"{KINDS[kind]}_{architecture}")
            at += entry_header + entry_size
        start = library.find(MAGIC, start + 4)
    return result


if __name__ == "__main__":
    print(*sorted(architectures(pathlib.Path(sys.argv[1]).read_bytes())))
