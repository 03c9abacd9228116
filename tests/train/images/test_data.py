import numpy as np
import pytest

from effjax.train.errors import DataError, TrainError
from effjax.train.images.dataset import (
    Dataset,
    ImageFiles,
    channel_counts,
    channel_statistics,
    hold_out,
    stratified_split,
)
from effjax.train.images.load import load_dataset
from tests.train.images import archives


def test_digits():
    pytest.importorskip("sklearn")
    data = load_dataset("digits")
    assert data.train_images.shape == (1438, 8, 8, 1)
    assert data.test_images.shape == (359, 8, 8, 1)
    assert data.train_images.dtype == np.uint8 and data.train_images.max() == 255
    assert data.class_names == tuple("0123456789")
    assert not data.flip
    assert np.bincount(data.test_labels).min() >= 34
    again = load_dataset("digits")
    np.testing.assert_array_equal(data.test_images, again.test_images)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mnist", "unknown data 'mnist'. Use one of digits, cifar10:PATH"),
        ("digits:here", "unknown data"),
        ("cifar10", "unknown data"),
        ("cifar10:", "unknown data"),
        ("cifar100:nowhere", "nowhere: cannot be read \\(No such file"),
        ("folder:nowhere", "nowhere: cannot be read \\(No such file"),
    ],
)
def test_unknown_data(spec, message):
    with pytest.raises(TrainError, match=message):
        load_dataset(spec)


def test_split_is_stratified_and_fixed():
    labels = np.repeat(np.arange(3), [50, 10, 1])
    train, test = stratified_split(labels)
    assert sorted([*train, *test]) == list(range(61))
    assert np.bincount(labels[test], minlength=3).tolist() == [10, 2, 0]
    np.testing.assert_array_equal(test, stratified_split(labels)[1])
    assert not np.array_equal(test, stratified_split(labels, seed=1)[1])


def numbered(counts):
    """Return a train set of images whose only pixel is their number."""
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    images = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    names = tuple("abcdefg"[: len(counts)])
    return Dataset("made", images, labels, images, labels, names, flip=True)


@pytest.mark.parametrize(
    ("validation", "held_out"), [(0.1, [5, 1, 0]), (0.5, [25, 5, 0]), (12, [10, 2, 0]), (0, [])]
)
def test_hold_out(validation, held_out):
    """Each class gives the same share, never all of it, and the same images in every run."""
    whole = numbered([50, 10, 1])
    data = hold_out(whole, validation)
    assert np.bincount(data.validation_labels, minlength=len(held_out)).tolist() == held_out
    images = np.concatenate([data.train_images.ravel(), data.validation_images.ravel()])
    assert sorted(images) == list(range(61)) and len(data.test_images) == 61
    np.testing.assert_array_equal(whole.train_labels[data.train_images.ravel()], data.train_labels)
    again = hold_out(whole, validation)
    np.testing.assert_array_equal(data.validation_images, again.validation_images)


def test_hold_out_leaves_a_train_and_a_validation_set():
    message = r"`validation` \(=61\) must be less than the 61 train images"
    with pytest.raises(DataError, match=message):
        hold_out(numbered([50, 10, 1]), 61)
    with pytest.raises(DataError, match=r"`validation` \(=3\) must hold out at least one image"):
        hold_out(numbered([10] * 10), 3)


def test_channel_statistics():
    images = np.random.default_rng(0).integers(0, 256, (20, 5, 4, 3), np.uint8)
    images[..., 2] = 7
    counts = sum(channel_counts(images, process, 3) for process in range(3))
    np.testing.assert_array_equal(counts, channel_counts(images))
    mean, std = channel_statistics(channel_counts(images))
    np.testing.assert_allclose(mean, (images / 255).mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std[:2], (images / 255).std((0, 1, 2))[:2], rtol=1e-6)
    assert std[2] == 1  # constant: nothing to scale


def test_folder_with_train_and_val(tmp_path):
    archives.write_images(tmp_path / "train", {"cat": 3, "dog": 2})
    archives.write_images(tmp_path / "val", {"cat": 1, "dog": 2})
    data = load_dataset(f"folder:{tmp_path}")
    assert data.train_images.shape == (5, 8, 9, 3)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1]
    assert data.test_labels.tolist() == [0, 1, 1]
    assert data.class_names == ("cat", "dog")


def test_large_folder_is_decoded_on_access(tmp_path):
    archives.write_images(tmp_path, {"cat": 9, "dog": 6})
    whole, lazy = (
        hold_out(load_dataset(f"folder:{tmp_path}", in_memory=size), 0.2) for size in (2**20, 0)
    )
    for part in ("train", "validation", "test"):
        images, files = getattr(whole, f"{part}_images"), getattr(lazy, f"{part}_images")
        assert isinstance(files, ImageFiles) and files.shape == images.shape
        chosen = np.arange(len(images))[::-1]
        np.testing.assert_array_equal(files[chosen], images[chosen])
        np.testing.assert_array_equal(
            getattr(lazy, f"{part}_labels"), getattr(whole, f"{part}_labels")
        )
    np.testing.assert_array_equal(
        channel_counts(lazy.train_images), channel_counts(whole.train_images)
    )


def test_folder_without_split(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    archives.write_images(tmp_path, {"cat": 10, "dog": 5})
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    data = load_dataset(f"folder:{tmp_path}")
    assert np.bincount(data.train_labels).tolist() == [8, 4]
    assert np.bincount(data.test_labels).tolist() == [2, 1]
    # Every image is in one of the parts, unchanged.
    parts = [*data.train_images, *data.test_images]
    first = np.asarray(pil.open(tmp_path / "dog" / "0.png"))
    assert sum(np.array_equal(first, image) for image in parts) == 1


def test_folder_resizes(tmp_path):
    archives.write_images(tmp_path / "a", {"cat": 2}, (20, 10))
    archives.write_images(tmp_path / "b", {"dog": 2}, (12, 16))
    archives.write_images(tmp_path / "all", {"x": 0})
    (tmp_path / "a" / "cat").rename(tmp_path / "all" / "cat")
    (tmp_path / "b" / "dog").rename(tmp_path / "all" / "dog")
    (tmp_path / "all" / "x").rmdir()
    data = load_dataset(f"folder:{tmp_path / 'all'}", 8)
    assert data.train_images.shape == (2, 8, 8, 3)
    with pytest.raises(
        DataError, match=r"dog/[01]\.png: 12×16 pixels, but 0\.png has 20×10. Set .* resize"
    ):
        load_dataset(f"folder:{tmp_path / 'all'}")


def corrupt(path):
    file = path / "dog" / "1.png"
    file.write_bytes(file.read_bytes()[:100])


def no_image(path):
    (path / "dog" / "1.png").write_text("hello")


def deep_image(path):
    image_module = pytest.importorskip("PIL.Image")
    image_module.fromarray(np.full((8, 9), 4000, np.uint16)).save(path / "dog" / "1.png")


def float_image(path):
    image_module = pytest.importorskip("PIL.Image")
    image_module.fromarray(np.full((8, 9), 4e3, np.float32)).save(path / "dog" / "2.tif")


def empty_class(path):
    (path / "snake").mkdir()


def one_image(path):
    archives.write_images(path, {"snake": 1})


def no_classes(path):
    for name in ("cat", "dog"):
        (path / name).rename(path.parent / name)


def split_without_a_class(path):
    archives.write_images(path / "train", {"cat": 2, "dog": 2})
    archives.write_images(path / "test", {"cat": 2, "cow": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (corrupt, r"dog/1\.png: not a readable image"),
        (no_image, r"dog/1\.png: not a readable image"),
        (deep_image, r"dog/1\.png: is a 16-bit image. Convert it to 8 bits per channel"),
        (float_image, r"dog/2\.tif: is a floating-point image. Convert it to 8 bits"),
        (empty_class, "snake: 0 images, but a class needs at least 2"),
        (one_image, "snake: 1 image, but a class needs at least 2"),
        (no_classes, "0 class folders. Give each of at least two classes"),
        (split_without_a_class, "class 'cow' must be in both train/ and test/, or in neither"),
    ],
)
def test_rejects_invalid_folders(tmp_path, change, message):
    archives.write_images(tmp_path / "set", {"cat": 2, "dog": 2})
    change(tmp_path / "set")
    with pytest.raises(DataError, match=message) as raised:
        load_dataset(f"folder:{tmp_path / 'set'}")
    assert "\n" not in str(raised.value)


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: cannot be read \(Not a directory\)"):
        load_dataset(f"folder:{tmp_path / 'file'}")
