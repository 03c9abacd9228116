"""Batches of sequences of different lengths, packed into rows of one length."""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .rows import FinetuneData, Sequences
from .windows import Batch


@dataclass(frozen=True)
class PackedSequences:
    """Rows of a fixed length, each of one or several sequences; from `pack`.

    Attributes:
        sequences: The sequences.
        length: Number of tokens in a row, padding included.
        order: int64 [number of sequences], the sequences of the first row, then those of the
            second one, and so on.
        starts: int64 [number of rows + 1], where each row begins in `order`.
        packed: Whether a row may have several sequences.
        shuffled: Whether each epoch has the rows in another order.
    """

    sequences: Sequences
    length: int
    order: np.ndarray
    starts: np.ndarray
    packed: bool = True
    shuffled: bool = True

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def efficiency(self) -> float:
        """Share of the tokens that are not padding."""
        return len(self.sequences.tokens) / max(len(self) * self.length, 1)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return rows as arrays [N, T].

        - `tokens`: 0 in padding.
        - `labels`: The next token of the sequence; 0 at its last token and in padding.
        - `weights`: 1 where the label has loss, else 0.
        - `positions`: From 0 in each sequence.
        - `segment_ids`, of packed rows: 1 for the first sequence, 2 for the second one, and
          so on; 0 in padding. A single sequence never attends to the padding behind it.

        Args:
            rows: Indices of rows [N]. -1 is a row of padding only.
        """
        shape = len(rows), self.length
        names = "tokens", "labels", "weights", "positions", "segment_ids"
        batch = {name: np.zeros(shape, "f4" if name == "weights" else "i4") for name in names}
        source = self.sequences
        for i, row in enumerate(rows):
            if row < 0:
                continue
            end = 0
            chosen = self.order[self.starts[row] : self.starts[row + 1]]
            for segment, sequence in enumerate(chosen, 1):
                first, last = source.offsets[sequence : sequence + 2]
                start, end = end, end + last - first
                batch["tokens"][i, start:end] = source.tokens[first:last]
                batch["labels"][i, start : end - 1] = source.tokens[first + 1 : last]
                batch["weights"][i, start : end - 1] = source.has_loss[first + 1 : last]
                batch["positions"][i, start:end] = np.arange(last - first)
                batch["segment_ids"][i, start:end] = segment
        if not self.packed:
            del batch["segment_ids"]
        return batch


def pack(
    sequences: Sequences, length: int, packing: bool = True, in_order: bool = False
) -> PackedSequences:
    """Distribute sequences over rows of a fixed length.

    The longest sequences come first, and each goes to the fullest row that has room for it. The
    result depends on the lengths of the sequences only, not on a seed or an epoch, so that all
    epochs have the same number of rows.

    Args:
        sequences: At most `length` tokens each.
        length: Number of tokens in a row.
        packing: If False, each row has one sequence.
        in_order: Whether to keep the order of the sequences. A row then ends where the next
            sequence does not fit.
    """
    number, lengths = len(sequences), sequences.lengths
    if not packing or in_order:
        firsts, room = [], 0
        for sequence, size in enumerate(lengths.tolist()):
            if not packing or size > room:
                firsts.append(sequence)
                room = length
            room -= size
        starts = np.array([*firsts, number])
        return PackedSequences(
            sequences, length, np.arange(number), starts, packing, shuffled=not in_order
        )
    row_of = np.zeros(len(sequences), np.int64)
    rooms: list[int] = []  # the different numbers of free tokens, sorted
    rows: dict[int, list[int]] = {}  # the rows with that many
    count = 0
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[sequence])
        i = bisect.bisect_left(rooms, size)
        if i == len(rooms):
            row, room = count, length
            count += 1
        else:
            room = rooms[i]
            row = rows[room].pop()
            if not rows[room]:
                del rooms[i], rows[room]
        row_of[sequence] = row
        if (room := room - size) not in rows:
            bisect.insort(rooms, room)
            rows[room] = []
        rows[room].append(row)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))])
    return PackedSequences(sequences, length, np.argsort(row_of, kind="stable"), starts)


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed sequences, as the data of a `TextTask`.

    Attributes:
        source: The sequences.
        train: The rows to train on.
        validation: The rows to validate on; may be empty.
    """

    source: FinetuneData
    train: PackedSequences
    validation: PackedSequences

    unit: ClassVar[str] = "token"
    unigram_bits: ClassVar[None] = None

    @property
    def has_validation(self) -> bool:
        """True if the validation part is not empty."""
        return len(self.validation) > 0

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a row, without padding."""
        return self.train.length * self.train.efficiency

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows of the train part."""
        return len(self.train)

    def describe(self) -> dict[str, Any]:
        """Return what distinguishes these data from others, for config.json."""
        return self.source.describe()

    def train_batches(
        self, batch_size: int, seed: int, first_step: int = 0, rows: slice = slice(None)
    ) -> Iterator[Batch]:
        """Yield batches without end, as the function `train_batches`."""
        return train_batches(self.train, batch_size, seed, first_step, rows)

    def eval_batches(
        self, part: str, batch_size: int, rows: slice = slice(None)
    ) -> Iterator[Batch]:
        """Yield the batches of the validation part. There is no test part."""
        if part == "validation":
            yield from eval_batches(self.validation, batch_size, rows)


def train_batches(
    packed: PackedSequences, batch_size: int, seed: int, first_step: int = 0,
    rows: slice = slice(None),
) -> Iterator[Batch]:  # fmt: skip
    """Yield batches without end, determined by seed and step.

    Each epoch has all rows, in a random order if they are shuffled. A batch may end one
    epoch and begin the next.

    Args:
        packed: From `pack`; not empty.
        batch_size: Number of rows in a batch.
        seed: Seed of the order.
        first_step: Number of batches to skip.
        rows: Rows of each batch to return (those of this process).
    """
    order = _train_order(len(packed), seed, first_step * batch_size, packed.shuffled)
    while True:
        chosen = np.fromiter(itertools.islice(order, batch_size), np.int64, batch_size)
        yield packed.batch(chosen[rows])


def eval_batches(
    packed: PackedSequences, batch_size: int, rows: slice = slice(None)
) -> Iterator[Batch]:
    """Yield all rows in order. The last batch is filled up with padding, whose weights are 0.

    Args:
        packed: From `pack`.
        batch_size: Number of rows in a batch.
        rows: Rows of each batch to return (those of this process).
    """
    for first in range(0, len(packed), batch_size):
        numbers = np.arange(first, first + batch_size)
        yield packed.batch(np.where(numbers < len(packed), numbers, -1)[rows])


def _train_order(count: int, seed: int, first: int, shuffled: bool) -> Iterator[int]:
    """Yield the rows of all epochs, from the given one on."""
    for epoch in itertools.count(first // count):
        order = np.random.default_rng([seed, epoch]).permutation(count)
        order = order if shuffled else np.arange(count)
        yield from order[first % count if epoch == first // count else 0 :]
