"""Readers of the small files of a checkpoint and of prompts."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError, check_regular, quoted, unreadable


def read_text(file: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        DataError: It cannot be read.
    """
    # Reading a pipe would block, and a device need not end.
    check_regular(file)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 ({error.reason})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: It cannot be read, or contains anything else.
    """
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not JSON ({quoted(error)})") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: must contain a JSON object")
    return content
