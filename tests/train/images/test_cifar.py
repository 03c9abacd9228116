import os
import tarfile

import numpy as np
import pytest

from effjax.train.errors import DataError
from effjax.train.images.load import load_dataset
from tests.train.images import archives

ALL = {10: archives.cifar10, 100: archives.cifar100}


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
    pixels, labels = archives.pixels(0, 100), archives.labels(0, 100, 100)
    if num_classes == 10:
        pixels = np.concatenate([archives.pixels(i, 10) for i in range(5)])
        labels = [label for i in range(5) for label in archives.labels(i, 10, 10)]
    images = np.moveaxis(pixels.reshape(-1, 3, 32, 32), 1, -1)
    np.testing.assert_array_equal(data.train_images, images)
    np.testing.assert_array_equal(data.train_labels, labels)
    assert data.train_images.dtype == np.uint8 and data.train_labels.dtype == np.int32
    assert len(data.test_images) == len(images) // 5
    assert data.class_names == tuple(f"class{i}" for i in range(num_classes))
    assert data.flip


@pytest.mark.parametrize(
    ("num_classes", "file", "change", "message"),
    [
        (10, "data_batch_2.bin", lambda a: a[:-100], "{file}: 30630 bytes is not a multiple"),
        (10, "data_batch_2.bin", lambda a: a[: -2 * 3073], "48 train and 10 test images"),
        (10, "data_batch_2.bin", None, "{file} of CIFAR-10 is missing"),
        (10, "data_batch_2.bin", lambda a: a[:0], "{file}: contains no images"),
        (10, "data_batch_2.bin", lambda a: b"\x0a" + a[1:], "{file}: labels .* from 0 to 9"),
        (10, "batches.meta.txt", lambda a: b"a b c", "{file} must contain 10 class names, not 3"),
        (100, "train.bin", lambda a: a[:1] + b"\x64" + a[2:], "{file}: labels .* from 0 to 99"),
    ],
)
def test_error_names_the_damaged_file(tmp_path, num_classes, file, change, message):
    files = ALL[num_classes]()
    (path,) = (name for name in files if name.endswith(f"/{file}"))
    content = files.pop(path)
    files |= {} if change is None else {path: change(content)}
    archives.write_directory(tmp_path, files)
    with pytest.raises(DataError, match=message.format(file=file)) as raised:
        load_dataset(f"cifar{num_classes}:{tmp_path}")
    assert "\n" not in str(raised.value)


def test_names_the_version_to_download(tmp_path):
    archives.write_directory(tmp_path, {"cifar-10-batches-py/batches.meta": b"\x80\x02N."})
    with pytest.raises(DataError, match="Python version. Download the binary version"):
        load_dataset(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("damage", ["cut", "cut at its end", "bits", "text"])
def test_damaged_archive(tmp_path, damage):
    path = archives.write_tar(tmp_path / "a.tar.gz", archives.cifar10())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255 if damage == "bits" else 0
    size = {"cut": 0.3, "cut at its end": 0.999}.get(damage, 1) * len(content)
    path.write_bytes(b"hello" * 1000 if damage == "text" else content[: int(size)])
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        load_dataset(f"cifar10:{path}")


HEADERS = b"L", b"K", b"x", b"g"
BATCH = "cifar-10-batches-bin/data_batch_1.bin"


@pytest.mark.parametrize(
    ("name", "kind", "size", "message"),
    [
        (BATCH, tarfile.SYMTYPE, 0, "data_batch_1.bin of CIFAR-10 is missing"),
        ("anything", tarfile.REGTYPE, 1 << 40, "anything: 1099511627776 bytes"),
        # A small file of zeros, compressed, can hold a name of gigabytes.
        *(
            ("././@Long", kind, 1 << 31, "not a complete .* comment of 2147483648")
            for kind in HEADERS
        ),
    ],
)
def test_links_and_huge_members_are_not_read(tmp_path, name, kind, size, message):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "/etc/passwd"
    (tmp_path / "a.tar").write_bytes(member.tobuf() + bytes(1024))
    with pytest.raises(DataError, match=message):
        load_dataset(f"cifar10:{tmp_path / 'a.tar'}")


def test_rejects_duplicate_members(tmp_path):
    files = archives.cifar10()
    path = archives.write_tar(tmp_path / "a", files | {"other/data_batch_1.bin": files[BATCH]})
    with pytest.raises(DataError, match="contains data_batch_1.bin twice"):
        load_dataset(f"cifar10:{path}")


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_rejects_pipes_and_devices(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    folder = archives.write_images(tmp_path / "images", {"a": 1, "b": 2})
    os.symlink(tmp_path / name, folder / "a" / "1.png")
    for spec, file in ((f"cifar10:{tmp_path / name}", name), (f"folder:{folder}", "1.png")):
        with pytest.raises(DataError, match=f"{file} must be a regular file"):
            load_dataset(spec)
