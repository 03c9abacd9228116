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
from effjax.train.images.folder import class_files
from effjax.train.images.load import load_dataset
from tests.train.images import archives


def test_digits():
    pytest.importorskip("sklearn")
    data = load_dataset("digits")
    assert data.train_images.shape == (1438, 8, 8, 1)
    assert data.test_images.shape == (359, 8, 8, 1)
    assert data.train_images.dtype == np.uint8 and data.train_images.max() == 255
    assert data.class_names == tuple("0123456789") and not data.flip
    assert np.bincount(data.test_labels).min() >= 34
    again = load_dataset("digits")
    np.testing.assert_array_equal(data.test_images, again.test_images)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mnist", "unknown data 'mnist'. Use one of digits, cifar10:PATH"),
        ("digits:here", "unknown data"),
        ("cifar10:", "unknown data"),
        ("cifar100:nowhere", r"nowhere: cannot be read \(No such file"),
        ("folder:nowhere", r"nowhere: cannot be read \(No such file"),
        ("folder:file", r"file: cannot be read \(Not a directory\)"),
        ("folder:.", "0 class folders. Give each of at least two classes"),
    ],
)
def test_unknown_data(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
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
    with pytest.raises(DataError, match=r"`validation` \(=61\) must be less than the 61 train"):
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


@pytest.mark.parametrize(
    ("train", "test"),
    [("train", "val"), ("Train", "Test"), ("training", "testing"), ("TRAIN", "valid"),
     ("train", "Validation"), ("train", "dev")],
)  # fmt: skip
def test_names_of_splits(tmp_path, train, test):
    archives.write_images(tmp_path / train, {"cat": 3, "dog": 2})
    archives.write_images(tmp_path / test, {"cat": 1, "dog": 2})
    data = load_dataset(f"folder:{tmp_path}")
    assert data.class_names == ("cat", "dog") and not data.left_out
    assert (len(data.train_labels), data.test_labels.tolist()) == (5, [0, 1, 1])


def test_folder_with_three_sets(tmp_path):
    """The validation images are those of the folder, whatever the share."""
    for folder, count in ("train", 10), ("val", 2), ("test", 3), ("spare", 1):
        archives.write_images(tmp_path / folder, {"cat": count, "dog": 1})
    for size in 2**20, 0:
        data = hold_out(load_dataset(f"folder:{tmp_path}", in_memory=size), 0.5)
        parts = data.train_images, data.validation_images, data.test_images
        assert [len(images) for images in parts] == [11, 3, 4]
        assert data.validation_labels.tolist() == [0, 0, 1]
        assert data.left_out == ("spare",)
    archives.write_images(tmp_path / "valid", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="val/ and valid/ are both validation sets. Keep one"):
        load_dataset(f"folder:{tmp_path}")


def test_train_folder_alone(tmp_path):
    """It may be a class, but not one of a folder whose test set has an unknown name."""
    archives.write_images(tmp_path, {"car": 2, "train": 2})
    assert load_dataset(f"folder:{tmp_path}").class_names == ("car", "train")
    for folder in "train", "holdout":
        archives.write_images(tmp_path / "sets" / folder, {"cat": 2, "dog": 2})
    with pytest.raises(DataError, match="train/ needs test/ or val/ beside it. Rename it if"):
        load_dataset(f"folder:{tmp_path}/sets")


def test_images_are_those_of_torchvision(tmp_path):
    """`ImageFolder` reads subfolders and links to folders. Pillow reads more formats."""
    pil = pytest.importorskip("PIL.Image")
    files = "2.PNG", "3.jpeg", "3.webp", "4.jfif", "5.jp2", "6.tga", "more/1.png", "more/x/0.bmp"
    for value, name in enumerate([*files, "clip.mpeg", "notes.txt", ".hidden.png", ".cache/0.png"]):
        for folder in tmp_path / "cat", tmp_path / "dog":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name in files:
                pil.new("RGB", (4, 4), (value * 20,) * 3).save(folder / name)
            else:
                (folder / name).touch()
    (tmp_path / "dog" / "linked").symlink_to(tmp_path / "cat" / "more")
    (tmp_path / "README").touch()
    classes, left_out = class_files(tmp_path)
    names = [str(file.relative_to(tmp_path / "dog")) for file in classes["dog"]]
    assert names == [*files[:6], "linked/1.png", "linked/x/0.bmp", *files[6:]]
    ignored = {f"{folder}/{name}" for folder in ("cat", "dog")
               for name in ("clip.mpeg", "notes.txt", ".hidden.png", ".cache")}  # fmt: skip
    assert {str(file.relative_to(tmp_path)) for file in left_out} == ignored | {"README"}
    data = load_dataset(f"folder:{tmp_path}")
    assert len(data.train_labels) + len(data.test_labels) == 18
    means = np.concatenate([data.train_images, data.test_images]).mean((1, 2, 3))
    assert len(np.unique(means.round(-1))) == 8  # all formats are decoded


def test_folder_without_split(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    archives.write_images(tmp_path, {"cat": 10, "dog": 5})
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    data = load_dataset(f"folder:{tmp_path}")
    assert np.bincount(data.train_labels).tolist() == [8, 4]
    assert np.bincount(data.test_labels).tolist() == [2, 1]
    # Every image is in one of the parts, unchanged.
    first = np.asarray(pil.open(tmp_path / "dog" / "0.png"))
    parts = [*data.train_images, *data.test_images]
    assert sum(np.array_equal(first, image) for image in parts) == 1


def test_large_folder_is_decoded_on_access(tmp_path):
    archives.write_images(tmp_path, {"cat": 9, "dog": 6})
    whole, lazy = (
        hold_out(load_dataset(f"folder:{tmp_path}", in_memory=size), 0.2) for size in (2**20, 0)
    )
    for part in ("train", "validation", "test"):
        images, files = getattr(whole, f"{part}_images"), getattr(lazy, f"{part}_images")
        assert isinstance(files, ImageFiles) and files.shape == images.shape
        np.testing.assert_array_equal(files[np.arange(len(images))[::-1]], images[::-1])
        labels = getattr(lazy, f"{part}_labels"), getattr(whole, f"{part}_labels")
        np.testing.assert_array_equal(*labels)
    counts = channel_counts(lazy.train_images), channel_counts(whole.train_images)
    np.testing.assert_array_equal(*counts)


def test_folder_resizes(tmp_path):
    archives.write_images(tmp_path, {"cat": 2}, (20, 10))
    archives.write_images(tmp_path, {"dog": 2}, (12, 16))
    assert load_dataset(f"folder:{tmp_path}", 8).train_images.shape == (2, 8, 8, 3)
    with pytest.raises(DataError, match=r"dog/[01]\.png: 12×16 pixels, but 0\.png has 20×10"):
        load_dataset(f"folder:{tmp_path}")


DEEP, FLOATS = np.full((8, 9), 4000, np.uint16), np.full((8, 9), 4e3, np.float32)
PARTS = ["train/cat/0.png", "train/dog/0.png", "test/cat/0.png", "test/cow/0.png"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dog/1.png": "hello"}, r"dog/1\.png: not a readable image"),
        ({"dog/1.png": None}, r"dog/1\.png: not a readable image"),
        ({"dog/1.png": DEEP}, r"dog/1\.png: is a 16-bit image. Convert it to 8 bits"),
        ({"dog/2.tif": FLOATS}, r"dog/2\.tif: is a floating-point image. Convert it to 8 bits"),
        ({"snake/notes.txt": ""}, "snake: 0 images, but a class needs at least 2"),
        ({"snake/0.png": ""}, "snake: 1 image, but a class needs at least 2"),
        (dict.fromkeys(PARTS, ""), "class 'cow' must be in both train/ and test/, or in neither"),
    ],
)
def test_invalid_folders(tmp_path, files, message):
    """A file has a text, the pixels of an image, or the first bytes of one that was cut."""
    pil = pytest.importorskip("PIL.Image")
    archives.write_images(tmp_path, {"cat": 2, "dog": 2})
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            file.write_text(content)
        elif content is None:
            file.write_bytes(file.read_bytes()[:100])
        else:
            pil.fromarray(content).save(file)
    with pytest.raises(DataError, match=message) as raised:
        load_dataset(f"folder:{tmp_path}")
    assert "\n" not in str(raised.value)
