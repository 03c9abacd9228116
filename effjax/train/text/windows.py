"""Text as bytes in memory, and windows of it for training and testing."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError, check_regular, unreadable

FORMATS = "pydoc, text:PATH"
SUFFIXES = frozenset({".md", ".py", ".txt"})
TEST_SHARE = 10  # the last tenth of a text is for testing
TEST_BYTES = 2**17  # maximum number of bytes to test on

# int32 [N, T], apart from `weights` (float32); the names are those of `decoder_functions`.
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Text:
    """Bytes of a text, uint8 [n]: `train`, then `validation` (which may be empty), then `test`."""

    name: str
    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __len__(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the whole text."""
        parts = self.train, self.validation, self.test
        return sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    @property
    def unigram_bits(self) -> float:
        """Bits per test byte of a unigram model fitted to `train`, with add-one smoothing."""
        counts = np.bincount(self.train, minlength=256) + 1
        return float(-np.mean(np.log2(counts / counts.sum())[self.test]))


def load_text(spec: str) -> Text:
    """Read a text and split it into train and test parts.

    Args:
        spec: `pydoc` (the language reference that comes with Python) or `text:PATH`. PATH is a
            file, or a folder whose `*.txt`, `*.md` and `*.py` files, including those in subfolders,
            are concatenated in the order of their paths.

    Raises:
        DataError: The text cannot be read.
    """
    if spec == "pydoc":
        return split_text(spec, _pydoc_topics())
    kind, _, path = spec.partition(":")
    if kind != "text" or not path:
        raise DataError(f"unknown data {spec!r:.120}. Use one of {FORMATS}.")
    try:
        content = b"\n".join(file.read_bytes() for file in _files(Path(path)))
    except OSError as error:
        raise unreadable(path, error) from error
    return split_text(spec, content)


def split_text(name: str, content: bytes) -> Text:
    """Split a text: the first nine tenths for training, the last for testing."""
    data = np.frombuffer(content, np.uint8)
    count = len(data) - len(data) // TEST_SHARE
    return Text(name, data[:count], data[count:])


def hold_out(text: Text, validation: float) -> Text:
    """Move the end of the train part to the validation part.

    Args:
        text: Text without a validation part.
        validation: Share of the whole text if below 1, else a number of bytes. 0 for none.

    Raises:
        DataError: No training byte would be left, or no byte would be held out.
    """
    count = round(validation * len(text)) if validation < 1 else int(validation)
    left = len(text.train) - count
    if left < 1:
        raise DataError(
            f"`validation` (={validation:g}) must be less than the {len(text.train)} train bytes "
            f"of {text.name}"
        )
    if validation and not count:
        raise DataError(
            f"`validation` (={validation:g}) must hold out at least one byte of {text.name}. Use "
            "a larger number, or 0 for no validation."
        )
    return dataclasses.replace(text, train=text.train[:left], validation=text.train[left:])


def check_length(text: Text, context: int) -> None:
    """Raise `DataError` if a part of the text is shorter than one window."""
    lengths = {part: len(getattr(text, part)) for part in ("train", "validation", "test")}
    for part, length in lengths.items():
        if length <= context and (length or part != "validation"):
            raise DataError(
                f"{text.name}: {length} bytes are too few for `context` (={context}), in the "
                f"{part} part of the text. Use a longer text, a smaller `context` or another "
                "`validation`. The last tenth of the text is for testing."
            )


@dataclass(frozen=True)
class TextWindows:
    """A text whose rows are windows of bytes, as the data of a `TextTask`.

    Attributes:
        text: The text.
        row_length: Bytes of a row.
    """

    text: Text
    row_length: int

    unit: ClassVar[str] = "byte"

    @property
    def has_validation(self) -> bool:
        """True if the validation part is not empty."""
        return len(self.text.validation) > 0

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a row, without padding."""
        return self.row_length

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows of the train part."""
        return max((len(self.text.train) - 1) // self.row_length - 1, 1)

    @property
    def unigram_bits(self) -> float:
        """Bits per test byte of a model without context."""
        return self.text.unigram_bits

    def describe(self) -> dict[str, Any]:
        """Return what distinguishes these data from others, for config.json."""
        description = {"train_bytes": len(self.text.train)}
        if self.has_validation:
            description["validation_bytes"] = len(self.text.validation)
        return description | {"test_bytes": len(self.text.test), "sha256": self.text.digest}

    def train_batches(
        self, batch_size: int, seed: int, first_step: int = 0, rows: slice = slice(None)
    ) -> Iterator[Batch]:
        """Yield batches without end, as `train_windows`."""
        windows = train_windows(
            self.text.train, self.row_length, batch_size, seed, first_step, rows
        )
        return map(_split, windows)

    def eval_batches(
        self, part: str, batch_size: int, rows: slice = slice(None)
    ) -> Iterator[Batch]:
        """Yield the batches of the validation or the test part, with weights."""
        data = getattr(self.text, part)
        if not len(data):
            return
        for windows, weights in test_windows(data, self.row_length, batch_size):
            weights = weights[rows, None].repeat(self.row_length, 1)
            yield _split(windows[rows]) | {"weights": weights}


def _split(windows: np.ndarray) -> Batch:
    """Return the tokens of windows [N, T + 1], and the next tokens."""
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def train_windows(
    data: np.ndarray, context: int, batch_size: int, seed: int, first_step: int = 0,
    rows: slice = slice(None),
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yield batches int32 [batch_size, context + 1] without end, determined by seed and step.

    In each epoch the text is cut into windows that overlap by one byte, in random order and from a
    random first byte. The last byte of a window is a target only.

    Args:
        data: uint8 [n], n > context.
        context: Length of a window in input bytes.
        batch_size: Number of windows in a batch.
        seed: Seed of the order.
        first_step: Number of batches to skip.
        rows: Rows of each batch to return (those of this process).
    """
    starts = _train_starts(data, context, seed, first_step * batch_size)
    while True:
        chosen = np.fromiter(itertools.islice(starts, batch_size), np.int64, batch_size)
        yield _windows(data, chosen[rows], context)


def test_windows(
    data: np.ndarray, context: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the windows of a text in order, with weights float32 [batch_size].

    The last batch is padded with windows of weight 0. Bytes that do not fill a window, and bytes
    after `TEST_BYTES`, are dropped.
    """
    count = max(min(len(data) - 1, TEST_BYTES) // context, 1)
    for first in range(0, count, batch_size):
        numbers = np.arange(first, first + batch_size)
        yield _windows(data, numbers % count * context, context), (numbers < count).astype("f4")


def _train_starts(data: np.ndarray, context: int, seed: int, first: int) -> Iterator[int]:
    """Yield the first byte of each window, from window number `first` on."""
    count = max((len(data) - 1) // context - 1, 1)  # leaves room for the windows to shift
    room = len(data) - 1 - count * context
    for epoch in itertools.count(first // count):
        rng = np.random.default_rng([seed, epoch])
        starts = rng.integers(min(room, context - 1) + 1) + context * rng.permutation(count)
        yield from starts[first % count if epoch == first // count else 0 :]


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _files(path: Path) -> list[Path]:
    """List the file, or the text files of a folder in the order of their paths."""

    def refuse(error: OSError) -> None:
        raise error  # by default `os.walk` skips folders that it may not read

    if not path.is_dir():
        check_regular(path)
        return [path]
    walk = os.walk(path, onerror=refuse)
    inside = [Path(folder, name) for folder, _, names in walk for name in names]
    files = [file for file in inside if file.suffix in SUFFIXES and file.is_file()]
    files.sort(key=lambda file: file.relative_to(path).parts)
    if not files:
        raise DataError(f"{path}: contains no file with the suffix {' or '.join(sorted(SUFFIXES))}")
    return files


def _pydoc_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            'data "pydoc" needs pydoc_data, which this Python lacks. Use text:PATH.'
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
