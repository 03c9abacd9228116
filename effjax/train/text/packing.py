"""Batches of sequences of different lengths, packed into rows of one length."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .rows import FinetuneData, Sequences

# int32 [N, T], apart from `weights` (float32); the names are those of `decoder_functions`.
Batch = dict[str, np.ndarray]


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
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a row, without padding."""
        return len(self.sequences.tokens) / max(len(self), 1)

    @property
    def efficiency(self) -> float:
        """Share of the tokens that are not padding."""
        return self.tokens_per_row / self.length

    def batch(self, rows: np.ndarray) -> Batch:
        """Return rows as arrays [N, T].

        - `tokens`: 0 in padding.
        - `labels`: The next token of the sequence; 0 at its last token and in padding.
        - `weights`: 1 where the label has loss, else 0.
        - `positions`: From 0 in each sequence.
        - `segment_ids`, of packed rows: 1 for the first sequence, 2 for the second one, and
          so on; 0 in padding.

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
                # Labels are shifted within a sequence. The last token of one never predicts the
                # first of the next one.
                batch["labels"][i, start : end - 1] = source.tokens[first + 1 : last]
                batch["weights"][i, start : end - 1] = source.has_loss[first + 1 : last]
                batch["positions"][i, start:end] = np.arange(last - first)
                batch["segment_ids"][i, start:end] = segment
        # Causal attention never reads the padding behind a single sequence.
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
    order, starts = _distribute(sequences.lengths, length, packing, in_order)
    return PackedSequences(sequences, length, order, starts, packing, not in_order)


def _distribute(
    lengths: np.ndarray, length: int, packing: bool, in_order: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the `order` and the `starts` of sequences of some lengths."""
    number = len(lengths)
    if not packing or in_order:
        firsts, room = [], 0
        for sequence, size in enumerate(lengths.tolist()):
            if not packing or size > room:
                firsts.append(sequence)
                room = length
            room -= size
        return np.arange(number), np.array([*firsts, number])
    row_of = np.zeros(number, np.int64)
    # Best fit, decreasing: the fullest row with room is found by bisection over the different
    # rooms, of which there are at most `length`.
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
    return np.argsort(row_of, kind="stable"), starts


@dataclass(frozen=True)
class PackedPairs:
    """Rows of pairs of sequences, from `pack_pairs`.

    Attributes:
        sides: The chosen sequences and the rejected ones, in the same rows and order.
        references: float32 [number of pairs, 2], the log probabilities of both by the model at the
            start of the run. NaN until they are computed.
        pairs_per_row: The largest number of pairs in a row.
    """

    sides: tuple[PackedSequences, PackedSequences]
    references: np.ndarray
    pairs_per_row: int

    def __len__(self) -> int:
        return len(self.sides[0])

    @property
    def shuffled(self) -> bool:
        """True if each epoch has the rows in another order."""
        return self.sides[0].shuffled

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a pair of rows, without padding."""
        return sum(side.tokens_per_row for side in self.sides)

    @property
    def efficiency(self) -> float:
        """Share of the tokens that are not padding."""
        return self.tokens_per_row / (2 * self.sides[0].length)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return rows as arrays [N, 2, T] as `PackedSequences.batch`, the chosen ones first.

        - `pairs`: [N, P], 1 for each pair of a row, 0 for the places behind them.
        - `references`: [N, P, 2], the log probabilities of `references`.

        Args:
            rows: Indices of rows [N]. -1 is a row of padding only.
        """
        chosen, rejected = (side.batch(rows) for side in self.sides)
        batch = {name: np.stack([chosen[name], rejected[name]], 1) for name in chosen}
        batch["pairs"] = np.zeros((len(rows), self.pairs_per_row), "f4")
        batch["references"] = np.zeros((*batch["pairs"].shape, 2), "f4")
        for i, pairs in enumerate(self._pairs_of(rows)):
            batch["pairs"][i, : len(pairs)] = 1
            batch["references"][i, : len(pairs)] = self.references[pairs]
        return batch

    def set_references(self, rows: np.ndarray, log_probs: np.ndarray) -> None:
        """Store the log probabilities [N, P, 2] of the pairs of rows [N]."""
        for pairs, values in zip(self._pairs_of(rows), log_probs, strict=True):
            self.references[pairs] = values[: len(pairs)]

    def _pairs_of(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the pairs in each row."""
        order, starts = self.sides[0].order, self.sides[0].starts
        for row in rows:
            yield order[starts[row] : starts[row + 1]] if row >= 0 else order[:0]


def pack_pairs(
    parts: Sequence[Sequences], length: int, packing: bool = True, in_order: bool = False
) -> list[PackedPairs]:
    """Distribute pairs over rows of a fixed length, as `pack` does.

    A pair has as much room as its longer sequence takes in both rows.

    Args:
        parts: Chosen and rejected sequences in turns, from `load_rows`.
        length: Number of tokens in a row.
        packing: If False, each row has one pair.
        in_order: Whether to keep the order of the pairs.
    """
    packed = []
    for part in parts:
        is_chosen = np.arange(len(part)) % 2 == 0
        sides = part.select(is_chosen), part.select(~is_chosen)
        # The sides have the same rows and order, so that one segment id names both of a pair.
        lengths = np.maximum(*(side.lengths for side in sides))
        rows = length, *_distribute(lengths, length, packing, in_order), packing, not in_order
        chosen, rejected = (PackedSequences(side, *rows) for side in sides)
        packed.append(((chosen, rejected), np.full((len(lengths), 2), np.nan, np.float32)))
    counts = [np.diff(sides[0].starts).max(initial=1) for sides, _ in packed]
    # Programs are compiled for one number.
    return [PackedPairs(*part, pairs_per_row=int(max(counts))) for part in packed]


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed sequences, as the data of a `TextTask`.

    Attributes:
        source: The sequences.
        train: The rows to train on.
        validation: The rows to validate on; may be empty.
    """

    source: FinetuneData
    train: PackedSequences | PackedPairs
    validation: PackedSequences | PackedPairs


def train_batches(
    packed: PackedSequences | PackedPairs, batch_size: int, seed: int, first_step: int = 0,
    rows: slice = slice(None),
) -> Iterator[Batch]:  # fmt: skip
    """Yield batches without end, determined by seed and step.

    Each epoch has all rows, in a random order if they are shuffled. A batch may end one
    epoch and begin the next.

    Args:
        packed: From `pack` or `pack_pairs`; not empty.
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
    packed: PackedSequences | PackedPairs, batch_size: int, rows: slice = slice(None)
) -> Iterator[Batch]:
    """Yield all rows in order. The last batch is filled up with padding, whose weights are 0.

    Args:
        packed: From `pack` or `pack_pairs`.
        batch_size: Number of rows in a batch.
        rows: Rows of each batch to return (those of this process).
    """
    # Padding keeps one shape, for which the step is compiled once.
    for numbers in number_rows(len(packed), batch_size):
        yield packed.batch(numbers[rows])


def number_rows(count: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the numbers of all rows, batch by batch; -1 fills up the last one."""
    for first in range(0, count, batch_size):
        numbers = np.arange(first, first + batch_size)
        yield np.where(numbers < count, numbers, -1)


def _train_order(count: int, seed: int, first: int, shuffled: bool) -> Iterator[int]:
    """Yield the rows of all epochs, from the given one on."""
    for epoch in itertools.count(first // count):
        # An epoch's order is drawn from its number, not from the state of a generator: a run that
        # resumes in epoch 5 does not draw those before it.
        order = np.random.default_rng([seed, epoch]).permutation(count)
        order = order if shuffled else np.arange(count)
        yield from order[first % count if epoch == first // count else 0 :]
