"""Readers of small files."""

from pathlib import Path
from typing import Any

from .. import _files
from .errors import DataError, check_regular, quoted, unreadable


def read_text(file: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        DataError: It cannot be read.
    """
    check_regular(file)
    try:
        return _files.read_text(file)
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
        return _files.parse_object(read_text(file))
    except ValueError as error:
        raise DataError(f"{file}: must be a JSON object ({quoted(error)})") from error
