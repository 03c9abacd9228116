"""Readers of small files."""

from pathlib import Path
from typing import Any

from .._files import parse_object
from .errors import DataError, check_regular, quoted, unreadable


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
        return parse_object(read_text(file))
    except ValueError as error:
        raise DataError(f"{file}: must be a JSON object ({quoted(error)})") from error
