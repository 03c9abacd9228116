"""Checksums of the files of a checkpoint: a flipped bit in an array is read as another number."""

import hashlib
import json
import os
from pathlib import Path

NAME = "checksums.json"  # in the checkpoint, beside its files


def write(checkpoint: Path) -> None:
    """Of all files; raises OSError."""
    partial = checkpoint / f"{NAME}.partial"
    partial.write_text(json.dumps(_sums(checkpoint), indent=2) + "\n")
    os.replace(partial, checkpoint / NAME)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if its files are as they were written, or if
    it has no checksums, as those of older runs."""
    try:
        wanted = json.loads((checkpoint / NAME).read_text())
        for name, digest in wanted.items():
            if _digest(checkpoint / name) != digest:
                return f"{name} is not as it was written"
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return None if name == NAME else f"{name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def is_there(checkpoint: Path) -> bool:
    return (checkpoint / NAME).is_file()


def _sums(checkpoint: Path) -> dict[str, str]:
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    named = {file.relative_to(checkpoint).as_posix(): file for file in files}
    return {name: _digest(file) for name, file in named.items() if not name.startswith(NAME)}


def _digest(file: Path) -> str:
    with file.open("rb") as bytes_of:
        return hashlib.file_digest(bytes_of, "sha256").hexdigest()
