"""Rows of data sets as dictionaries: files of JSON, CSV and Parquet, and data sets of the Hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..._extras import install_command
from ..errors import DataError, check_regular, quoted, unreadable
from .hub import parse_name

TABLES = {".csv": "csv", ".parquet": "parquet"}  # what the package `datasets` reads, by suffix
# A name on the Hub, then the split, after the configuration of a data set that has several.
DATASET = re.compile(r"([^:]+)(?::([^:]+))??(?::([^:]+))?")


class Row(NamedTuple):
    """A row and where it is, such as `line 3`."""

    place: str
    content: dict[str, Any]


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a data set.

    Args:
        name: A file with a JSON object in each line, or a JSON array of them, a .csv or .parquet
            file, or a data set of the Hub: `OWNER/NAME[@REVISION][[:CONFIGURATION]:SPLIT]`.

    Raises:
        DataError: It cannot be read, or a row is not an object. The message names both.
    """
    path, count = Path(name), 0
    if Path(name.partition(":")[0]).exists() or parse_name(name.partition(":")[0]) is None:
        table = TABLES.get(path.suffix.lower())
        rows = _read_json(path) if table is None else _read_table(path, table)
    else:
        rows = _read_hub(name)
    for count, row in enumerate(rows, 1):  # noqa: B007
        yield row
    if not count:
        raise DataError(f"{name}: contains no row.")


def _read_json(path: Path) -> Iterator[Row]:
    check_regular(path)
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(0)
            if start.startswith(b"["):
                yield from _read_array(path, file.read())
                return
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf")
                if text.strip():
                    yield _as_row(path, f"line {number}", _parse(path, f"line {number}", text))
    except OSError as error:
        raise unreadable(path, error) from error


def _read_array(path: Path, content: bytes) -> Iterator[Row]:
    # A file of lines may begin with a line that is an array, which is an error of that line.
    first = content.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)
    place = "the array" if len(first) == 1 or first[0].strip() == b"[" else "line 1"
    values = _parse(path, place, content.removeprefix(b"\xef\xbb\xbf"))
    for number, value in enumerate(values, 1):
        yield _as_row(path, f"row {number}", value)


def _as_row(path: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {place}: must be a JSON object, not a {json_type(value)}")
    return Row(place, value)


def _parse(path: Path, place: str, content: bytes) -> Any:
    """Return a JSON value, or raise DataError."""
    try:
        value = json.loads(content.rstrip().decode())
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        problem, cause = f"is not UTF-8 ({error.reason})", error
    except UnicodeEncodeError as error:
        problem, cause = "contains half of a surrogate pair, which is not a character", error
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        problem = (
            f"is not JSON ({error.msg}, {where}). Write one JSON object into each line, or a JSON "
            "array of them."
        )
        cause = error
    except (ValueError, RecursionError) as error:
        problem, cause = f"is not JSON that can be read ({quoted(error)})", error
    raise DataError(f"{path}: {place}: {problem}") from cause


def _read_table(path: Path, kind: str) -> Iterator[Row]:
    check_regular(path)
    if not path.exists():
        raise DataError(f"{path}: cannot be read (No such file). Check its path.")
    yield from _load(str(path), kind, data_files=str(path), split="train")


def _read_hub(name: str) -> Iterator[Row]:
    match = DATASET.fullmatch(name)
    repository = parse_name(match[1]) if match else None
    if match is None or repository is None:
        raise DataError(f"{name}: must be a file, or OWNER/NAME[@REVISION][[:CONFIGURATION]:SPLIT]")
    yield from _load(
        name, repository.name, name=match[2], split=match[3] or "train",
        revision=repository.revision,
    )  # fmt: skip


def _load(shown: str, *args: Any, **options: Any) -> Iterator[Row]:
    """Yield the rows that `datasets.load_dataset` finds."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise DataError(
            f"{shown}: needs {error.name}, which is missing. Run {install_command('datasets')}."
        ) from error
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(*args, **options)
    # Its errors, and those of its HTTP client, have no common base class.
    except Exception as error:
        raise DataError(
            f"{shown}: cannot be loaded ({quoted(error)}). Check the name, the configuration and "
            "the split; without a network, the cache of `datasets` must have it."
        ) from error
    for number, row in enumerate(loaded, 1):
        yield Row(f"row {number}", dict(row))


def json_type(value: Any) -> str:
    """Return the name that JSON has for the type of a value."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
