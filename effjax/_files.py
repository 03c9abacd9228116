"""Checks of the content of files, readers of texts and of JSON objects, and their replacement."""

import io
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 10_000_000
# Bounds of numbers in files and options, above which JAX raises obscure errors or ends the process.
# The products of a few sizes, such as the shape of a kernel, must fit in 64 bits. Numbers must fit
# in float32.
MAX_SIZE, MAX_COUNT, MAX_NUMBER = 2**20, 2**31 - 1, 1e38


def check(condition: bool, problem: str) -> None:
    """Raise ValueError(problem) unless the condition holds."""
    if not condition:
        raise ValueError(problem)


def check_distinct(names: Iterable[str]) -> None:
    """Raise ValueError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        check(name not in seen, f"two entries named {name!r:.120}")
        seen.add(name)


def check_regular(path: Path) -> None:
    """Raise ValueError if a path is a pipe, a device or a directory; a missing file passes."""
    # Reading a pipe would block, and a device need not end.
    check(path.is_file() or not path.exists(), "not a regular file")


def read_text(path: Path) -> str:
    """Return the content of a text file in UTF-8.

    Raises:
        ValueError: if it is not a regular file, or not UTF-8.
        OSError: if it cannot be read.
    """
    check_regular(path)
    return path.read_text(encoding="utf-8-sig")  # a byte order mark is no text


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if the text is not one."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    check(isinstance(value, dict), f"{type(value).__name__}, not an object")
    return value


def read_json_object(path: Path, kind: str) -> dict[str, Any]:
    """Return the JSON object in a file of at most 10 MB.

    Args:
        path: the file.
        kind: what the file must be, for the error: "a config.json".

    Raises:
        ValueError: if the content is anything else.
        OSError: if the file cannot be read.
    """
    try:
        size = path.stat().st_size
        check(size <= MAX_JSON_BYTES, f"{size} bytes")
        return parse_object(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: not {kind} ({error!s:.200})") from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file. A reader finds the old content or the new one, also after a kill."""
    partial = path.with_name(f"{path.name}.partial")
    # It may be a link that somebody made, to a file that would be overwritten. "x" follows none.
    partial.unlink(missing_ok=True)
    with partial.open("xb") as file:
        file.write(content)
    os.replace(partial, path)


def append_whole(file: io.FileIO, content: bytes) -> None:
    """Append to a file without a buffer. If the disk is full, nothing is added."""
    start = file.tell()
    try:
        while content:
            content = content[file.write(content) :]
    except BaseException:
        file.truncate(start)
        file.seek(start)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder with its content, or a link to one; do nothing if there is none."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
