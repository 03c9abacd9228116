"""Errors that the user can correct: one line with the problem and the remedy."""

from pathlib import Path


class TrainError(Exception):
    """A run that cannot start or continue with the given options, data or files."""


class PreemptionError(Exception):
    """Raised when a run stops on request, after its checkpoint has been written."""


class DataError(TrainError):
    """Images or labels that cannot be read or cannot be right."""


def check_regular(path: Path) -> None:
    """Raise DataError if the path is a pipe, a device or a directory; a missing file passes."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} must be a regular file. Copy its content into one.")


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error for a file or directory that the system refuses to read."""
    return DataError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}). Check its path and "
        "its permissions."
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `"1 epoch"` or `"2 epochs"`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
