"""Text as bytes in memory, and windows of it to train and to test on."""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..errors import DataError, check_regular, unreadable

FORMATS = "pydoc, text:PATH"
SUFFIXES = frozenset({".md", ".py", ".txt"})
TEST_SHARE = 10  # the last tenth of a text is for testing
TEST_BYTES = 2**17  # at most so many are tested on


@dataclass(frozen=True)
class Text:
    """The bytes of a text: uint8 [n], first `train`, then `validation` if any, then `test`."""

    name: str
    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __len__(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes."""
        parts = self.train, self.validation, self.test
        return sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    @property
    def unigram_bits(self) -> float:
        """Bits per test byte of a model that knows only how often each byte is in `train`.

        Each of the 256 is counted once more than it is there.
        """
        counts = np.bincount(self.train, minlength=256) + 1
        return float(-np.mean(np.log2(counts / counts.sum())[self.test]))


def load_text(spec: str) -> Text:
    """Reads the text that `spec` names: `pydoc` or `text:PATH`.

    Args:
        spec: `pydoc` is the help on Python's language that comes with Python. PATH is a file, or a
            folder whose `*.txt`, `*.md` and `*.py` are joined in the order of their names, those in
            its folders too.

    Raises:
        DataError: the text cannot be read, or is empty.
    """
    if not isinstance(spec, str):
        raise TypeError(f"`spec` (={spec!r}) must be text: one of {FORMATS}.")
    kind, separator, path = spec.partition(":")
    if kind == "pydoc" and not separator:
        return split_text(spec, _pydoc_topics())
    if kind != "text" or not path:
        raise DataError(f"data {spec!r} is not known; use one of {FORMATS}")
    try:
        if not Path(path).exists():
            raise DataError(f"{path}: no such file or directory; check the path in {spec!r}")
        content = b"\n".join(file.read_bytes() for file in _files(Path(path)))
    except OSError as error:
        raise unreadable(path, error) from error
    if not content.strip():
        raise DataError(f"{path}: holds no text; give a file or a folder that does")
    return split_text(spec, content)


def split_text(name: str, content: bytes) -> Text:
    """The first nine tenths to train on, the last one to test on."""
    data = np.frombuffer(content, np.uint8)
    count = len(data) - len(data) // TEST_SHARE
    return Text(name, data[:count], data[count:])


def hold_out(text: Text, validation: float) -> Text:
    """The text with the end of its train part as its validation part.

    Args:
        validation: a share of the whole text, or a number of bytes. 0: no validation part.

    Raises:
        DataError: nothing would be left to train on.
    """
    count = round(validation * len(text)) if validation < 1 else int(validation)
    left = len(text.train) - count
    if left < 1:
        raise DataError(
            f"validation (={validation:g}) leaves none of the {len(text.train)} train bytes of "
            f"{text.name}; use a smaller one"
        )
    return dataclasses.replace(text, train=text.train[:left], validation=text.train[left:])


def check_length(text: Text, context: int) -> None:
    """Raises `DataError` unless there is a window to train on, and one to test on."""
    if len(text.test) <= context:
        needed = TEST_SHARE * (context + 1)
        raise DataError(
            f"{text.name}: {len(text)} bytes are too few for context (={context}), which needs "
            f"{needed}, as a tenth is for testing; use a smaller context or a longer text"
        )
    if len(text.train) <= context or 0 < len(text.validation) <= context:
        raise DataError(
            f"{text.name}: {len(text.train)} bytes to train on and {len(text.validation)} for "
            f"validation are too few for context (={context}); use another validation, or 0"
        )


def train_batches(
    data: np.ndarray, context: int, batch_size: int, seed: int, first_step: int = 0,
    rows: slice = slice(None),
) -> Iterator[np.ndarray]:  # fmt: skip
    """Batches int32 [batch_size, context + 1] for ever, the same for the same seed and step.

    An epoch is the text cut into windows that overlap by one byte, in random order; where the first
    begins is drawn anew for each epoch. The last byte of a window is predicted only.

    Args:
        data: uint8 [n], n > context.
        first_step: the number of batches to leave out.
        rows: those of each batch that are made.
    """
    starts = _train_starts(data, context, seed, first_step * batch_size)
    while True:
        chosen = np.fromiter(itertools.islice(starts, batch_size), np.int64, batch_size)
        yield _windows(data, chosen[rows], context)


def test_batches(
    data: np.ndarray, context: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Windows as of `train_batches`, in the order of the text, each with its weight.

    The last batch is filled up with windows of weight 0. What does not fill a window is left out,
    and so is what comes after `TEST_BYTES`.
    """
    count = max(min(len(data) - 1, TEST_BYTES) // context, 1)
    for first in range(0, count, batch_size):
        numbers = np.arange(first, first + batch_size)
        yield _windows(data, numbers % count * context, context), (numbers < count).astype("f4")


def _train_starts(data: np.ndarray, context: int, seed: int, first: int) -> Iterator[int]:
    """Where windows begin, from number `first` on."""
    count = max((len(data) - 1) // context - 1, 1)  # leaves room for the windows to shift
    room = len(data) - 1 - count * context
    for epoch in itertools.count(first // count):
        rng = np.random.default_rng([seed, epoch])
        starts = rng.integers(min(room, context - 1) + 1) + context * rng.permutation(count)
        yield from starts[first % count if epoch == first // count else 0 :]


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder that are text by their name, in the order of their paths."""

    def refuse(error: OSError) -> None:
        raise error  # `os.walk` and `Path.rglob` would leave out what they may not read

    if not path.is_dir():
        check_regular(path)
        return [path]
    walk = os.walk(path, onerror=refuse)
    inside = [Path(folder, name) for folder, _, names in walk for name in names]
    found = [file for file in inside if file.suffix in SUFFIXES and file.is_file()]
    found.sort(key=lambda file: file.relative_to(path).parts)
    if not found:
        raise DataError(f"{path}: no file ends in {', '.join(sorted(SUFFIXES))}; add one")
    return found


def _pydoc_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            'data "pydoc" needs pydoc_data, which this Python lacks; use text:PATH'
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
