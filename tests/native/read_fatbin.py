"""`read_fatbin.py LIBRARY`: the architectures that a library has CUDA code for, such as "sm_90"."""

import pathlib
import struct
import sys

MAGIC = b"\x50\xed\x55\xba"  # of a fat binary: a header, then entries of machine code or PTX
KINDS = {1: "compute", 2: "sm"}


def architectures(library: bytes) -> set[str]:
    found = set()
    start = library.find(MAGIC)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", library, start + 6)
        at, end = start + header, start + header + size
        while at + 32 <= end:
            kind, entry_header, entry_size = struct.unpack_from("<H2xIQ", library, at)
            if kind not in KINDS or entry_header < 32:
                break
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            found.add(f"{KINDS[kind]}_{architecture}")
            at += entry_header + entry_size
        start = library.find(MAGIC, start + 4)
    return found


if __name__ == "__main__":
    print(*sorted(architectures(pathlib.Path(sys.argv[1]).read_bytes())))
