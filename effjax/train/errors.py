"""Errors that the user can correct: one line with the problem and the remedy."""

from pathlib import Path

from .. import _files


class TrainError(Exception):
    """A run that cannot start or continue with the given options, data or files."""


class PreemptionError(Exception):
    """Raised when a run stops on request, after its checkpoint has been written."""


class DataError(TrainError):
    """Data that cannot be read or cannot be right."""


def check_regular(path: Path) -> None:
    """Raise DataError if the path is a pipe, a device or a directory; a missing file passes."""
    try:
        _files.check_regular(path)
    except ValueError as error:
        raise DataError(f"{path} must be a regular file. Copy its content into one.") from error


def check_orbax_path(path: Path) -> None:
    """Raise TrainError if Orbax cannot write a checkpoint that it can read to the path."""
    # Orbax finds the parts of a checkpoint by `glob`, where [ begins a set of characters. Without
    # them it writes an incomplete checkpoint. Its C++ library needs UTF-8.
    absolute = str(path.absolute())
    is_utf8 = absolute.encode(errors="ignore").decode() == absolute
    if "[" in absolute or not is_utf8:
        raise TrainError(
            f"{path}: the absolute path of checkpoints must be UTF-8, without a [. Choose another."
        )


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error for a file or directory that the system refuses to read."""
    return DataError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}). Check its path and "
        "its permissions."
    )


def printable(text: str) -> str:
    """Return the text with control and format characters escaped, as `repr` does.

    In the name of a file or array, they could erase what a terminal shows, or reverse a text.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def quoted(data: object) -> str:
    """Return data of the user for a message: printable, and at most 120 characters."""
    text = str(data)
    if isinstance(data, Exception) and not text:  # such as MemoryError()
        text = type(data).__name__
    return printable(text if len(text) <= 120 else f"{text[:119]}…")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `"1 epoch"` or `"2 epochs"`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
