"""Files: what PyTorch wrote is read to the bit, and nothing else is."""

import os
import zipfile

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import convert
from tests.convert.cases import RECORDED
from tests.convert.pickles import (
    ONE,
    Built,
    Call,
    Global,
    Persistent,
    legacy,
    storage,
    tensor,
    zipped,
)

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
    """Reads bytes as a file of PyTorch's."""

    def read(data, name="weights.pth"):
        (tmp_path / name).write_bytes(data)
        return convert.read(tmp_path / name)

    return read


@pytest.mark.parametrize("name", FORMATS)
def test_what_torch_wrote(name):
    found = convert.read(RECORDED / f"{name}.pth")
    assert found.keys() == WANTED.keys()
    for key, want in WANTED.items():
        np.testing.assert_array_equal(found[key], want)
        assert (found[key].dtype, found[key].shape) == (want.dtype, want.shape), key
    assert np.shares_memory(found["whole"], found["part"])
    with pytest.raises(ValueError, match="read-only|WRITEABLE"):
        found["whole"][0] = 1


@pytest.mark.parametrize("form", FORMATS.values())
def test_checkpoints(read, form):
    for nested in (
        {"w": ONE},
        {"epoch": 3, "model": {"w": ONE}},
        {"module": {"w": ONE}, "a": None},
    ):
        np.testing.assert_array_equal(read(form(nested))["w"], SIX.reshape(2, 3))
    for value, match in (
        ({"epoch": 3, "w": ONE}, "holds what is no tensor: epoch; save model.state_dict"),
        ({"model": {}, "w": ONE}, "no named tensors"),
        ((3, ONE), "no named tensors"),
        (ONE, "no named tensors"),
        ({3: ONE}, "strings for names"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            read(form(value))


class Ran(Exception):
    pass


def fails(*_):
    raise Ran


FUNCTION = Global("torch._utils _rebuild_tensor_v2")
MALICIOUS = {
    "os.system": Call(Global("os system"), ("echo hello > here",)),
    "posix.system": Call(Global("posix system"), ("echo hello > here",)),
    "builtins.eval": Call(Global("builtins eval"), ("1",)),
    "builtins.getattr": Call(Global("builtins getattr"), (FUNCTION, "__globals__")),
    "tests.convert.test_files.fails": Call(Global("tests.convert.test_files fails"), ()),
    "torch.load": Global("torch load"),
    "torch._utils._rebuild_tensor_v2.__globals__": Global(
        "torch._utils _rebuild_tensor_v2.__globals__"
    ),
    "argparse.Namespace": Global("argparse Namespace"),
    "numpy.dtype": Call(Global("numpy dtype"), ("O",)),
    "a storage of another kind": Persistent(("storage", "os", "0", "cpu", 6)),
    "a tensor of another kind": tensor(None, (), ()),
}


@pytest.mark.parametrize("form", FORMATS.values())
@pytest.mark.parametrize("name", MALICIOUS)
def test_nothing_runs(read, tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"weights.pth: refused, its pickle asks for {name}; it"):
        read(form({"a": ONE, "b": MALICIOUS[name]}))
    assert os.listdir() == ["weights.pth"]


SHAPED = {
    "behind": tensor(storage(6), (2, 3), (3, 1), 1),
    "far": tensor(storage(6), (2, 3), (100, 1)),
    "negative": tensor(storage(6), (2, 3), (-3, 1), 5),
    "offset": tensor(storage(6), (2,), (1,), -1),
    "expanded": tensor(storage(6), (2**40, 2**20), (0, 0)),
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
}


@pytest.mark.parametrize("form", FORMATS.values())
@pytest.mark.parametrize("name", SHAPED)
def test_tensors_that_cannot_be(read, name, form):
    with pytest.raises(ValueError, match="weights.pth: (not a whole file|refused)"):
        read(form({"a": SHAPED[name]}))
    np.testing.assert_array_equal(read(form({"a": ONE}))["a"], SIX.reshape(2, 3))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zipped({"a": ONE}, byteorder=b"big"), "big-endian"),
        (legacy({"a": ONE}, little_endian=False), "big-endian"),
        (legacy({"a": ONE}, magic=3), "no file of torch.save"),
        (legacy({"a": ONE}, keys=()), "KeyError"),
        (legacy({"a": ONE}, keys=("0", "1")), "KeyError"),
        (legacy({"a": ONE}, sizes=(2**60,)), "not 6 long"),
        (zipped({"a": ONE}, {"0": SIX[:5]}), "20 bytes for 6 × float32"),
        (zipped({"a": ONE}, **{"other/data.pkl": b""}), "2 pickles"),
        (b"\x80\x02r\xff\xff\xff\xff.", "memo"),
        (b"", "KeyError"),
        (b"PK\x03\x04", "BadZipFile"),
        (b"<html>", "Error"),
    ],
    ids=range(12),
)
def test_files_that_cannot_be(read, data, said):
    with pytest.raises(ValueError, match=f"weights.pth: not a whole file.*{said}"):
        read(data)


def test_a_compressed_archive(read, tmp_path):
    """A few bytes could ask for all memory."""
    with zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        with zipfile.ZipFile(RECORDED / "zip.pth") as source:
            for name in source.namelist():
                archive.writestr(name, source.read(name))
    with pytest.raises(ValueError, match="compressed"):
        convert.read(tmp_path / "small.pth")


@pytest.mark.parametrize("name", FORMATS)
@hypothesis.given(data=st.data())
def test_damaged_files(tmp_path_factory, name, data):
    """Cut or overwritten: an error, or arrays."""
    whole = (RECORDED / f"{name}.pth").read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.one_of(st.none(), st.binary(min_size=1, max_size=4)))
    path = tmp_path_factory.mktemp("damaged") / "weights.pth"
    path.write_bytes(whole[:at] if new is None else whole[:at] + new + whole[at + len(new) :])
    try:
        found = convert.read(path)
    except (ValueError, TypeError):
        return
    assert new is not None or name == "legacy"
    assert all(np.isfinite(a.nbytes) and a.copy() is not None for a in found.values())


def test_npz(tmp_path):
    path, arrays = tmp_path / "a.npz", {"a.b": A.T, "n": np.array(3)}
    convert.write(path, arrays)
    found = convert.read(path)
    assert found.keys() == arrays.keys() and os.listdir(tmp_path) == ["a.npz"]
    np.testing.assert_array_equal(found["a.b"], A.T)
    with pytest.raises(ValueError, match=r"cannot hold bfloat16 \(b\)"):
        convert.write(path, {"a": A, "b": A.astype(jnp.bfloat16)})
    np.testing.assert_array_equal(convert.read(path)["a.b"], A.T)  # the old one
    np.savez(path, a=np.array([{}]))
    for damage in (path.read_bytes(), path.read_bytes()[:50], b"", b"text", b"\x80\x02N."):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="a.npz: not a whole .npz file of numbers"):
            convert.read(path)


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    path, arrays = tmp_path / "a.safetensors", {"t": A.T, **KINDS}
    convert.write(path, arrays)
    found = convert.read(path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    for name, want in arrays.items():
        np.testing.assert_array_equal(found[name], want)
        assert found[name].dtype == want.dtype
    whole = path.read_bytes()
    for damage in (whole[:-1], whole[:20], b"", b"\xff" * 100):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="a.safetensors: not a whole .safetensors file"):
            convert.read(path)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.pth"])
def test_no_such_file(tmp_path, name):
    if "safe" in name:
        pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match=name):
        convert.read(tmp_path / name)
    if name != "a.pth":
        with pytest.raises(FileNotFoundError):
            convert.write(tmp_path / "no" / name, {"a": A})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: convert.read(3), "`path` must be a path, not a int"),
        (lambda: convert.read("a.h5"), "a.h5: `path` must end in .safetensors, .npz or .pth"),
        (lambda: convert.write(None, {}), "`path` must be a path"),
        (lambda: convert.write("a.pth", {}), "must end in .safetensors or .npz"),
        (lambda: convert.write("a.npz", []), "`weights` must map names"),
        (lambda: convert.write("a.npz", {"a": "b"}), r"`weights\['a'\]` must be an array"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
