import os
import tarfile

import numpy as np
import pytest

from effjax.train.errors import DataError
from effjax.train.images.load import load_dataset
from effjax.train.text.windows import load_text
from tests.train.images import archives

ALL = {10: archives.cifar10, 100: archives.cifar100}


def expected(num_classes, n):
    """Images [N, 32, 32, 3] and labels of the train set."""
    if num_classes == 10:
        flat = np.concatenate([archives.pixels(i, n) for i in range(5)])
        labels = [label for i in range(5) for label in archives.labels(i, n, 10)]
    else:
        flat, labels = archives.pixels(0, 5 * n), archives.labels(0, 5 * n, 100)
    return np.moveaxis(flat.reshape(-1, 3, 32, 32), 1, -1), labels


@pytest.mark.parametrize(
    ("num_classes", "source"),
    [(10, "directory"), (10, "tar.gz"), (100, "inner directory"), (100, "tar")],
)
def test_reads_every_source(tmp_path, num_classes, source):
    files = ALL[num_classes]()
    if "directory" in source:
        path = archives.write_directory(tmp_path, files)
        if source == "inner directory":
            path = path / next(iter(files)).split("/")[0]
    else:
        mode = "w:gz" if source == "tar.gz" else "w"
        path = archives.write_tar(tmp_path / "archive", files, mode)
    data = load_dataset(f"cifar{num_classes}:{path}")
    images, labels = expected(num_classes, 10 if num_classes == 10 else 20)
    np.testing.assert_array_equal(data.train_images, images)
    np.testing.assert_array_equal(data.train_labels, labels)
    assert data.train_images.dtype == np.uint8 and data.train_labels.dtype == np.int32
    assert len(data.test_images) == len(images) // 5
    assert data.class_names == tuple(f"class{i}" for i in range(num_classes))
    assert data.flip


def test_names_the_version_to_download(tmp_path):
    path = archives.write_directory(tmp_path, {"cifar-10-batches-py/batches.meta": b"\x80\x02N."})
    with pytest.raises(DataError, match="Python version. Download the binary version"):
        load_dataset(f"cifar10:{path}")


def cut(files, name):
    files[name] = files[name][:-100]


def cut_at_record(files, name):
    files[name] = files[name][: -2 * (3073 if "10-" in name else 3074)]


def remove(files, name):
    del files[name]


def empty(files, name):
    files[name] = b""


def wrong_label(files, name):
    at = 0 if "10-" in name else 1
    files[name] = files[name][:at] + b"\x64" + files[name][at + 1 :]


def wrong_names(files, name):
    files[next(name for name in files if name.endswith(".txt"))] = b"a b c"


@pytest.mark.parametrize(
    ("num_classes", "change", "message"),
    [
        (10, cut, "{name}: 30630 bytes is not a multiple of the 3073-byte record"),
        (10, cut_at_record, "48 train and 10 test images, not five to one"),
        (10, remove, "{name} of CIFAR-10 is missing"),
        (10, empty, "{name}: contains no images"),
        (10, wrong_label, "{name}: labels must be integers from 0 to 9"),
        (10, wrong_names, "batches.meta.txt must contain 10 class names, not 3"),
        (100, wrong_label, "{name}: labels must .* from 0 to 99"),
    ],
)
def test_error_names_the_damaged_file(tmp_path, num_classes, change, message):
    files = ALL[num_classes]()
    name = next(name for name in files if "data_batch_2" in name or "train" in name)
    change(files, name)
    path = archives.write_directory(tmp_path, files)
    with pytest.raises(DataError, match=message.format(name=name.rsplit("/", 1)[1])) as raised:
        load_dataset(f"cifar{num_classes}:{path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", ["cut", "cut at its end", "bits", "text"])
def test_damaged_archive(tmp_path, damage):
    path = archives.write_tar(tmp_path / "a.tar.gz", archives.cifar10())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255 if damage == "bits" else 0
    size = {"cut": 0.3, "cut at its end": 0.999}.get(damage, 1) * len(content)
    path.write_bytes(b"hello" * 1000 if damage == "text" else content[: int(size)])
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        load_dataset(f"cifar10:{path}")


def test_links_and_huge_members_are_not_read(tmp_path):
    path = tmp_path / "link.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="data_batch_1.bin of CIFAR-10 is missing"):
        load_dataset(f"cifar10:{path}")

    path = tmp_path / "giant.tar"
    giant = tarfile.TarInfo("anything")
    giant.size = 1 << 40
    path.write_bytes(giant.tobuf() + bytes(1024))
    with pytest.raises(DataError, match="anything: 1099511627776 bytes"):
        load_dataset(f"cifar10:{path}")


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_rejects_long_member_names(tmp_path, kind):
    """A small file of zeros, compressed, can hold one of gigabytes."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = kind, 1 << 31
    path = tmp_path / "long.tar"
    path.write_bytes(member.tobuf() + bytes(1024))
    with pytest.raises(DataError, match="not a complete .* .a name or comment of 2147483648 bytes"):
        load_dataset(f"cifar10:{path}")


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_rejects_pipes_and_devices(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"{name} must be a regular file. Copy its"):
        load_dataset(f"cifar10:{tmp_path / name}")
    with pytest.raises(DataError, match=f"{name} must be a regular file"):
        load_text(f"text:{tmp_path / name}")
    folder = archives.write_images(tmp_path / "images", {"a": 1, "b": 2})
    os.symlink(tmp_path / name, folder / "a" / "1.png")
    with pytest.raises(DataError, match=r"1\.png must be a regular file"):
        load_dataset(f"folder:{folder}")


def test_rejects_duplicate_members(tmp_path):
    files = archives.cifar10()
    files["other/data_batch_1.bin"] = files["cifar-10-batches-bin/data_batch_1.bin"]
    path = archives.write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match="contains data_batch_1.bin twice"):
        load_dataset(f"cifar10:{path}")
