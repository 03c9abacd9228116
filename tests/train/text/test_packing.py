"""Packed batches."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effjax.train.mesh import global_batch, local_rows, make_mesh
from effjax.train.text.packing import eval_batches, pack, train_batches
from effjax.train.text.rows import Sequences

LENGTH = 8


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
    """Yield the slots of each segment of a batch; they are contiguous."""
    for i, ids in enumerate(segment_ids(batch)):
        used = np.count_nonzero(ids)
        assert not ids[used:].any()
        for segment in range(1, ids.max() + 1):
            slots = np.flatnonzero(ids == segment)
            assert len(slots) and np.all(np.diff(slots) == 1)
            yield i, slice(slots[0], slots[-1] + 1)
        assert np.all(np.diff(ids[:used]) >= 0)


@given(st.lists(st.integers(1, LENGTH), max_size=40), st.booleans(), st.integers(0, 9))
def test_every_sequence_is_in_one_row(lengths, packing, seed):
    sequences = numbered(lengths, seed)
    packed = pack(sequences, LENGTH, packing)
    batch = packed.batch(np.arange(len(packed)))
    firsts, spans = dict(zip(sequences.offsets[:-1].tolist(), lengths, strict=True)), 0
    for i, slots in segments(batch):
        tokens = batch["tokens"][i, slots]
        first = int(tokens[0]) - 1
        assert len(tokens) == firsts.pop(first)  # a missing one was there before
        has_loss = sequences.has_loss[first : first + len(tokens)]
        np.testing.assert_array_equal(tokens, first + 1 + np.arange(len(tokens)))
        np.testing.assert_array_equal(batch["labels"][i, slots], [*tokens[1:], 0])
        np.testing.assert_array_equal(batch["weights"][i, slots], [*has_loss[1:], 0])
        np.testing.assert_array_equal(batch["positions"][i, slots], np.arange(len(tokens)))
        spans += 1
    assert not firsts
    padding = segment_ids(batch) == 0
    assert all(not array[padding].any() for array in batch.values())
    assert batch["weights"].sum() == sequences.num_losses
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32, "labels": np.int32, "weights": np.float32, "positions": np.int32,
        **({"segment_ids": np.int32} if packing else {}),
    }  # fmt: skip
    assert len(packed) == (spans if not packing else len(packed))
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


def test_efficiency():
    lengths = np.random.default_rng(0).integers(1, 513, 5000)
    packed, alone = (pack(numbered(lengths), 512, packing) for packing in (True, False))
    assert packed.efficiency > 0.99 and alone.efficiency == pytest.approx(0.5, abs=0.02)


def take(batches, count):
    return list(itertools.islice(batches, count))


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("packing", [True, False])
def test_epochs_and_resume(packing):
    packed = pack(numbered([5, 3, 8, 2, 2, 7, 1, 4]), LENGTH, packing)
    steps = 3 * len(packed)  # epochs end within batches
    batches = take(train_batches(packed, 2, seed=1), steps)
    tokens = _joined(batches)["tokens"]
    epochs = [tokens[first : first + len(packed)] for first in range(0, len(tokens), len(packed))]
    for epoch in epochs:
        assert sorted(epoch[epoch > 0]) == list(range(1, 33))
    assert len({epoch.tobytes() for epoch in epochs}) > 1
    other = _joined(take(train_batches(packed, 2, seed=2), steps))["tokens"]
    assert not np.array_equal(tokens, other)
    for step in range(steps):
        assert_same(take(train_batches(packed, 2, 1, step), 1), batches[step : step + 1])


def test_a_batch_may_be_larger_than_an_epoch():
    (batch,) = take(train_batches(pack(numbered([2]), LENGTH), 3, 0), 1)
    assert batch["tokens"][:, :3].tolist() == [[1, 2, 0]] * 3


def test_rows_of_processes():
    packed = pack(numbered([5, 3, 8, 2, 2, 7, 1, 4]), LENGTH)
    for batches in (
        lambda rows: take(train_batches(packed, 4, 0, rows=rows), 3),
        lambda rows: list(eval_batches(packed, 4, rows)),
    ):
        parts = [batches(slice(0, 1)), batches(slice(1, 4))]
        whole = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        assert_same(whole, batches(slice(None)))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_eval_batches_have_every_row_once(count):
    packed = pack(numbered([LENGTH] * count), LENGTH)
    batches = list(eval_batches(packed, 3))
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    assert len(tokens) == -(-count // 3) * 3
    assert tokens.ravel().tolist()[: LENGTH * count] == list(range(1, LENGTH * count + 1))
    assert not any(array[count:].any() for array in _joined(batches).values())


def _joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_batch_over_devices():
    """A batch is what the training loop distributes."""
    mesh = make_mesh("data=4,fsdp=2")
    packed = pack(numbered([3] * 20), LENGTH)
    (rows,) = take(train_batches(packed, 8, 0, rows=local_rows(8, mesh)), 1)
    batch = global_batch(rows, 8, mesh)
    assert {array.sharding.num_devices for array in batch.values()} == {8}
    assert_same(jax.device_get(batch), rows)


def test_order_of_the_file():
    """Neighbors share a row, and each epoch has the rows in the same order."""
    sequences = numbered([3, 5, 2, 7, 1, 4])
    packed = pack(sequences, LENGTH, in_order=True)
    rows = [packed.batch(np.array([i]))["tokens"][0] for i in range(len(packed))]
    assert np.concatenate([row[row > 0] for row in rows]).tolist() == sequences.tokens.tolist()
    assert [np.count_nonzero(row) for row in rows] == [8, 2, 8, 4]
    batches = train_batches(packed, len(packed), seed=0)
    for _ in range(2):
        np.testing.assert_array_equal(next(batches)["tokens"], rows)
