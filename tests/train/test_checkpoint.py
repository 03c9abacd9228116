"""Checkpoints without a training loop: content, placement, retention and damage."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import _slices, to_device, to_host
from effjax.train import array_handler, make_handler_registry
from effjax.train.checkpoint import MANIFEST, WRITTEN_AFTER_MANIFEST, Checkpoints
from effjax.train.errors import TrainError
from effjax.train.run_directory import digest_json
from tests.tiers import vary
from tests.train import resident_memory
from tests.train.small import assert_same_bits

SHAPE = 512, 256
ROOT = Path(__file__).parent.parent.parent


def state(step):
    return {"a": np.full(3000, step, np.float32), "step": np.int32(step)}


def save(path, scores, keep=9):
    """Save a state at each step; a step whose score is None is between two evaluations."""
    with Checkpoints(path, keep=keep) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, state(step), score=None if score is None else (score,))
    return path


def assert_intact(checkpoints, step):
    assert checkpoints.find_damage(step) is None
    restored = checkpoints.restore(state(step), step)
    jax.tree.map(np.testing.assert_array_equal, restored, state(step))


def test_a_clock_that_jumps(tmp_path, monkeypatch):
    """By decades at each call, while a checkpoint is written and completed."""
    jumps, now = itertools.cycle([1e9, -1e9]), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    save(tmp_path, {1: 1.0, 2: 2.0})
    with Checkpoints(tmp_path) as checkpoints:
        assert_intact(checkpoints, 2)


def flip_bit(folder):
    """Change one bit of the largest file, which holds arrays."""
    file = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_saved_state_may_be_donated(tmp_path, mesh4x2, kind):
    where = NamedSharding(mesh4x2, P("model"), memory_kind=kind)
    arrays = [jax.device_put(np.full(SHAPE, number, np.float32), where) for number in range(4)]
    back = to_host if kind == "pinned_host" else to_device

    def step(arrays):
        return jax.tree.map(lambda a: back(to_device(a) * 0 - 1), arrays)

    step = jax.jit(step, donate_argnums=0, out_shardings=where)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays)
        for _ in range(3):
            arrays = step(arrays)
        jax.block_until_ready(arrays)
        assert all(np.all(np.asarray(a) == -1) for a in arrays)
        checkpoints.wait()
        restored = checkpoints.restore(arrays, 1)
    for number, a in enumerate(restored):
        assert a.sharding == where
        np.testing.assert_array_equal(a, np.full(SHAPE, number, np.float32))


KEY = jax.random.key(7, impl="rbg")


def mixed_state(mesh, axis, kind="device"):
    """Return arrays of several dtypes and numbers of axes, on a mesh."""
    rng = np.random.default_rng(0)
    arrays = {
        "rows": (P(axis), rng.normal(size=(24, 5)).astype(np.float32)),  # as long as the meshes
        "columns": (P(None, axis), rng.normal(size=(7, 8, 8)).astype(jnp.bfloat16)),
        "bytes": (P(None, axis), rng.integers(0, 256, (16, 16), np.uint8)),
        "vector": (P(axis), np.arange(8.0, dtype=np.float32)),
        "zeros": (P(), np.zeros((8, 8), np.float32)),
    }
    state = {
        name: jax.device_put(a, NamedSharding(mesh, spec, memory_kind=kind))
        for name, (spec, a) in arrays.items()
    }
    scalars = {"step": jnp.int32(3), "key": jax.random.key(5), "keys": jax.random.split(KEY, 4)}
    return state | jax.device_put(scalars, NamedSharding(mesh, P()))


def shapes_of(state):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def assert_same(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        assert_same_bits(one, other)


@vary("slice_bytes", [60, 16, 200, 1 << 20])
@vary("on_cpu", [True, False])
def test_restores_on_other_devices(tmp_path, monkeypatch, mesh8, mesh4x2, slice_bytes, on_cpu):
    """Slices are parts of shards, and need not be parts of those that are restored."""
    monkeypatch.setattr(array_handler, "SLICE_BYTES", slice_bytes)
    if not on_cpu:  # read and written by programs, as on a GPU
        monkeypatch.setattr(_slices, "_is_cpu", lambda place: False)
    saved = mixed_state(mesh8, "data")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.wait()
        others = (
            mixed_state(mesh4x2, "model"),
            mixed_state(mesh4x2, ("model", "data"), "pinned_host"),
        )
        for state in (saved, *others):
            assert_same(checkpoints.restore(shapes_of(state), 1), state)
        nowhere = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), saved)
        assert_same(checkpoints.restore(nowhere, 1), jax.device_put(saved, jax.devices()[0]))


def test_orbax_restores_a_checkpoint(tmp_path, mesh4x2):
    saved = mixed_state(mesh4x2, "model")
    saved |= {name: jax.random.key_data(saved[name]) for name in ("key", "keys")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
    with ocp.StandardCheckpointer() as plain:
        restored = plain.restore(tmp_path / "1" / "default", shapes_of(saved))
    assert_same(restored, saved)


HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@vary("asynchronous", [True, False])
def test_handlers_in_a_manager_of_orbax(tmp_path, asynchronous):
    """They read what Orbax has written, and Orbax reads what they have."""
    state = {
        "host": jax.device_put(np.arange(24, dtype=np.float32).reshape(6, 4), HOST),
        "rest": [jnp.float32(0.5), np.arange(3), 7, 1.5],
    }
    shapes = {**state, "host": jax.ShapeDtypeStruct((6, 4), np.float32, sharding=HOST)}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    registries = {"ours": make_handler_registry(), "orbax": None}
    for writer, registry in registries.items():
        folder = tmp_path / writer
        with ocp.CheckpointManager(folder, options=options, handler_registry=registry) as manager:
            manager.save(1, args=ocp.args.StandardSave(state))
        for reader in registries.values():
            with ocp.CheckpointManager(folder, handler_registry=reader) as manager:
                restored = manager.restore(1, args=ocp.args.StandardRestore(shapes))
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            assert [*map(type, restored["rest"])] == [*map(type, state["rest"])]
            assert restored["host"].sharding == HOST
            if reader is not None:  # Orbax's array has the type of one on the device
                assert jax.typeof(restored["host"]).memory_space == jax.memory.Space.Host


def test_handlers_refuse_other_options(tmp_path):
    args, state = ocp.args, {"a": jnp.ones(3)}
    composite = ocp.CompositeCheckpointHandler(handler_registry=make_handler_registry())
    with ocp.Checkpointer(composite) as checkpointer:
        checkpointer.save(tmp_path / "1", args=args.Composite(state=args.PyTreeSave(state)))
        with pytest.raises(ValueError, match="`save_args`"):
            wrong = args.StandardSave(state, save_args={"a": ocp.SaveArgs()})
            checkpointer.save(tmp_path / "2", args=args.Composite(state=wrong))
        for wrong, match in (
            (args.PyTreeRestore(state, restore_args={"a": 0}), "`restore_args`"),
            (args.StandardRestore(), "`item` must be a pytree"),
        ):
            with pytest.raises(ValueError, match=match):
                checkpointer.restore(tmp_path / "1", args=args.Composite(state=wrong))


@vary("form", ["whole", "slices"])
def test_memory_beyond_the_state(tmp_path, form):
    for action in ("save", "restore"):
        assert resident_memory.measure(action, str(tmp_path), form) < 2**28  # half of the state


def test_a_save_that_fails_waits_for_its_other_writes(tmp_path, monkeypatch):
    """Otherwise they would read memory that the next program uses."""
    monkeypatch.setattr(array_handler, "SLICE_BYTES", 4000)
    store, writes = mock.MagicMock(), [mock.Mock(), mock.Mock()]
    store.result.return_value = store.__getitem__.return_value = store
    # The disk is full at the last of three slices.
    store.write.side_effect = [*writes, OSError(28, "No space left on device")]
    monkeypatch.setattr(array_handler, "_create", lambda info, a: store)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(1, state(1))
        assert all(write.exception.called for write in writes) and checkpoints.steps == []


@pytest.mark.parametrize(
    ("keep", "saved", "kept"),
    [
        (1, [{0: None, 1: None, 2: 0.9, 3: 0.1, 4: 0.3, 5: 0.2}], [2, 5]),
        (2, [{0: None, 1: None, 2: 0.9, 3: 0.1, 4: 0.3, 5: 0.2}], [2, 4, 5]),
        (9, [{0: None, 1: None, 2: 0.9, 3: 0.1, 4: 0.3, 5: 0.2}], [2, 3, 4, 5]),
        (1, [{0: None, 1: None, 2: None}], [0, 2]),
        (1, [{2: 0.5, 3: None, 4: None}], [2, 4]),
        (1, [{2: 0.5, 3: None, 4: None}, {6: 0.4}], [2, 6]),  # of a process that resumes
    ],
)
def test_keeps_the_best_and_the_last_ones(tmp_path, keep, saved, kept):
    for scores in saved:
        save(tmp_path, scores, keep)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == kept
        scores = dict(item for part in saved for item in part.items())
        evaluated = [step for step in kept if scores[step] is not None]
        assert checkpoints.evaluated_steps == sorted(evaluated, key=lambda step: -scores[step])


def test_detects_changed_missing_and_additional_files(tmp_path):
    folder = save(tmp_path, {2: 0.5}) / "2"
    without_digest = {folder / name for name in WRITTEN_AFTER_MANIFEST}
    with Checkpoints(tmp_path) as checkpoints:
        for file in sorted({f for f in folder.rglob("*") if f.is_file()} - without_digest):
            content = file.read_bytes()
            file.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
            assert file.name in (checkpoints.find_damage(2) or "")
            file.unlink()
            assert file.name in (checkpoints.find_damage(2) or "")
            file.write_bytes(content)
        (folder / "default" / "more").touch()
        with pytest.raises(TrainError, match="2: default/more"):
            checkpoints.restore_first_intact(state(2), [2], print)
        (folder / "default" / "more").unlink()
        assert_intact(checkpoints, 2)


def test_falls_back_to_the_newest_intact_checkpoint(tmp_path):
    """Other files, folders and links are no checkpoints."""
    save(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3, 4: None})
    flip_bit(tmp_path / "4")
    (tmp_path / "3" / MANIFEST).unlink()
    (tmp_path / "7").write_text("a file")
    for name in ("007", "-1", "8", "8.orbax-checkpoint-tmp", "metadata"):
        (tmp_path / name).mkdir()
    (tmp_path / "9").symlink_to("2")
    (tmp_path / "10").symlink_to("10")
    messages = []
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert checkpoints.evaluated_steps == [2, 1]
        step, restored = checkpoints.restore_first_intact(
            state(0), checkpoints.steps[::-1], messages.append
        )
        assert step == 2 and checkpoints.steps == [1, 2]
        jax.tree.map(np.testing.assert_array_equal, restored, state(2))
        checkpoints.save(8, state(8), score=(0.4,))  # the number is free again
    for step, message in zip((9, 8, 4, 3), messages, strict=True):
        assert message.startswith(f"{tmp_path}/{step} is damaged (")
        assert message.endswith(f"renamed to damaged-{step}. Using {tmp_path}/2")
        assert (tmp_path / f"damaged-{step}").exists()
    assert "its files are those of step 2" in messages[0]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 2, 8] and checkpoints.evaluated_steps == [8, 2, 1]


@pytest.mark.parametrize(
    ("like", "failure", "match"),
    [
        ({"shape": (3001,)}, None, "2 is intact"),
        ({"dtype": np.int32}, None, "2 is intact"),
        ({}, OSError(5, "Input/output error"), "2 .*Input/output error"),
        ({}, "flipped bits", "2: .*, 1: "),
    ],
)
def test_renames_nothing_if_nothing_is_restored(tmp_path, monkeypatch, like, failure, match):
    save(tmp_path, {1: 0.1, 2: 0.2})
    if failure == "flipped bits":
        flip_bit(tmp_path / "1")
        flip_bit(tmp_path / "2")
    elif failure:
        restore = mock.Mock(side_effect=failure)
        monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", restore)
    a = jax.ShapeDtypeStruct(**{"shape": (3000,), "dtype": np.float32} | like)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TrainError, match=match):
            checkpoints.restore_first_intact({"a": a, "step": np.int32(0)}, [2, 1], print)
        assert checkpoints.steps == [1, 2]


@pytest.mark.parametrize(
    ("change", "version"),
    [({"format": 9, "effjax": "9.0"}, "9.0"), ({"format": None, "effjax": None}, "before 0.1.0")],
)
def test_a_checkpoint_of_another_version(tmp_path, change, version):
    """It is intact, so no older one is used in its place."""
    file = save(tmp_path, {1: 0.1, 2: 0.2}) / "2" / MANIFEST
    manifest = json.loads(file.read_text()) | change | {"sha256": None}
    write_manifest(file, {k: v for k, v in manifest.items() if v is not None})
    with pytest.raises(TrainError, match=f"2 .*effjax {version}"):
        Checkpoints(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_nothing_reads_the_files_without_a_digest(tmp_path):
    folder = save(tmp_path, {1: 0.1, 2: 0.2}) / "2"
    for name in WRITTEN_AFTER_MANIFEST:
        (folder / name).unlink()
        (folder / name).write_text("[" * 100_000)
    with Checkpoints(tmp_path) as checkpoints:
        assert_intact(checkpoints, 2)
        checkpoints.save(3, state(3), score=(0.3,))
    (tmp_path / "3" / "_CHECKPOINT_METADATA").unlink()
    os.mkfifo(tmp_path / "3" / "_CHECKPOINT_METADATA")
    with Checkpoints(tmp_path) as checkpoints:
        assert_intact(checkpoints, 3)


def write_manifest(file, manifest):
    """Write a manifest with a correct digest, as another program would."""
    file.write_text(json.dumps(manifest | {"sha256": digest_json(manifest)}))


@pytest.mark.parametrize("kind", ["fifo", "directory", "deep", "step", "score", "files", "records"])
def test_a_manifest_that_is_no_manifest(tmp_path, kind):
    """It is another kind of file, or lacks an entry."""
    file = save(tmp_path, {1: 0.1, 2: 0.2}) / "2" / MANIFEST
    manifest = json.loads(file.read_text())
    file.unlink()
    if kind == "deep":
        file.write_text("[" * 100_000)
    elif kind in manifest:
        write_manifest(file, {k: v for k, v in manifest.items() if k not in ("sha256", kind)})
    else:
        os.mkfifo(file) if kind == "fifo" else file.mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.find_damage(2) or "").startswith("no intact manifest.json: ")
        assert checkpoints.evaluated_steps == [1]


def test_a_manifest_that_cannot_be_written(tmp_path, monkeypatch):
    """The earlier checkpoints stay, and the new one does not get its name without a manifest."""

    def full_disk(stream, _):
        assert "3.orbax-checkpoint-tmp" in str(stream.name) and not (tmp_path / "3").exists()
        raise OSError(28, "No space left on device")

    save(tmp_path, {1: 0.1, 2: 0.2})
    monkeypatch.setattr("hashlib.file_digest", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, {3: 0.9}, keep=1)
    monkeypatch.undo()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 2]
        assert_intact(checkpoints, 1)


MEMORY = """
import sys
import jax, numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.train.resident_memory import peak_resident_bytes
from effjax.train.checkpoint import Checkpoints

kind = sys.argv[2]
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
place = NamedSharding(mesh, P(), memory_kind=kind)

def new(i):
    stack = np.random.default_rng(i).standard_normal((8, 2048, 2048), np.float32)
    return jax.device_put(stack, place, may_alias=False).block_until_ready()

def most(action):
    peak_resident_bytes()
    before = peak_resident_bytes()
    return action(), (peak_resident_bytes() - before) / size

step = jax.jit(lambda a: a + 1, donate_argnums=0, out_shardings=place)
state = [new(i) for i in range(3)]
places = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in state]
size = sum(a.nbytes for a in state)

with Checkpoints(Path(sys.argv[1])) as checkpoints:
    checkpoints.save(0, {"a": step(new(9))[:1]})  # what is loaded at the first save does not count
    checkpoints.wait()

    def save_and_step():
        checkpoints.save(1, state)
        if kind == "device":  # programs for CPUs copy arrays in pinned host memory
            state[0] = step(state[0]).block_until_ready()
        checkpoints.wait()

    print(most(save_and_step)[1])
    state.clear()
    print(most(lambda: checkpoints.restore(places, 1))[1] - 1)
"""


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_needs_no_copy_of_the_state(tmp_path, kind):
    """Saving and restoring need memory for a few slices, beyond the state of 384 MiB."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), kind],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, cwd=ROOT,
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    saving, restoring = map(float, out.split())
    assert saving < 0.1
    assert restoring < 0.5  # two slices of 64 MiB
