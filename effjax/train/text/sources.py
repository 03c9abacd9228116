"""Rows of data sets as dictionaries: files of JSON, CSV and Parquet, and data sets of the Hub."""

import contextlib
import glob
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..._extras import install_command
from ..errors import DataError, check_regular, quoted, unreadable
from .hub import names_file, parse_name

TABLES = {".csv": "csv", ".parquet": "parquet"}  # what the package `datasets` reads, by suffix
# Cells are the text of the file. By default, pandas reads NA as null and 007 as 7, and moves the
# cells of a row that is too long. It has no type for all columns, only a converter for each.
CSV = {"converters": dict.fromkeys(range(1000), str), "na_filter": False, "index_col": False}
CHUNK = 1000  # rows that are read at a time
# A name on the Hub, then the split, after the configuration of a data set that has several.
DATASET = re.compile(r"([^:]+)(?::([^:]+))??(?::([^:]+))?")


class Row(NamedTuple):
    """A row and where it is, such as `line 3`."""

    place: str
    content: dict[str, Any]


def read_rows(name: str, prompt: str = "prompt") -> Iterator[Row]:
    """Yield the rows of a data set.

    Args:
        name: A file with a JSON object in each line, or a JSON array of them, a .csv or .parquet
            file, or a data set of the Hub: `OWNER/NAME[@REVISION][[:CONFIGURATION]:SPLIT]`. What
            exists is a file.
        prompt: The column of CSV whose cells may be empty. Other empty cells are left out.

    Raises:
        DataError: It cannot be read, or a row is not an object. The message names both.
    """
    path, count, match = Path(name), 0, DATASET.fullmatch(name)
    repository = parse_name(match[1]) if match and not names_file(name) else None
    if match and repository:
        revision, split = repository.revision, match[3] or "train"
        rows = _load(name, prompt, repository.name, split, name=match[2], revision=revision)
    elif path.suffix.lower() in TABLES:
        rows = _read_table(path, prompt)
    else:
        rows = read_json_rows(path)
    for count, row in enumerate(rows, 1):  # noqa: B007
        if isinstance(row, DataError):
            raise row
        yield row
    if not count:
        raise DataError(f"{name}: contains no row.")


def read_json_rows(path: Path) -> Iterator[Row | DataError]:
    """Yield the rows of a file of JSON, and the error of each line that is not one.

    Raises:
        DataError: The file cannot be read, or its JSON array.
    """
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
                    try:
                        row = _as_row(path, f"line {number}", _parse(path, f"line {number}", text))
                    except DataError as error:
                        row = error
                    yield row
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
        text = _decode(path, place, content.rstrip())
        value = json.loads(text, parse_constant=lambda name: None)  # NaN, which is no JSON
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()
        return value
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


def _decode(path: Path, place: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {place}: is not UTF-8 ({error.reason})") from error


def _read_table(path: Path, prompt: str) -> Iterator[Row]:
    check_regular(path)
    kind = TABLES[path.suffix.lower()]
    try:
        with path.open("rb") as file:
            # pandas decodes many rows at a time, so that its error would name none.
            for number, line in enumerate(file if kind == "csv" else (), 1):
                _decode(path, f"line {number}", line)
    except OSError as error:
        raise unreadable(path, error) from error
    # `datasets` takes a pattern, and a relative path with a colon for a URL.
    return _load(str(path), prompt, kind, data_files=glob.escape(str(path.absolute())))


def _load(
    shown: str, prompt: str, source: str, split: str = "train", **options: Any
) -> Iterator[Row]:
    """Yield the rows that `datasets.load_dataset` finds."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
        from datasets.exceptions import DatasetGenerationError
    except ModuleNotFoundError as error:
        raise DataError(
            f"{shown}: needs {error.name}, which is missing. Run {install_command('datasets')}."
        ) from error
    number, is_local = 0, "data_files" in options
    try:
        with _quiet(datasets):
            is_csv = datasets.load_dataset_builder(source, **options).name == "csv"
            options |= CSV if is_csv else {}
            # Rows that are streamed have no copy in the cache.
            loaded = datasets.load_dataset(source, split=split, streaming=is_local, **options)
        rows, chunk = iter(loaded), [None]
        while chunk:
            chunk = []
            with _quiet(datasets):  # and not while the caller has a row
                for row in itertools.islice(rows, CHUNK):
                    chunk.append(_remove_nulls(row))
                    number += 1
            for place, row in enumerate(chunk, number - len(chunk) + 1):
                if is_csv:
                    row = {name: cell for name, cell in row.items() if cell or name == prompt}
                yield Row(f"row {place}", row)
    # Its errors, and those of its HTTP client, have no common base class.
    except Exception as error:
        cause: Any = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        cause = " ".join(str(cause).split())
        if "index_col" in cause:
            cause = "row 1 has more cells than the header"
        place = f" row {number + 1}:" if isinstance(error, UnicodeDecodeError) else ""
        remedy = "Check the name, the configuration and the split; offline, the cache must have it."
        if is_local:
            remedy = "Correct the file."
        raise DataError(f"{shown}:{place} cannot be loaded ({quoted(cause)}). {remedy}") from error


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Silence the package `datasets`, and make lost cells of CSV an error."""
    level, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header")
            yield
    finally:
        datasets.logging.set_verbosity(level)
        if had_bars:
            datasets.enable_progress_bars()


def _remove_nulls(value: Any) -> Any:
    """Return a value without keys that are null: Arrow adds the keys of other rows."""
    if isinstance(value, dict):
        return {key: _remove_nulls(one) for key, one in value.items() if one is not None}
    return [_remove_nulls(one) for one in value] if isinstance(value, list) else value


def json_type(value: Any) -> str:
    """Return the name that JSON has for the type of a value."""
    names: Any = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    names |= {int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)  # of Arrow, a date for example
