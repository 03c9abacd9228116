import itertools
import os

import numpy as np
import pytest

from effjax.train.errors import DataError
from effjax.train.text import windows
from effjax.train.text.windows import check_length, hold_out, load_text, split_text, train_windows

DATA = np.arange(103, dtype=np.uint8)


def test_pydoc_is_english():
    loaded = load_text("pydoc")
    assert len(loaded.train) > 300_000
    content = loaded.train.tobytes() + loaded.test.tobytes()
    assert b'The "if" statement is used for conditional execution' in content
    assert loaded.digest == load_text("pydoc").digest
    assert 4 < loaded.unigram_bits < 5.5


def test_file_is_split_by_position(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    loaded = load_text(f"text:{tmp_path / 'a.bin'}")
    np.testing.assert_array_equal(loaded.train, np.arange(90))
    np.testing.assert_array_equal(loaded.test, np.arange(90, 100))
    assert loaded.train.dtype == np.uint8


def test_folder_is_concatenated_in_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b.py", "a.txt", "c.png", "a/notes.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "d.txt").mkdir()
    loaded = load_text(f"text:{tmp_path}")
    assert loaded.train.tobytes() + loaded.test.tobytes() == b"a/b.py\na/z.md\na.txt\nb.txt"


def test_digest_and_unigram_bits():
    assert split_text("a", b"hello" * 9).digest == split_text("b", b"hello" * 9).digest
    assert split_text("a", b"hello" * 9).digest != split_text("a", b"hullo" * 9).digest
    even = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint8).tobytes()
    np.testing.assert_allclose(split_text("even", even).unigram_bits, 8, atol=0.01)
    assert split_text("same", b"a" * 400_000).unigram_bits < 0.01


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digits", "unknown data 'digits'. Use one of pydoc, text:PATH"),
        ("pydoc:here", "unknown data"),
        ("text:", "unknown data"),
        ("text:nowhere", r"nowhere: cannot be read \(No such file or directory\)"),
        ("text:pictures", r"pictures: contains no file with the suffix \.md or \.py or \.txt"),
        ("text:.", r"locked: cannot be read \(Permission denied\)"),
    ],
)
def test_invalid_data(tmp_path, monkeypatch, spec, message):
    def refuse(path):
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.chdir(tmp_path)
    for name in "pictures/a.png", "locked/a.txt", "a.txt":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=message):
        load_text(spec)


@pytest.mark.parametrize(("validation", "size"), [(0.1, 10), (0.25, 25), (7, 7), (0, 0)])
def test_hold_out(validation, size):
    whole = split_text("t", bytes(range(100)))
    parts = hold_out(whole, validation)
    np.testing.assert_array_equal(parts.train, np.arange(90 - size))
    np.testing.assert_array_equal(parts.validation, np.arange(90 - size, 90))
    np.testing.assert_array_equal(parts.test, whole.test)
    assert parts.digest == whole.digest and len(parts) == 100


@pytest.mark.parametrize(
    ("size", "validation", "message"),
    [
        (100, 90, r"`validation` \(=90\) must be less than the 90 train bytes"),
        (100, 0.001, r"`validation` \(=0\.001\) must hold out at least one byte"),
        (100, 8, r"bytes are too few for `context` \(=8\), in the validation part"),
        (100, 85, "too few .* in the train part"),
        (89, 0, "too few .* in the test part"),
    ],
)
def test_parts_that_are_too_short(size, validation, message):
    check_length(split_text("t", bytes(90)), 8)
    with pytest.raises(DataError, match=message):
        check_length(hold_out(split_text("t", bytes(size)), validation), 8)


def take(count, **options):
    given = dict(context=10, batch_size=3, seed=0) | options
    return list(itertools.islice(train_windows(DATA, **given), count))


def test_batches_depend_on_seed_and_step_only():
    whole = take(20)
    for first in (0, 1, 3, 4, 19):
        np.testing.assert_array_equal(take(20 - first, first_step=first), whole[first:])
    assert not np.array_equal(take(20, seed=1), whole)


def test_an_epoch_is_the_text_once():
    of_epochs = np.concatenate(take(6)).reshape(2, 9, 11)  # two epochs of nine windows
    for epoch in of_epochs:
        starts = np.sort(epoch[:, 0])
        np.testing.assert_array_equal(np.diff(starts), 10)
        assert 0 <= starts[0] < 10 and epoch.max() <= 102
    assert not np.array_equal(of_epochs[0, :, 0], of_epochs[1, :, 0])


@pytest.mark.parametrize("size", [11, 12, 20, 21, 31, 103])
def test_windows_are_parts_of_the_text(size):
    batches = train_windows(DATA[:size], context=10, batch_size=4, seed=0)
    for batch in itertools.islice(batches, 10):
        assert batch.dtype == np.int32 and batch.max() < size
        np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(11), (4, 1)))


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_test_batches_cover_the_text_once(batch_size):
    counted = []
    for tokens, weights in windows.test_windows(DATA, 10, batch_size):
        assert tokens.shape == (batch_size, 11) and weights.shape == (batch_size,)
        counted.append(tokens[weights == 1, 1:])
    np.testing.assert_array_equal(np.concatenate(counted).ravel(), np.arange(1, 101))
