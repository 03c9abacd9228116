"""Packed batches."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effjax.train.text.packing import eval_batches, pack, train_batches
from effjax.train.text.rows import Sequences

LENGTH = 8
SOME = [5, 3, 8, 2, 2, 7, 1, 4]


def numbered(lengths, seed=0):
    """Return sequences whose tokens are all different, with random losses."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    has_loss = np.random.default_rng(seed).random(offsets[-1]) < 0.5
    has_loss[offsets[:-1]] = False
    return Sequences(np.arange(1, offsets[-1] + 1, dtype=np.int32), has_loss, offsets)


def segment_ids(batch):
    """Return the segments; without packing, each row has one in front of its padding."""
    return batch.get("segment_ids", (batch["tokens"] > 0).astype(np.int32))


def segments(batch):
    """Yield the slots of each segment of a batch; they are contiguous, and then comes padding."""
    for i, ids in enumerate(segment_ids(batch)):
        sizes = np.bincount(ids, minlength=1)[1:]
        assert np.all(sizes > 0)
        numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        np.testing.assert_array_equal(ids, np.pad(numbers, (0, LENGTH - len(numbers))))
        for last, size in zip(np.cumsum(sizes), sizes, strict=True):
            yield i, slice(last - size, last)


@given(st.lists(st.integers(1, LENGTH), max_size=40), st.booleans(), st.integers(0, 9))
def test_every_sequence_is_in_one_row(lengths, packing, seed):
    sequences = numbered(lengths, seed)
    packed = pack(sequences, LENGTH, packing)
    batch = packed.batch(np.arange(len(packed)))
    firsts = dict(zip(sequences.offsets[:-1].tolist(), lengths, strict=True))
    for i, slots in segments(batch):
        tokens = batch["tokens"][i, slots]
        first = int(tokens[0]) - 1
        assert len(tokens) == firsts.pop(first)  # a missing one was there before
        has_loss = sequences.has_loss[first : first + len(tokens)]
        np.testing.assert_array_equal(tokens, first + 1 + np.arange(len(tokens)))
        np.testing.assert_array_equal(batch["labels"][i, slots], [*tokens[1:], 0])
        np.testing.assert_array_equal(batch["weights"][i, slots], [*has_loss[1:], 0])
        np.testing.assert_array_equal(batch["positions"][i, slots], np.arange(len(tokens)))
    assert not firsts
    padding = segment_ids(batch) == 0
    assert all(not array[padding].any() for array in batch.values())
    assert batch["weights"].sum() == sequences.num_losses
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32, "labels": np.int32, "weights": np.float32, "positions": np.int32,
        **({"segment_ids": np.int32} if packing else {}),
    }  # fmt: skip
    assert packing or len(packed) == len(lengths)
    if lengths:
        assert packed.efficiency == pytest.approx(1 - padding.mean())


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_best_fit_decreasing(lengths):
    """Compare with the plain algorithm."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else LENGTH) - size)
    assert len(pack(numbered(lengths), LENGTH)) == len(rooms)


def test_order_of_the_file():
    """Neighbors share a row, and each epoch has the rows in the same order."""
    packed = pack(numbered([3, 5, 2, 7, 1, 4]), LENGTH, in_order=True)
    rows = packed.batch(np.arange(len(packed)))["tokens"]
    assert rows[rows > 0].tolist() == list(range(1, 23))
    assert [np.count_nonzero(row) for row in rows] == [8, 2, 8, 4]
    for batch in take(train_batches(packed, len(packed), seed=0), 2):
        np.testing.assert_array_equal(batch["tokens"], rows)


def take(batches, count):
    return list(itertools.islice(batches, count))


def join(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("packing", [True, False])
def test_epochs_and_resume(packing):
    packed = pack(numbered(SOME), LENGTH, packing)
    steps = 3 * len(packed)  # epochs end within batches
    batches = take(train_batches(packed, 2, seed=1), steps)
    tokens = join(batches)["tokens"]
    epochs = tokens.reshape(-1, len(packed), LENGTH)
    for epoch in epochs:
        assert sorted(epoch[epoch > 0]) == list(range(1, 33))
    assert len({epoch.tobytes() for epoch in epochs}) > 1
    other = join(take(train_batches(packed, 2, seed=2), steps))["tokens"]
    assert not np.array_equal(tokens, other)
    for step in range(steps):
        assert_same(take(train_batches(packed, 2, 1, step), 1), batches[step : step + 1])
    # A batch may be larger than an epoch.
    (batch,) = take(train_batches(pack(numbered([2]), LENGTH, packing), 3, 0), 1)
    assert batch["tokens"][:, :3].tolist() == [[1, 2, 0]] * 3


def test_rows_of_processes():
    packed = pack(numbered(SOME), LENGTH)
    for batches in (
        lambda rows: take(train_batches(packed, 4, 0, rows=rows), 3),
        lambda rows: list(eval_batches(packed, 4, rows)),
    ):
        parts = [batches(slice(0, 1)), batches(slice(1, 4))]
        whole = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        assert_same(whole, batches(slice(None)))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_eval_batches_have_every_row_once(count):
    batch = join(list(eval_batches(pack(numbered([LENGTH] * count), LENGTH), 3)))
    assert len(batch["tokens"]) == -(-count // 3) * 3
    assert batch["tokens"][:count].ravel().tolist() == list(range(1, LENGTH * count + 1))
    assert not any(array[count:].any() for array in batch.values())
