import io
import os
import pickle
import tarfile

import numpy as np
import pytest

from effjax.train.data.arrays_pickle import loads
from effjax.train.data.load import load_dataset
from effjax.train.data.text import load_text
from effjax.train.errors import DataError
from tests.train.data import archives

ALL = {
    "cifar10-python": ("cifar10", archives.cifar10_python, 10),
    "cifar10-binary": ("cifar10", archives.cifar10_binary, 10),
    "cifar100-python": ("cifar100", archives.cifar100_python, 100),
    "cifar100-binary": ("cifar100", archives.cifar100_binary, 100),
}


def expected(num_classes, n):
    """Images [N, 32, 32, 3] and labels of the train set."""
    if num_classes == 10:
        flat = np.concatenate([archives.pixels(i, n) for i in range(5)])
        labels = [label for i in range(5) for label in archives.labels(i, n, 10)]
    else:
        flat, labels = archives.pixels(0, 5 * n), archives.labels(0, 5 * n, 100)
    return np.moveaxis(flat.reshape(-1, 3, 32, 32), 1, -1), labels


@pytest.mark.parametrize(
    ("kind", "source"), [*zip(ALL, ["directory", "inner directory", "tar.gz", "tar"], strict=True)]
)
def test_reads_every_format(tmp_path, kind, source):
    name, make, num_classes = ALL[kind]
    files = make()
    if "directory" in source:
        path = archives.write_directory(tmp_path, files)
        if source == "inner directory":
            path = path / next(iter(files)).split("/")[0]
    else:
        mode = "w:gz" if source == "tar.gz" else "w"
        path = archives.write_tar(tmp_path / "archive", files, mode)
    data = load_dataset(f"{name}:{path}")
    images, labels = expected(num_classes, 10 if num_classes == 10 else 20)
    np.testing.assert_array_equal(data.train_images, images)
    np.testing.assert_array_equal(data.train_labels, labels)
    assert data.train_images.dtype == np.uint8 and data.train_labels.dtype == np.int32
    assert len(data.test_images) == len(images) // 5
    assert data.class_names == tuple(f"class{i}" for i in range(num_classes))
    assert data.flip


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_every_protocol(tmp_path, protocol):
    archives.write_directory(tmp_path, archives.cifar10_python(protocol=protocol))
    images, _ = expected(10, 10)
    np.testing.assert_array_equal(load_dataset(f"cifar10:{tmp_path}").train_images, images)


class Runs:
    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "content",
    [
        Runs(os.system, "echo no"),
        Runs(eval, "1"),
        Runs(getattr, "a", "join"),
        {"data": Runs(np.load, "x")},
        np.array([Runs(os.getcwd)], dtype=object),
        np.array([1, "a"], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        np.float32(1),
        np.dtype("f4"),
        frozenset({1}),
        [{"data": {1, 2}}],
        bytearray(b"a"),
        np.ndarray,
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_rejects_other_pickles(content, protocol):
    with pytest.raises(DataError, match=r"^file: refused, its pickle asks for .*publisher\.$"):
        loads(pickle.dumps(content, protocol), "file")


def test_malicious_archive_runs_no_code(tmp_path):
    files = archives.cifar10_python()
    marker = tmp_path / "marker"
    files["cifar-10-batches-py/data_batch_3"] = pickle.dumps(Runs(os.mkdir, str(marker)), 2)
    path = archives.write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match="data_batch_3: refused, its pickle asks for posix.mkdir"):
        load_dataset(f"cifar10:{path}")
    assert not marker.exists()


def test_pickle_cannot_modify_stand_ins():
    # GLOBAL numpy._core.numeric._frombuffer, then BUILD with {"__new__": 1} as its state.
    attack = b"cnumpy._core.numeric\n_frombuffer\n}(S'__new__'\nI1\nub."
    with pytest.raises(DataError):
        loads(attack, "file")
    array = np.arange(3)
    np.testing.assert_array_equal(loads(pickle.dumps(array, 5), "file"), array)


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # BYTEARRAY8
        # numpy._core.numeric._frombuffer(1 << 40, dtype("u1"), (1 << 40,), "C")
        b"cnumpy._core.numeric\n_frombuffer\n(I1099511627776\ncnumpy\ndtype\n(S'u1'\ntR"
        b"(I1099511627776\ntS'C'\ntR.",
    ],
)
def test_small_pickle_uses_little_memory(attack):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for entry in (b"r\x00\x00\x00\x08", b"p134217728\n"):  # of the memo: LONG_BINPUT, PUT
        assert loads(b"]" + entry + b".", "file") == []
    with pytest.raises(DataError, match="^file: (not a complete pickle|refused)"):
        loads(attack, "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_strings_of_python_2():
    pickled = b"(dp1\nS'a'\np2\nS'\\xff\\x00'\np3\ns."  # of protocol 0, where they are escaped
    assert loads(pickled, "file") == {b"a": b"\xff\x00"}


def test_plain_values_and_arrays_of_numbers():
    shared = np.arange(6, dtype=">f4").reshape(2, 3)
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    value = {"a": [shared, shared], "b": (None, True, 1.5, b"", "x"), "c": {"d": fortran}}
    for protocol in range(6):
        got = loads(pickle.dumps(value, protocol), "file")
        # Python 3's text comes back as such; only Python 2's strings become bytes.
        assert got["b"] == value["b"]
        np.testing.assert_array_equal(got["c"]["d"], fortran)
        np.testing.assert_array_equal(got["a"][0], shared)
        assert got["a"][0] is got["a"][1]


def test_shared_objects_are_visited_once():
    value = []
    for _ in range(100):
        value = [value, value]
    assert len(loads(pickle.dumps(value), "file")) == 2


_DEEP = b"I1\n" + b"2\x86" * 60  # a tuple of twice the tuple before: hash and text take 2⁶⁰ steps


@pytest.mark.parametrize(
    "attack",
    [
        b"}" + _DEEP + b"Ns.",
        b"(" + _DEEP + b"Nd.",
        b"cnumpy\ndtype\n(" + _DEEP + b"tR.",
        b"c_codecs\nencode\n(" + _DEEP + b"tR.",
        b"c_codecs\nencode\n(S'a'\n" + _DEEP + b"tR.",
        _DEEP + b")R.",
        b"cnumpy._core.numeric\n_frombuffer\n(B\x01\x00\x00\x00acnumpy\ndtype\n(S'u1'\ntR"
        + _DEEP + b"S'C'\ntR.",
    ],
    ids=range(7),
)  # fmt: skip
def test_deep_keys_are_not_hashed(attack):
    with pytest.raises(DataError, match="^file: (not a complete pickle|refused)"):
        loads(attack, "file")


@pytest.mark.parametrize("size", [0, 1, 100, 30000])
def test_truncated_pickle(size):
    content = pickle.dumps({"data": archives.pixels(0, 10)}, 2)
    with pytest.raises(DataError, match="not a complete pickle"):
        loads(content[:size], "file")


def broken(kind, change):
    """Return the files of an archive after `change` of one of them, and its name."""
    _, make, _ = ALL[kind]
    files = make()
    name = next(name for name in files if "data_batch_2" in name or "train" in name)
    change(files, name)
    return files, name.rsplit("/", 1)[1]


def cut(files, name):
    files[name] = files[name][:-100]


def cut_at_record(files, name):
    files[name] = files[name][: -2 * (3073 if "10-" in name else 3074)]


def remove(files, name):
    del files[name]


def other(files, name):
    files[name] = pickle.dumps([1, 2])


SHORT, EMPTY = np.zeros((10, 5), np.uint8), np.zeros((0, 3072), np.uint8)


def edit(**entries):
    def change(files, name):
        files[name] = pickle.dumps(pickle.loads(files[name]) | entries, 2)

    return change


def data_twice(files, name):
    files[name] = pickle.dumps(pickle.loads(files[name]) | {b"data": EMPTY}, 2)


def wrong_label(files, name):
    files[name] = b"\x63" + files[name][1:]


LABELS = "{name}: labels must be integers from 0 to 9"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("cifar10-python", cut, "{name}: not a complete pickle"),
        ("cifar10-python", remove, "{name} of CIFAR-10 is missing"),
        ("cifar10-python", other, "{name}: contains a list, not a dictionary"),
        ("cifar10-python", data_twice, "{name}: contains two entries of the same name"),
        ("cifar10-python", edit(labels=[10] * 10), LABELS),
        ("cifar10-python", edit(labels=["a"] * 10), LABELS),
        ("cifar10-python", edit(labels=None), "{name}: contains no list named 'labels'"),
        ("cifar10-python", edit(data=SHORT), r"{name}: data is uint8\[10, 5\]"),
        ("cifar10-python", edit(data=EMPTY), "{name}: contains no images"),
        ("cifar10-binary", cut, "{name}: 30630 bytes is not a multiple of the 3073-byte record"),
        ("cifar10-binary", cut_at_record, "48 train and 10 test images, not five to one"),
        ("cifar10-binary", wrong_label, LABELS),
        ("cifar100-python", edit(fine_labels=[100] * 100), "{name}: labels must .* from 0 to 99"),
    ],
)
def test_error_names_the_damaged_file(tmp_path, kind, change, message):
    files, name = broken(kind, change)
    path = archives.write_directory(tmp_path, files)
    with pytest.raises(DataError, match=message.format(name=name)) as raised:
        load_dataset(f"{ALL[kind][0]}:{path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", ["cut", "cut at its end", "bits", "text"])
def test_damaged_archive(tmp_path, damage):
    path = archives.write_tar(tmp_path / "a.tar.gz", archives.cifar10_python())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255 if damage == "bits" else 0
    size = {"cut": 0.3, "cut at its end": 0.999}.get(damage, 1) * len(content)
    path.write_bytes(b"hello" * 1000 if damage == "text" else content[: int(size)])
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        load_dataset(f"cifar10:{path}")


def test_links_and_huge_members_are_not_read(tmp_path):
    path = tmp_path / "link.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="data_batch_1 of CIFAR-10 is missing"):
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


def test_rejects_class_names_that_are_not_text(tmp_path):
    """The text of lists in lists that share themselves would never be done."""
    deep = []
    for _ in range(100):
        deep = [deep, deep]
    files = archives.cifar10_python()
    files["cifar-10-batches-py/batches.meta"] = pickle.dumps({"label_names": [deep] * 10}, 2)
    path = archives.write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match="must contain 10 class names"):
        load_dataset(f"cifar10:{path}")


def test_rejects_duplicate_members(tmp_path):
    files = archives.cifar10_python()
    files["other/data_batch_1"] = files["cifar-10-batches-py/data_batch_1"]
    path = archives.write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match="contains data_batch_1 twice"):
        load_dataset(f"cifar10:{path}")


def test_python_2_layout(tmp_path):
    """Python 2 wrote byte strings, which Python 3's pickle cannot: by hand, as in the archive."""
    header = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(" + b"".join(
        b"K" + bytes([i]) for i in range(10)
    )
    array = io.BytesIO()
    array.write(b"eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06")
    array.write(
        b"K\x00\x85U\x01b\x87Rq\x07(K\x01K\nM\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01"
    )
    array.write(b"\x87Rq\t(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
    raw = archives.pixels(0, 10).tobytes()
    array.write(b"T" + len(raw).to_bytes(4, "little") + raw + b"tbu.")
    content = loads(header + array.getvalue(), "file")
    assert content[b"labels"] == list(range(10))
    np.testing.assert_array_equal(content[b"data"], archives.pixels(0, 10))
