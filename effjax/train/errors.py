"""Errors that the user can mend: one line that names what is wrong and the remedy."""

from pathlib import Path


class TrainError(Exception):
    """A run that cannot start, or cannot go on, as it was asked for."""


class Preempted(Exception):
    """A run that was told to stop: it is saved, and can go on."""


class OutOfDeviceMemory(Exception):
    """A run that does not fit; what it says is the command that plans it."""


class Damaged(TrainError):
    """A checkpoint that is not as it was written."""


class DataError(TrainError):
    """Images or labels that cannot be read or cannot be right."""


def check_regular(path: Path) -> None:
    """Raises `DataError` for a file that may never end: a pipe, a device. One that is not there is
    left to who reads it."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is no regular file; copy what it gives into one")


def unreadable(path: object, error: OSError) -> DataError:
    """What the system said of a file or a folder of the data."""
    return DataError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}); check its path and "
        "its permissions"
    )


def counted(number: int, noun: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
