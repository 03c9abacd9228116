"""Checks of the content of files, and a reader of JSON objects."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 10_000_000


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
        check(path.is_file() or not path.exists(), "not a regular file")  # it could block
        check(path.stat().st_size <= MAX_JSON_BYTES, f"{path.stat().st_size} bytes")
        value = json.loads(path.read_bytes())
        check(isinstance(value, dict), "not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not {kind} ({error!s:.200})") from error
    return value
