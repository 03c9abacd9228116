"""Checkpoints in Hugging Face's layout: values to the bit, shards, places, and malformed files."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from effjax import _slices, convert, memory
from effjax.convert import checkpoint, safetensors_file

ROOT = pathlib.Path(__file__).parent.parent.parent
LAYERS = {
    "self_attn.q_proj.weight": ((3, 16, 24), "bfloat16"),
    "self_attn.q_proj.bias": ((3, 16), "float32"),
    "mlp.up_proj.weight": ((3, 7, 5), "float16"),
    "mlp.experts.down_proj.weight": ((3, 8, 5, 3), "bfloat16"),
    "quantized": ((3, 8, 8), "int8"),
    "eight": ((3, 8, 3), "float8_e4m3fn"),
    "scale": ((3,), "float32"),
    "empty": ((3, 0, 4), "bfloat16"),
    "mask": ((3, 5), "bool"),
}
OTHERS = {
    "model.embed_tokens.weight": ((33, 24), "bfloat16"),
    "model.norm.weight": ((24,), "float32"),
    "scalar": ((), "float32"),
    "nothing": ((0,), "int32"),
    "ids": ((9, 2), "uint8"),
}


def random_bits(shape, dtype, seed=0):
    """Return an array of random bits, with 1 in place of NaN and infinity."""
    dtype = jnp.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    array = bits.view(dtype).reshape(shape)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(array), array, np.ones((), dtype))


def arrays_of(table):
    return {name: random_bits(*row, seed=i) for i, (name, row) in enumerate(table.items())}


def shapes_of(arrays, sharding=None):
    """Return the shapes of arrays; `sharding` is one, or a function from a shape to one."""
    place = sharding if callable(sharding) else lambda shape: sharding
    return {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(a.shape))
        for name, a in arrays.items()
    }


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, a in want.items():
        assert (got[name].shape, got[name].dtype) == (a.shape, a.dtype), name
        assert np.asarray(got[name]).tobytes() == np.asarray(a).tobytes(), name


def tensors_of(layers):
    """Return the tensors of three layers by their names in a checkpoint."""
    tensors = {}
    for leaf, a in layers.items():
        for i in range(3):
            parts = (
                {f"{e}.": a[i, e] for e in range(a.shape[1])} if "experts" in leaf else {"": a[i]}
            )
            for expert, part in parts.items():
                name = leaf.replace("experts.", f"experts.{expert}")
                tensors[f"model.layers.{i}.{name}"] = part
    return tensors


def on_one_device(kind):
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint in several shards, and its arrays."""
    layers, others = arrays_of(LAYERS), arrays_of(OTHERS)
    convert.save_checkpoint(tmp_path / "model", layers, others, {"a": 1}, max_shard_bytes=900)
    return tmp_path / "model", layers, others


@pytest.fixture(params=[1 << 20, 50], ids=["at once", "by rows"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", request.param)


def check_round_trip(saved, sharding):
    """Load each array with `sharding(shape)`, save all again, and compare the arrays and files."""
    folder, *arrays = saved
    shapes = [shapes_of(group, sharding) for group in arrays]
    total = sum(a.nbytes for group in arrays for a in group.values())
    progress = []

    def report(*done):
        progress.append(done)

    loaded = convert.load_checkpoint(folder, *shapes, progress=report)
    # What is on several devices is read one time.
    assert progress[-1] == (total, total) and sorted(progress) == progress
    for got, want in zip(loaded, arrays, strict=True):
        assert_same_bits(got, want)
        for a in got.values():
            assert a.sharding == sharding(a.shape)
            # That of the type, which `offload_scan` reads.
            is_host = a.sharding.memory_kind == "pinned_host"
            space = jax.memory.Space.Host if is_host else jax.memory.Space.Device
            assert jax.typeof(a).memory_space == space
    progress.clear()
    again = folder.with_name("again")
    convert.save_checkpoint(again, *loaded, {"a": 1}, max_shard_bytes=900, progress=report)
    assert progress[-1] == (total, total) and sorted(progress) == progress
    assert sorted(os.listdir(folder.parent)) == ["again", "model"]
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file


@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_round_trip(saved, chunk_bytes, axis_type, kind):
    """On one device without `axis_type`, or sharded over those of a mesh."""

    def sharding(shape):
        if axis_type is None:
            return on_one_device(kind)
        mesh = jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2, devices=jax.devices()[:8])
        # The last axis that the number of devices divides.
        divisible = [i for i, size in enumerate(shape) if size and size % 4 == 0]
        spec = P(*[None] * divisible[-1], "data") if divisible else P()
        return NamedSharding(mesh, spec, memory_kind=kind)

    check_round_trip(saved, sharding)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_writes_by_programs(tmp_path, chunk_bytes, monkeypatch, kind):
    # As on a GPU. XLA for CPUs changes NaNs of bfloat16, so these are left out.
    monkeypatch.setattr(_slices, "_is_cpu", lambda place: False)
    layers = {"w": random_bits((3, 9, 5), "int32"), "x": random_bits((3, 8, 8), "uint8")}
    others = {"y": random_bits((40, 3), "int32"), "z": np.float32(3)}
    convert.save_checkpoint(tmp_path / "model", layers, others, {"a": 1}, max_shard_bytes=900)
    check_round_trip((tmp_path / "model", layers, others), lambda shape: on_one_device(kind))


def test_layout(saved):
    from safetensors import safe_open

    folder, layers, others = saved
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {p.name for p in folder.glob("*.safetensors")} and len(files) > 2
    assert "model-00001-of-00007.safetensors" in files
    want = tensors_of(layers) | others
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in want.values())}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "numpy") as shard:
            assert shard.metadata() == {"format": "pt"}
            if "float8" not in str(want[name].dtype):
                assert_same_bits({name: shard.get_tensor(name)}, {name: np.asarray(want[name])})
        tensor = safetensors_file.read_header(folder / file)[name]
        assert tensor.start % want[name].dtype.itemsize == 0
        sizes = sum(want[n].nbytes for n, f in index["weight_map"].items() if f == file)
        assert sizes <= 900 or list(index["weight_map"].values()).count(file) == 1


def test_reads_what_the_safetensors_package_writes(tmp_path):
    from safetensors.numpy import save_file

    names = ["self_attn.q_proj.weight", "quantized", "scale"]
    layers = {name: a for name, a in arrays_of(LAYERS).items() if name in names}
    save_file(
        {f"gpt.h.{i}.{leaf}": np.asarray(a[i]) for leaf, a in layers.items() for i in range(3)}
        | {"gpt.h.0.self_attn.rotary_emb.inv_freq": np.ones(3), "lm_head.weight": np.ones(2)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded, none = convert.load_checkpoint(
        tmp_path, shapes_of(layers), {}, layers_prefix="gpt.h",
        ignore=("rotary_emb.inv_freq", "lm_head.weight"),
    )  # fmt: skip
    assert_same_bits(loaded, layers)
    assert none == {}


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("run", [1, 4096])
def test_parts_of_files(tmp_path, monkeypatch, mesh4x2, axes, run):
    """Parts are runs of bytes in the file, or slabs of which a part is kept."""
    monkeypatch.setattr(safetensors_file, "MIN_RUN_BYTES", run)
    monkeypatch.setattr(safetensors_file, "MAX_SLAB_BYTES", 500)
    arrays = {"w": random_bits((8, 16, 24), "bfloat16")}
    convert.save_checkpoint(tmp_path / "a", arrays, {"whole": arrays["w"]}, {})
    names = dict(zip(axes, ("data", "model"), strict=False))
    shapes = shapes_of(arrays, NamedSharding(mesh4x2, P(*map(names.get, range(3)))))
    layers, others = convert.load_checkpoint(tmp_path / "a", shapes, {"whole": shapes["w"]})
    assert_same_bits(layers | others, arrays | {"whole": arrays["w"]})


def test_new_arrays_have_memory_of_their_own(tmp_path, monkeypatch):
    # They are donated to a training step, which overwrites them in place.
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 50)
    arrays = {"w": np.ones((3, 50), np.float32), "x": np.full((3, 50), 5, np.float32)}
    convert.save_checkpoint(tmp_path / "a", arrays, {}, {})
    place = NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), P())
    loaded, _ = convert.load_checkpoint(tmp_path / "a", shapes_of(arrays, place), {})
    assert_same_bits(loaded, arrays)
    a = loaded["w"]
    pointers = [shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards]
    assert len(set(pointers)) == 2
    b = jax.jit(lambda a: a.at[0].set(2.0), donate_argnums=0)(a)
    for shard, pointer in zip(b.addressable_shards, pointers, strict=True):
        assert shard.data.unsafe_buffer_pointer() == pointer
        np.testing.assert_array_equal(np.asarray(shard.data)[:, 0], [2, 1, 1])
    assert_same_bits({"x": loaded["x"]}, {"x": arrays["x"]})


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64"])
def test_converts_floating_point(tmp_path, kind, chunk_bytes):
    values = np.linspace(-3, 3, 120).reshape(3, 8, 5)
    arrays = {k: values.astype(k) for k in (jnp.bfloat16, np.float16, np.float32, np.float64)}
    arrays = {np.dtype(k).name: a for k, a in arrays.items()}
    convert.save_checkpoint(tmp_path / "a", arrays, {}, {})
    shapes = {name: jax.ShapeDtypeStruct(a.shape, kind) for name, a in arrays.items()}
    loaded, _ = convert.load_checkpoint(tmp_path / "a", shapes, {})
    given = jnp.dtype("float32" if kind == "float64" else kind)  # without x64
    assert_same_bits(loaded, {name: a.astype(given) for name, a in arrays.items()})


def test_float64(tmp_path, x64):
    arrays = {"w": random_bits((3, 4), "float64"), "n": random_bits((3, 4), "int64")}
    convert.save_checkpoint(tmp_path / "a", arrays, {}, {})
    assert_same_bits(convert.load_checkpoint(tmp_path / "a", shapes_of(arrays), {})[0], arrays)


def test_rejects_values_that_become_infinite(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    others = {"a": np.float32([1e30, np.inf]), "b": np.float32([-np.inf])}
    for folder, arrays in (("a", others), ("b", {"b": others["b"]})):
        (tmp_path / folder).mkdir()
        safetensors.save_file(arrays, tmp_path / folder / "model.safetensors")
    wanted = {name: jax.ShapeDtypeStruct(a.shape, "float16") for name, a in others.items()}
    with pytest.raises(ValueError, match="^a in .* too large for float16"):
        convert.load_checkpoint(tmp_path / "a", {}, wanted)
    _, loaded = convert.load_checkpoint(tmp_path / "b", {}, {"b": wanted["b"]})
    assert np.isneginf(loaded["b"]).all()


def test_lists_all_differences(saved):
    folder, layers, others = saved
    layers, others = shapes_of(layers), shapes_of(others)
    layers["mlp.down_proj.weight"] = layers.pop("mlp.up_proj.weight")
    layers["self_attn.q_proj.weight"] = jax.ShapeDtypeStruct((4, 16, 24), "bfloat16")
    layers["scale"] = jax.ShapeDtypeStruct((2,), "float32")
    layers["quantized"] = jax.ShapeDtypeStruct((3, 8, 8), "bfloat16")
    others["ids"] = jax.ShapeDtypeStruct((2, 9), "int8")
    with pytest.raises(ValueError) as error:
        convert.load_checkpoint(folder, layers, others)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{folder} does not have the expected tensors:"
    assert sorted(lines[1:]) == [
        "- left over: model.layers.{0-2}.mlp.up_proj.weight, model.layers.2.scale",
        "- missing: model.layers.3.self_attn.q_proj.weight, "
        "model.layers.{0-2}.mlp.down_proj.weight",
        "- of another dtype: model.layers.{0-2}.quantized (I8, not bfloat16), ids (U8, not int8)",
        "- of another shape: ids ((9, 2), not (2, 9))",
    ]


def test_names_damaged_shards(saved):
    folder, layers, _ = saved
    folder = folder.rename(folder.parent / ("x" * 200))
    first, second, third = (folder / f"model-0000{i}-of-00007.safetensors" for i in (1, 2, 3))
    size = first.stat().st_size
    os.truncate(first, size - 1)
    second.unlink()
    third.write_bytes(third.read_bytes() + b"0")
    with pytest.raises(ValueError) as error:
        convert.load_checkpoint(folder, shapes_of(layers) | {"x": shapes_of(layers)["scale"]}, {})
    message = str(error.value)
    assert f"{first}: not a complete .safetensors file (truncated: {size - 1} of {size}" in message
    assert f"no file: {second.name}\n" in message
    assert f"{third}: not a complete .safetensors file (1 bytes after the last tensor)" in message
    # What is in them is not reported as missing.
    assert "missing: model.layers.{0-2}.x" in message and message.count("missing") == 1


def test_names_a_shard_that_is_truncated_while_it_is_read(saved):
    folder, layers, others = saved

    def truncate(done, total):
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, 300)

    with pytest.raises(ValueError, match=r"model-0000.-of-00007.safetensors: truncated while it"):
        convert.load_checkpoint(folder, shapes_of(layers), shapes_of(others), progress=truncate)


def info(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# The content of a file, or its header before 8 bytes, and words of the message.
DAMAGED = [
    (b"", "0 bytes are no header"),
    (b"\xff" * 30, "a header of 18446744073709551615 bytes"),
    ((99).to_bytes(8, "little") + b"{}", "10 bytes, with a header of 99"),
    (file_of(b"{"), "Expecting"),
    (file_of(b"\xff\xfe\x00"), "codec"),
    (file_of(b"[" * 100_000), "recursion"),
    (file_of(b'{"a": ' + b"1" * 5000 + b"}"), "digits"),
    ([1], "the header is not an object"),
    ({"a": 3}, "'a' is not described by an object"),
    (file_of(b'{"a": {}, "a": {}}'), "two entries named 'a'"),
    ({"a": info(None)}, "'a' has no dtype"),
    ({"a": info("F31")}, "'a' has dtype F31"),
    *(
        ({"a": info(shape=shape)}, "no valid shape")
        for shape in ((-2,), ("2",), (True, 2), (2**63,), (1,) * 65)
    ),
    ({"a": info(offsets=(0, 4, 8))}, "no valid offsets"),
    ({"a": info(offsets=(-8, 0))}, "no valid offsets"),
    ({"a": info(offsets=(8, 0))}, "'a' has -8 bytes"),
    ({"a": info(offsets=(0, 4))}, "'a' has 4 bytes, which are not its"),
    ({"a": info(), "b": info("U8", (4,), (4, 8))}, "'b' overlaps another"),
    ({"a": info("U8", (4,), (4, 8))}, "4 unused bytes before 'a'"),
    (file_of({"a": info()}, bytes(7)), "truncated: 76 of 77 bytes"),
    ({"a": info("U8", (2**40,), (0, 2**40))}, "truncated: 100 of 1099511627868 bytes"),
    (file_of({"a": info()}, bytes(9)), "1 bytes after the last tensor"),
]


def assert_refused(path, match):
    """Check the error of both functions that read .safetensors files."""
    with pytest.raises(ValueError, match=match):
        convert.load_checkpoint(path.parent, {}, {"a": jax.ShapeDtypeStruct((2,), "float32")})
    with pytest.raises(ValueError, match=match):
        convert.load_weights(path)


@pytest.mark.parametrize(("content", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_rejects_damaged_files(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content if isinstance(content, bytes) else file_of(content))
    assert_refused(path, rf"model\.safetensors: not a complete .*{words}")


FILES_ELSEWHERE = (
    "../a.safetensors", "/etc/a.safetensors", "b/c.safetensors", "b\\c.safetensors",
    "b\0.safetensors", "model.bin", 3,
)  # fmt: skip
INDICES = [json.dumps({"weight_map": {"a": name}}).encode() for name in FILES_ELSEWHERE]


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": []}', *INDICES])
def test_rejects_bad_indices(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(index)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.safetensors").write_bytes(file_of({"a": info()}))
    assert_refused(path, r"index\.json: not an index of")


def test_rejects_a_tensor_in_two_shards(tmp_path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors").write_bytes(file_of({"a": info()}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(ValueError, match="- in two files: a\n- left over: a$"):
        convert.load_checkpoint(tmp_path, {}, {})
    with pytest.raises(ValueError, match=r"index\.json: .* two entries named 'a'"):
        convert.load_weights(index)


def test_rejects_folders_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pytorch_model.bin is not supported"):
        convert.load_checkpoint(tmp_path, {}, {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must contain model.safetensors"):
        convert.load_checkpoint(tmp_path / "empty", {}, {})
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: .*not a regular file"):
        convert.load_checkpoint(tmp_path, {}, {})
    with pytest.raises(ValueError, match="model.safetensors must be a regular file"):
        copied = {"other": tmp_path / "model.safetensors"}
        convert.save_checkpoint(tmp_path / "new", {}, {"a": np.ones(1)}, {}, copied_files=copied)


def test_rejects_unsupported_dtypes_of_files(tmp_path, x64):
    (tmp_path / "model.safetensors").write_bytes(file_of({"a": info("F4", (16,))}))
    for dtype in ("float32", "float64"):  # NumPy would take None for float64
        with pytest.raises(ValueError, match=rf"a \(F4, not {dtype}\)"):
            convert.load_checkpoint(tmp_path, {}, {"a": jax.ShapeDtypeStruct((16,), dtype)})


def test_load_weights_of_shards(tmp_path):
    layers, others = arrays_of(LAYERS), arrays_of(OTHERS)
    del layers["eight"]  # not a dtype of NumPy or of PyTorch's tensors
    convert.save_checkpoint(tmp_path / "a", layers, others, {}, max_shard_bytes=500)
    want = tensors_of(layers)
    assert_same_bits(
        convert.load_weights(tmp_path / "a" / "model.safetensors.index.json"),
        {name: np.asarray(a) for name, a in (want | others).items()},
    )


def test_missing_experts_are_one_entry(saved):
    folder, layers, others = saved
    shapes, name = shapes_of(layers), "mlp.experts.down_proj.weight"
    shapes[name] = jax.ShapeDtypeStruct((3, 10, 5, 3), "bfloat16")
    with pytest.raises(ValueError, match=r"missing: model.layers.{0-2}.mlp.experts.\*.down_proj"):
        convert.load_checkpoint(folder, shapes, shapes_of(others))


def fail(*_):
    raise OSError("the disk is full")


def test_saves_atomically(tmp_path):
    layers = {"w": np.ones((3, 2), np.float32)}
    (tmp_path / ".a.partial").mkdir()  # of a process that was killed
    (tmp_path / ".a.partial" / "old").write_text("")
    with pytest.raises(OSError, match="disk is full"):
        convert.save_checkpoint(tmp_path / "a", layers, {}, {}, progress=fail)
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").mkdir()
    convert.save_checkpoint(tmp_path / "a", layers, {}, {})
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "model.safetensors"]
    with pytest.raises(FileExistsError, match="a exists and is not empty"):
        convert.save_checkpoint(tmp_path / "a", layers, {}, {})
    assert os.listdir(tmp_path) == ["a"]


def test_a_billion_layers_are_refused_before_they_are_listed(tmp_path):
    convert.save_checkpoint(tmp_path / "a", {"w": np.ones((2, 3), np.float32)}, {}, {})
    layers = {"w": jax.ShapeDtypeStruct((10**9, 3), jnp.float32)}
    for function in (convert.load_checkpoint, checkpoint.check_checkpoint):
        with pytest.raises(ValueError, match=r"has 2 tensors, and the model 1000000000"):
            function(tmp_path / "a", layers, {})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_numbers_that_are_not_finite(tmp_path, value):
    layers = {"w": np.array([[1, 2], [3, value]], jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.w has numbers that are not finite"):
        convert.save_checkpoint(tmp_path / "a", layers, {}, {})
    assert not os.listdir(tmp_path)


def test_replaces_links_and_not_what_they_name(tmp_path):
    """A folder moved to another disk, and a link at the name that a killed process leaves."""
    (other := tmp_path / "other").mkdir()
    (other / "file").write_text("mine")
    for name in ("a", ".a.partial", ".a.replaced"):
        (tmp_path / name).symlink_to(other)
    for value in 1, 2:
        arrays = {"w": np.full((2, 3), value, np.float32)}
        convert.save_checkpoint(tmp_path / "a", arrays, {}, {}, overwrite=True)
        loaded, _ = convert.load_checkpoint(tmp_path / "a", shapes_of(arrays), {})
        assert_same_bits(loaded, arrays)
    assert sorted(os.listdir(tmp_path)) == ["a", "other"] and os.listdir(other) == ["file"]


def test_replaces_a_checkpoint_at_once(tmp_path):
    def save(value, progress=None):
        layers = {"w": np.full((3, 2), value, np.float32)}
        tokenizer = tmp_path / "tokenizer.json"
        tokenizer.write_text(str(value))
        convert.save_checkpoint(
            tmp_path / "a", layers, {}, {}, copied_files=[tokenizer], overwrite=True,
            progress=progress,
        )  # fmt: skip

    def load():
        shapes = {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
        layers, _ = convert.load_checkpoint(tmp_path / "a", shapes, {})
        assert (tmp_path / "a" / "tokenizer.json").read_text() == f"{layers['w'][0, 0]:.0f}"
        return float(layers["w"][0, 0])

    save(1)
    with pytest.raises(OSError, match="disk is full"):
        save(2, fail)
    assert load() == 1
    save(2)
    assert load() == 2 and sorted(os.listdir(tmp_path)) == ["a", "tokenizer.json"]
    # A process that is killed between the two renames leaves these folders.
    (tmp_path / "a").rename(tmp_path / ".a.partial")
    (tmp_path / ".a.replaced").mkdir()
    assert load() == 2
    save(3)
    assert load() == 3 and sorted(os.listdir(tmp_path)) == ["a", "tokenizer.json"]


@pytest.mark.parametrize(
    ("error", "match", "others"),
    [
        (TypeError, "^a: .safetensors cannot hold complex64", {"a": np.complex64(1)}),
        (TypeError, "^a: .safetensors cannot hold int4", {"a": jnp.int4(1)}),
        (ValueError, "__metadata__ cannot be the name", {"__metadata__": np.ones(2)}),
    ],
)
def test_rejects_arrays_that_cannot_be_saved(tmp_path, error, match, others):
    with pytest.raises(error, match=match):
        convert.save_checkpoint(tmp_path / "a", {}, others, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compiler", "target"), [("gpu_compiler", "h100"), ("tpu_compiler", "v5e")]
)
def test_device_holds_one_part(request, compiler, target):
    # On accelerators, the parts of host arrays pass through the device.
    request.getfixturevalue(compiler)
    place, shape, rows = on_one_device("pinned_host"), (6000, 1024), 512
    whole = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=place)
    part = jax.ShapeDtypeStruct((rows, *shape[1:]), "bfloat16")
    first, part_bytes = jax.ShapeDtypeStruct((), "int32"), part.size * 2

    def read(a, first):
        return _slices._reader(jax.devices()[0])(a, first, rows)

    for fun, args in (
        (_slices._write(place), (whole, part, first)),
        (jax.jit(read), (whole, first)),
    ):
        plan = memory.plan(fun, *args, target=target)
        assert part_bytes <= plan.peak_device_bytes < 1.2 * part_bytes + 2**20
        assert plan.peak_host_bytes < 1.01 * whole.size * 2


MEMORY = """
import re, sys
import jax, numpy as np
from effjax import convert, memory
def peak():  # in KiB; ru_maxrss would include the process that started this one
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+)", file.read())[1])
shape, spare, memory = (8, 2048, 2048), (8192, 2048), sys.argv[2]
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
host = one.with_memory_kind("pinned_host")
layers = {f"w{i}": jax.ShapeDtypeStruct(shape, "bfloat16", sharding=host) for i in range(2)}
others = {"e": jax.ShapeDtypeStruct(spare, "bfloat16", sharding=one)}
jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(3))())
if memory == "save":
    layers = {name: np.ones(a.shape, a.dtype) for name, a in layers.items()}
    others = {name: np.ones(a.shape, a.dtype) for name, a in others.items()}
before = peak()
if memory == "save":
    convert.save_checkpoint(sys.argv[1], layers, others, {}, max_shard_bytes=10**8)
elif memory == "load":
    kept = convert.load_checkpoint(sys.argv[1], layers, others)
else:
    kept = convert.load_weights(sys.argv[1] + "/model.safetensors.index.json")
print((peak() - before) * 1024)
"""


@pytest.mark.exhaustive
def test_memory(tmp_path):
    """Check that loading takes the memory of the arrays, and saving next to none."""
    num_bytes = 2 * (2 * 8 * 2048 * 2048 + 8192 * 2048)  # 168 MB
    added = {}
    for action in ("save", "load", "load_weights"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path / "model"), action],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        added[action] = int(done.stdout) / num_bytes
    assert added["save"] < 0.05 and 0.95 < added["load"] < 1.1, added
    assert 0.95 < added["load_weights"] < 1.1, added
