"""Reading and writing of weight files, and the safety of the reader."""

import copy
import io
import os
import pickle
import time
import tracemalloc
import zipfile

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save

from effjax import convert
from effjax.convert._unpickle import Unpickler
from tests.convert.cases import RECORDED
from tests.convert.pickles import (
    ONE,
    Built,
    Call,
    Deep,
    Global,
    Persistent,
    legacy,
    pickled,
    storage,
    tensor,
    zipped,
)
from tests.convert.test_checkpoint import file_of, info
from tests.tiers import vary

A = np.arange(24, dtype=np.float32).reshape(4, 6)
KINDS = {
    name: np.arange(4).astype(getattr(jnp, name))
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8",
                 "uint8")
}  # fmt: skip
WANTED = {
    "whole": A, "transposed": A.T, "part": A[1:3, 2:], "column": A[:, 1], "empty": A[:0],
    **KINDS, "bool": np.arange(4) > 0, "parameter": A[0], "scalar": np.array(7),
}  # fmt: skip
FORMATS = {"zip": zipped, "legacy": legacy}
SIX = np.arange(6, dtype=np.float32)


@pytest.fixture
def read(tmp_path):
    """Return a function that loads bytes as a weight file."""

    def read(data, name="weights.pth"):
        (tmp_path / name).write_bytes(data)
        return convert.load_weights(tmp_path / name)

    return read


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_checkpoints(name):
    loaded = convert.load_weights(RECORDED / f"{name}.pth")
    assert loaded.keys() == WANTED.keys()
    for key, want in WANTED.items():
        np.testing.assert_array_equal(loaded[key], want)
        assert (loaded[key].dtype, loaded[key].shape) == (want.dtype, want.shape), key
    assert np.shares_memory(loaded["whole"], loaded["part"])
    with pytest.raises(ValueError, match="read-only|WRITEABLE"):
        loaded["whole"][0] = 1


@vary("form", FORMATS.values())
def test_nested_checkpoints(read, form):
    of_python_2 = Call(Global("collections OrderedDict"), ([["a", ONE], ["w", ONE]],))
    for nested in (
        {"w": ONE}, {"epoch": 3, "model": {"w": ONE}}, {"module": {"w": ONE}, "a": None},
        of_python_2,
    ):  # fmt: skip
        np.testing.assert_array_equal(read(form(nested))["w"], SIX.reshape(2, 3))
    with pytest.raises(ValueError, match="must contain tensors only, not epoch"):
        read(form({"epoch": 3, "w": ONE}))
    for value in (ONE, {3: ONE}):
        with pytest.raises(ValueError, match="must contain named tensors"):
            read(form(value))


class CodeRanError(Exception):
    pass


def fails(*_):
    raise CodeRanError


FUNCTION = Global("torch._utils _rebuild_tensor_v2")
FORBIDDEN_NAMES = {
    "os.system": Call(Global("os system"), ("echo hello > here",)),
    "posix.system": Call(Global("posix system"), ("echo hello > here",)),
    "builtins.eval": Call(Global("builtins eval"), ("1",)),
    "builtins.getattr": Call(Global("builtins getattr"), (FUNCTION, "__globals__")),
    "tests.convert.test_files.fails": Call(Global("tests.convert.test_files fails"), ()),
    "torch.load": Global("torch load"),
    "torch._utils._rebuild_tensor.__globals__": Global("torch._utils _rebuild_tensor.__globals__"),
    "argparse.Namespace": Global("argparse Namespace"),
    "numpy.dtype": Call(Global("numpy dtype"), ("O",)),
    "an unsupported storage": Persistent(("storage", "os", "0", "cpu", 6)),
    "an unsupported tensor": tensor(None, (), ()),
}


@vary("form", FORMATS.values())
@pytest.mark.parametrize("name", FORBIDDEN_NAMES)
def test_forbidden_names_run_no_code(read, tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"weights.pth: refused, its pickle asks for {name}; it"):
        read(form({"a": ONE, "b": FORBIDDEN_NAMES[name]}))
    assert os.listdir() == ["weights.pth"]


INVALID_TENSORS = {
    "behind": tensor(storage(6), (2, 3), (3, 1), 1),
    "far": tensor(storage(6), (2, 3), (100, 1)),
    "negative": tensor(storage(6), (2, 3), (-3, 1), 5),
    "offset": tensor(storage(6), (2,), (1,), -1),
    "many axes": tensor(storage(6), (1,) * 65, (1,) * 65),
    "huge numbers": tensor(storage(6), (1,), (2**40000,)),
    "view of a view": tensor(tensor(storage(6), (6,), (0,)), (6,), (1,)),
    "ranks": tensor(storage(6), (2, 3), (1,)),
    "floats": tensor(storage(6), (2.0, 3), (3, 1)),
    "conjugate": tensor(storage(6), (2, 3), (3, 1), 0, ({"conj": True},)),
    "larger": tensor(storage(7), (2, 3), (3, 1)),
    "negative storage": tensor(storage(-6), (2, 3), (3, 1)),
    "wider": tensor(storage(6, "DoubleStorage"), (2, 3), (3, 1)),
    "absent": tensor(storage(6, key="1"), (2, 3), (3, 1)),
    "elsewhere": tensor(storage(6, key="../byteorder"), (2, 3), (3, 1)),
    "no storage": tensor("text", (2, 3), (3, 1)),
    "a storage of a kind": tensor(Persistent(("storage", "OddStorage", "0", "cpu", 6)), (2,), (1,)),
    "state": Built(ONE, ({},)),
    "state of a function": Built(FUNCTION, (None, {"__defaults__": (1,)})),
    "iterated": Call(Global("collections OrderedDict"), (ONE,)),
    "copied": Call(Global("collections OrderedDict"), ({"a": 1},)),
    "triples": Call(Global("collections OrderedDict"), ([["a", 1, 2]],)),
    "set": {1},
}


@vary("form", FORMATS.values())
@pytest.mark.parametrize("name", INVALID_TENSORS)
def test_rejects_invalid_tensors(read, name, form):
    with pytest.raises(ValueError, match="weights.pth: (not a complete file|refused)"):
        read(form({"a": INVALID_TENSORS[name]}))


@vary("form", FORMATS.values())
def test_rejects_expanded_tensors(read, form):
    for strides in ((0, 0), (1, 0)):
        with pytest.raises(ValueError, match=r"weights.pth: .*expanded.*contiguous\(\)"):
            read(form({"a": tensor(storage(6), (3, 2**40), strides)}))
    small = read(form({"a": tensor(storage(6), (2, 3), (0, 1))}))  # fits in its storage
    np.testing.assert_array_equal(small["a"], [SIX[:3], SIX[:3]])


DEEP = Deep()
DEEP_VALUES = {
    "shape": tensor(storage(6), DEEP, (1,)),
    "strides": tensor(storage(6), (6,), DEEP),
    "sizes": tensor(storage(6), (DEEP,), (DEEP,)),
    "offset": tensor(storage(6), (6,), (1,), DEEP),
    "storage": tensor(DEEP, (6,), (1,)),
    "metadata": tensor(storage(6), (6,), (1,), 0, (DEEP,)),
    "key": tensor(storage(6, key=DEEP), (6,), (1,)),
    "length": tensor(storage(DEEP), (6,), (1,)),
    "type": tensor(Persistent(("storage", DEEP, "0", "cpu", 6)), (6,), (1,)),
    "kind": tensor(Persistent((DEEP, Global("torch FloatStorage"), "0", "cpu", 6)), (6,), (1,)),
    "view": tensor(Persistent(("storage", *"xxx", 6, DEEP)), (6,), (1,)),
    "id": Persistent(DEEP),
    "name": {DEEP: ONE},
    "name in a checkpoint": {"epoch": {("a", DEEP): 1}},
    "item": Call(Global("collections OrderedDict"), ([[DEEP, 1]],)),
    "items": Call(Global("collections OrderedDict"), (DEEP,)),
    "called": Call(DEEP, (1,)),
    "arguments": Call(Global("collections OrderedDict"), DEEP),
    "state": Built(ONE, DEEP),
    "state of nothing": Built(DEEP, (1,)),
    "value": DEEP,
}


@vary("form", FORMATS.values())
@pytest.mark.parametrize("name", DEEP_VALUES)
def test_deep_values_are_not_hashed_or_printed(read, name, form):
    match = "weights.pth: (not a complete file|refused|contains|must contain)"
    with pytest.raises(ValueError, match=match) as error:
        read(form({"a": ONE, "b": DEEP_VALUES[name]}))
    assert len(str(error.value)) < 400


def test_repeated_items_of_an_ordered_dict_are_copied_once(read):
    items = b"](" + b"".join(b"](X\x04\x00\x00\x00%04dNe" % i for i in range(9999)) + b"eq\x010"
    again = b"ccollections\nOrderedDict\nq\x02" + b"h\x02h\x01\x85R0" * 9999 + b"}."
    start = time.process_time()
    with pytest.raises(ValueError, match="must contain named tensors"):
        read(zipped({}, **{"data.pkl": b"\x80\x02" + items + again}))
    assert time.process_time() - start < 2  # 10⁸ copied items would take 10


MERSENNE = 2**61 - 1  # hash(n) is n modulo this prime, for non-negative integers
NUMBERS = [*range(99), *(n * MERSENNE for n in range(1, 99)), 2.0**61, 2.0**122, None, False]


def test_hashes_of_dict_keys_and_memo_are_salted():
    # Keys of known hashes could be chosen so that a dict of n keys takes n² steps.
    data = b"(" + b"".join(pickle.dumps(n, 2)[2:-1] + b"N" for n in NUMBERS) + b"d."
    loaded = Unpickler(io.BytesIO(data), {}).load()
    puts = b"N" + b"".join(b"p%d\n" % n for n in NUMBERS[:-4])
    memo = Unpickler(io.BytesIO(puts + b"0g%d\n." % (98 * MERSENNE)), {})
    assert memo.load() is None
    for keys, numbers in ((loaded, NUMBERS[:-1]), (memo.memo, NUMBERS[:-4])):
        hashes = {hash(key) for key in keys}
        assert len(hashes) >= len(numbers) and hashes.isdisjoint(map(hash, numbers))


def test_large_files_are_not_read_beside_their_arrays(tmp_path):
    num = 1_000_000
    (tmp_path / "a.pth").write_bytes(
        zipped({"a": tensor(storage(num), (num,), (1,))}, {"0": np.ones(num, np.float32)})
    )
    tracemalloc.start()
    loaded = convert.load_weights(tmp_path / "a.pth")["a"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(loaded, np.ones(num))
    assert peak < 1.2 * loaded.nbytes


KEY_TWICE = pickled({"a": ONE, "b": ONE}).replace(b"\1\0\0\0b", b"\1\0\0\0a")
DAMAGED = {
    "big-endian": (zipped({"a": ONE}, byteorder=b"big"), "big-endian"),
    "big-endian legacy": (legacy({"a": ONE}, little_endian=False), "big-endian"),
    "wrong magic": (legacy({"a": ONE}, magic=3), "magic number is missing"),
    "missing key": (legacy({"a": ONE}, keys=()), "KeyError"),
    "extra key": (legacy({"a": ONE}, keys=("0", "1")), "KeyError"),
    "deep key": (legacy({"a": ONE}, keys=(DEEP,)), "not a string"),
    "wrong legacy length": (legacy({"a": ONE}, sizes=(2**60,)), "length is not 6"),
    "wrong length": (zipped({"a": ONE}, {"0": SIX[:5]}), "20 bytes for 6 × float32"),
    "two pickles": (zipped({"a": ONE}, **{"other/data.pkl": b""}), "2 pickles"),
    "key twice": (zipped({}, **{"data.pkl": KEY_TWICE}), "a dict with two keys 'a'"),
    "entry twice": (
        zipped({"a": ONE}, {"0": SIX, "1": SIX}).replace(b"data/1", b"data/0"),
        "two entries named 'archive/data/0'",
    ),
    "storage twice": (legacy({"a": ONE}, keys=("0", "0"), sizes=(6, 6)), "two storages named '0'"),
    "compressed": (zipped({"a": ONE}, compression=zipfile.ZIP_DEFLATED), "compressed, unlike"),
    "huge memo index": (b"\x80\x02Nr\xff\xff\xff\xff.", "magic number is missing"),
    "huge bytearray": (b"\x80\x05\x96" + b"\xff" * 5 + bytes(3) + b".", "EOFError"),
    "empty": (b"", "EOFError"),
    "truncated zip": (b"PK\x03\x04", "BadZipFile"),
    "html": (b"<html>", "Error"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_rejects_damaged_torch_files(read, name):
    data, reason = DAMAGED[name]
    with pytest.raises(ValueError, match=f"weights.pth: not a complete file.*{reason}"):
        read(data)


def test_rejects_more_bytes_than_the_file_has(tmp_path):
    """Compressed bytes, or many names for the bytes of one array, could fill the memory."""
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickled({"a": ONE}))
        archive.writestr("archive/data/0", bytes(2000))
        again = copy.copy(archive.getinfo("archive/data/0"))
        again.filename = "archive/data/1"
        archive.filelist.append(again)
    zeros = zipped({"a": ONE}, {"0": np.zeros(999)}, compression=zipfile.ZIP_DEFLATED)
    (tmp_path / "b.pth").write_bytes(zeros)
    for name in ("a.pth", "b.pth"):
        with pytest.raises(ValueError, match=r"\(compressed or overlapping entries\)"):
            convert.load_weights(tmp_path / name)


WHOLE = {f"{name}.pth": (RECORDED / f"{name}.pth").read_bytes() for name in FORMATS}
WHOLE["a.safetensors"] = save({"a": A, "n": np.int64([7])}, {"format": "pt"})


@pytest.mark.parametrize("name", WHOLE)
@hypothesis.given(data=st.data())
def test_damaged_files(tmp_path_factory, name, data):
    # A file that is cut or overwritten gives a ValueError, or arrays.
    whole = WHOLE[name]
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.one_of(st.none(), st.binary(min_size=1, max_size=4)))
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(whole[:at] if new is None else whole[:at] + new + whole[at + len(new) :])
    try:
        arrays = convert.load_weights(path)
    except ValueError:
        return
    assert new is not None or name == "legacy.pth"
    assert all(np.isfinite(a.nbytes) and a.copy() is not None for a in arrays.values())


@pytest.mark.parametrize("name", ["a.safetensors", "a.SafeTensors"])
def test_safetensors(tmp_path, name):
    arrays = {"t": A.T, **KINDS}
    convert.save_weights(tmp_path / name, arrays)
    loaded = convert.load_weights(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    for key, want in arrays.items():
        np.testing.assert_array_equal(loaded[key], want)
        assert loaded[key].dtype == want.dtype


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4", "C64"])
def test_rejects_other_dtypes(read, dtype):
    size = {"F4": 1, "C64": 16}.get(dtype, 2)
    header = {"__metadata__": {"dtype": "F8"}, "x.weight": info(dtype, offsets=(0, size))}
    with pytest.raises(ValueError, match=rf"a\.safetensors: x\.weight must have .* not {dtype}\. "):
        read(file_of(header, bytes(size)), "a.safetensors")


def test_memory_error_is_not_reported_as_damage(read, monkeypatch):
    def fail(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr(zipfile, "ZipFile", fail)
    with pytest.raises(MemoryError):
        read(WHOLE["zip.pth"], "zip.pth")


def test_errors(tmp_path):
    for name in ("a.safetensors", "a.pth"):
        with pytest.raises(FileNotFoundError, match=name):
            convert.load_weights(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        convert.save_weights(tmp_path / "no" / "a.safetensors", {"a": A})
    with pytest.raises(ValueError, match="a.h5: `path` must end in .safetensors or .pth"):
        convert.load_weights("a.h5")
    with pytest.raises(ValueError, match=r"a.pth: `path` must end in .safetensors\."):
        convert.save_weights("a.pth", {})
    with pytest.raises(TypeError, match=r"`weights\['a'\]` must be of real numbers"):
        convert.save_weights("a.safetensors", {"a": 1j * A})
