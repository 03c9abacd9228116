"""Optimizers with state on disk, applied layer by layer on the device."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .clipping import ClipBy, check_clipping, make_clip, with_clipping
from .compiled import compile_offloaded
from .disk_files import Block, LayerFile, link_folder, read_step, write_folder
from .host_init import state_sharding
from .per_leaf import check_per_leaf
from .placement import Space, load, put, write
from .train_state import check_no_shared
from .trees import Tree, as_array_tree, check_same_shapes, is_key, layer_shapes, shapes_of
from .update import LayerList, LayerStack, apply_optimizer, fold_state_keys

_STEP_PREFIX = "disk_update_"
_STEP_NAME = re.compile(rf"{_STEP_PREFIX}\d{{8,}}(\.tmp)?")


class DiskUpdate(NamedTuple):
    """The functions of an optimizer whose state is on disk."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    save: Callable[..., Any]
    restore: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class DiskState:
    """The optimizer state of one step, which is in the files of a folder."""

    path: pathlib.Path
    step: int  # the number of updates


def disk_update(tx: Any, directory: str | os.PathLike[str], *, stacked: bool = True) -> DiskUpdate:
    """Make an optimizer that keeps its state on disk and updates one layer at a time.

    Computes the same as `stream_update`, with the optimizer state in files instead of host memory.
    Without clipping and random numbers, the results equal those of jitted optax applied to one
    layer at a time in memory, to the bit. `stream_update` compiles all layers into one program, in
    which XLA fuses the operations in another way, so its last bits can differ. Call the functions
    outside of jit. While a layer is updated, threads read the state of the next one and write that
    of the one before. Host memory holds the state of about four layers, for any number of layers,
    and the device that of about three.

    Each update writes the state to a new folder in `directory`. The folder gets its final name
    after all files are on the disk, and then the folder of the previous step is removed. So the
    disk always has the complete state of one step, and needs room for two. The space is allocated
    before anything is updated (not on macOS, or on file systems that copy on write, such as ZFS; a
    full disk can then stop a step in the middle).

    Args:
        tx: an ``optax.GradientTransformation`` that treats every parameter separately, as in
            `stream_update`.
        directory: a folder for the state of one optimizer of one run, on a fast disk. `update`
            removes all other steps in it, newer ones too. Two running programs must not share it.
            In a program of several processes each one stores the parts of its own devices, on a
            local disk or a shared one.
        stacked: whether the parameters are a pytree of arrays [L, ...], as in `offload_scan`, or a
            list of pytrees, one for each layer, as in `offload_sequential`.

    Returns:
        Four functions.

        * ``init(params) -> state``: write the state of step 0. `state.path` is its folder, and
          `state.step` the number of updates.
        * ``update(grads, state, params, clip_norm=None, clip_by="global") -> (params, state)``: as
          in `stream_update`. The new parameters overwrite the old ones and the gradients are freed:
          use neither `params` nor `grads` afterwards.
        * ``save(state, path)``: keep a state in a new folder `path` outside of `directory`, for a
          checkpoint. On the same file system the files get a second name and are not copied, since
          no file is ever overwritten.
        * ``restore(path, params) -> state``: the state in a folder that `save` has created, or of a
          step in `directory`. The next update reads it there. The parameters must have the shapes
          and the shardings of the saved run.

    Raises:
        ValueError: from `init` and `update`, as in `stream_update`; from `update` and `restore`, if
            a file is damaged, or has other arrays, another layer, step or sharding than expected,
            naming the file (the parameters are then unchanged); from `save`, if `path` is in
            `directory`.
        FileNotFoundError: from `update`, `save` and `restore`, naming the file that is missing.
        FileExistsError: from `init`, if `directory` contains the state of a run; from `update`, if
            something that it could not remove has the name of the next step; from `save`, if `path`
            exists.
        OSError: if the disk is full or fails. The old state stays valid. If there is no space for a
            step, the parameters are unchanged, too. After other errors, `params` may have been
            updated in part. Its arrays are then deleted, in a list those of the updated layers.
        TypeError: if a leaf is not an array, or the functions are called inside jit.
    """
    layers = LayerStack(tx) if stacked else LayerList(tx)
    optimizer = _DiskOptimizer(layers, pathlib.Path(directory).resolve(), LayerPrograms(layers, {}))
    return DiskUpdate(optimizer.init, optimizer.update, optimizer.save, optimizer.restore)


class _DiskOptimizer(NamedTuple):
    """The four functions of `disk_update`."""

    layers: LayerStack | LayerList
    directory: pathlib.Path
    programs: "LayerPrograms"

    def init(self, params: Tree) -> DiskState:
        params = _check_params(self.layers, "params", params)
        if existing := [path for path in self._steps() if _has_state(path)]:
            raise FileExistsError(
                f"{existing[0]} is the state of another run. Continue it with `restore` and the "
                "parameters of the same step, or remove it."
            )
        _wait_for_processes("init")  # before one of them writes what others would find
        contents, state = describe_layers(self.layers, params), self._state(0)
        files = _layer_files(contents, state.step)

        def fill(folder: pathlib.Path) -> None:
            with _Writer(folder) as writer:
                for i, (content, file) in enumerate(zip(contents, files, strict=True)):
                    w = self.programs.load(params, i)
                    writer.add(content, file, self.programs.init(w, i, content))

        self._remove_steps(self._steps(), state)
        write_folder(_own_part(state.path), files, fill)
        _wait_for_processes("init")
        return state

    def update(
        self,
        grads: Tree,
        state: DiskState,
        params: Tree,
        clip_norm: float | None = None,
        clip_by: Literal["global", "layer"] = "global",
    ) -> tuple[Tree, DiskState]:
        check_clipping(clip_norm, clip_by, ("global", "layer"))
        params = _check_params(self.layers, "params", params)
        grads = _check_arrays(self.layers, "grads", grads)
        check_same_shapes("grads", grads, "`params`", params)
        contents = describe_layers(self.layers, params)
        old_files = _check_files(state, contents)
        new = self._state(state.step + 1)
        new_files = _layer_files(contents, new.step)
        clip = self.programs.clipping(grads, clip_norm, clip_by)

        def fill(folder: pathlib.Path) -> Tree:
            updated, old_folder = params, _own_part(state.path)
            with ThreadPoolExecutor(1) as reader, _Writer(folder) as writer:
                ahead = reader.submit(old_files[0].read, old_folder)
                for i, content in enumerate(contents):
                    entries = content.to_arrays(ahead.result())
                    if i + 1 < len(contents):
                        ahead = reader.submit(old_files[i + 1].read, old_folder)
                    w, g = self.programs.load(updated, i), self.programs.load(grads, i)
                    w, entries = self.programs.update(w, g, content, entries, clip)
                    updated = self.programs.store(updated, w, i)
                    writer.add(content, new_files[i], entries)
            return updated

        # Steps of an interrupted run, and those after a restored checkpoint.
        self._remove_steps([path for path in self._steps() if path != state.path], new)
        complete = False
        try:
            updated = write_folder(_own_part(new.path), new_files, fill)
            complete = True
            _wait_for_processes("update")
            for a in jax.tree.leaves(grads):
                a.delete()
            if state.path.parent == self.directory:
                self._remove_steps([state.path], new)
        except BaseException as error:
            if complete:
                error.add_note(
                    f"Step {new.step} is complete in {new.path}, but its parameters were lost. "
                    "Continue from a checkpoint."
                )
            elif any(a.is_deleted() for a in jax.tree.leaves(params)):
                which = "they" if isinstance(self.layers, LayerStack) else "the updated layers"
                error.add_note(
                    f"The parameters had been updated in part, so {which} were deleted. The "
                    f"optimizer state of step {state.step} in {state.path} is unchanged."
                )
            raise
        return updated, new

    def save(self, state: DiskState, path: str | os.PathLike[str]) -> None:
        folder = pathlib.Path(path).resolve()
        if folder == self.directory or self.directory in folder.parents:
            raise ValueError(
                f"`path` (={str(path)!r}) must be outside of `directory` ({self.directory}), from "
                "which `update` removes old steps."
            )
        _check_exists(state)
        if _own_part(folder).exists():
            raise FileExistsError(f"{_own_part(folder)} exists. `save` needs a new folder.")
        link_folder(_own_part(state.path), _own_part(folder))
        _wait_for_processes("save")

    def restore(self, path: str | os.PathLike[str], params: Tree) -> DiskState:
        params = _check_params(self.layers, "params", params)
        folder = pathlib.Path(path).resolve()
        state = DiskState(folder, read_step(_own_part(folder)))
        _check_files(state, describe_layers(self.layers, params))
        return state

    def _state(self, step: int) -> DiskState:
        return DiskState(self.directory / f"{_STEP_PREFIX}{step:08}", step)

    def _steps(self) -> list[pathlib.Path]:
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(path for path in paths if _STEP_NAME.fullmatch(path.name))

    def _remove_steps(self, paths: Sequence[pathlib.Path], new: DiskState) -> None:
        """Remove the parts of this process, before or after the step `new` is written."""
        for path in paths:
            part = _own_part(path)
            for folder in (part, part.with_name(f"{part.name}.tmp")):
                shutil.rmtree(folder, ignore_errors=True)
            if path != new.path:  # another process may be about to write there
                with contextlib.suppress(OSError):  # parts of other processes are left
                    path.rmdir()


def _check_params(layers: LayerStack | LayerList, name: str, tree: Tree) -> Tree:
    tree = _check_arrays(layers, name, tree)
    check_no_shared(name, tree)
    return tree


def _check_arrays(layers: LayerStack | LayerList, name: str, tree: Tree) -> Tree:
    tree = as_array_tree(name, tree)
    if not layers.count(name, tree):
        raise ValueError(f"`{name}` must have at least one layer.")
    if any(isinstance(a, Tracer) for a in jax.tree.leaves(tree)):
        raise TypeError("disk_update reads and writes files. Call its functions outside of jit.")
    return tree


# Folders. With several processes, each one has its own part of a folder.


def _own_part(path: pathlib.Path) -> pathlib.Path:
    return path / f"process_{jax.process_index()}" if jax.process_count() > 1 else path


def _has_state(step: pathlib.Path) -> bool:
    """Return whether the folder of a step contains more than unfinished parts."""
    if jax.process_count() == 1 and step.suffix == ".tmp":
        return False
    return not step.is_dir() or any(part.suffix != ".tmp" for part in step.iterdir())


def _wait_for_processes(name: str) -> None:
    """Wait until all processes have come here, for example before any removes the old state."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(f"effjax.disk_update.{name}")


def _check_exists(state: DiskState) -> None:
    if not _own_part(state.path).is_dir():
        raise FileNotFoundError(
            f"{_own_part(state.path)} does not exist. `update` removes the old state from the "
            "directory. Use the state that it returned, and `save` what you need later."
        )


def _check_files(state: DiskState, contents: Sequence["LayerContent"]) -> list[LayerFile]:
    """Return the files of a state, after checking that they exist and belong to it."""
    _check_exists(state)
    files = _layer_files(contents, state.step)
    for file in files:
        file.check(_own_part(state.path))
    return files


def _layer_files(contents: Sequence["LayerContent"], step: int) -> list[LayerFile]:
    place = len(contents), jax.process_index(), jax.process_count()
    return [LayerFile(step, i, *place, content.blocks) for i, content in enumerate(contents)]


class _Writer:
    """A thread that writes the state of a layer while the next one is updated."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.pool = folder, ThreadPoolExecutor(1)
        self.pending: Future | None = None

    def add(self, content: "LayerContent", file: LayerFile, entries: list[jax.Array]) -> None:
        """Write the state of a layer, after that of the layer before."""
        for a in entries:
            a.copy_to_host_async()
        self.wait()
        self.pending = self.pool.submit(lambda: file.write(self.folder, content.to_numpy(entries)))

    def wait(self) -> None:
        """Wait until the last layer is on the disk."""
        if self.pending is not None:
            self.pending.result()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.pool.shutdown()


# The state of a layer.


class LayerContent(NamedTuple):
    """Static description of the optimizer state of one layer, as a list of arrays."""

    structure: Any
    names: list[str]
    arrays: list[jax.ShapeDtypeStruct]  # with shardings
    key_types: list  # PRNG implementations, of keys, which are stored as integers; else None

    @property
    def blocks(self) -> list[Block]:
        """The different parts of the arrays that the devices of this process have."""
        return [
            Block(name, index, np.dtype(a.dtype))
            for name, a in zip(self.names, self.arrays, strict=True)
            for index in _own_indices(a)
        ]

    def to_arrays(self, blocks: Sequence[np.ndarray]) -> list[jax.Array]:
        """Return the arrays with these blocks."""
        rest = iter(blocks)

        def make(a: jax.ShapeDtypeStruct) -> jax.Array:
            parts = {index: next(rest) for index in _own_indices(a)}
            return jax.make_array_from_callback(
                a.shape, a.sharding, lambda index: parts[_as_pairs(index, a.shape)]
            )

        return [make(a) for a in self.arrays]

    def to_numpy(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return the blocks of arrays."""
        blocks = []
        for a, expected in zip(arrays, self.arrays, strict=True):
            parts = {_as_pairs(s.index, a.shape): s.data for s in a.addressable_shards}
            blocks += [np.asarray(parts[index]) for index in _own_indices(expected)]
        return blocks

    def flatten(self, state: Tree) -> list[jax.Array]:
        """Return the arrays of a state."""
        leaves = map(jnp.asarray, self.structure.flatten_up_to(state))
        return [jax.random.key_data(a) if is_key(a) else a for a in leaves]

    def unflatten(self, arrays: Sequence[jax.Array]) -> Tree:
        """Return the state that consists of these arrays."""
        return self.structure.unflatten(
            a if key_type is None else jax.random.wrap_key_data(a, impl=key_type)
            for a, key_type in zip(arrays, self.key_types, strict=True)
        )


def _own_indices(a: jax.ShapeDtypeStruct) -> list[tuple]:
    indices = a.sharding.addressable_devices_indices_map(a.shape).values()
    return sorted({_as_pairs(index, a.shape) for index in indices})


def _as_pairs(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    pairs = (s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
    return tuple((int(start), int(end)) for start, end in pairs)


def describe_layers(layers: LayerStack | LayerList, params: Any) -> list[LayerContent]:
    """Return the state of each layer."""
    if isinstance(layers, LayerStack):
        num_layers = layers.count("params", params)

        def sharding_in_stack(path: tuple, shape: tuple[int, ...]) -> Sharding | None:
            return _without_first_axis(state_sharding(params, path, (num_layers, *shape)))

        content = _describe_layer(layers.tx, layer_shapes(params), params, sharding_in_stack)
        return [content] * num_layers

    def describe(w: Tree) -> LayerContent:
        # A layer without parameters has its counts on the devices of the others.
        owner = w if jax.tree.leaves(w) else params
        return _describe_layer(
            layers.tx, shapes_of(w), params, functools.partial(state_sharding, owner)
        )

    return [describe(w) for w in params]


def _describe_layer(tx: Any, shapes: Tree, params: Tree, sharding: Callable) -> LayerContent:
    key_types = []

    def init(w: Tree) -> Tree:
        state = jax.tree.map(jnp.asarray, tx.init(w))
        for a in jax.tree.leaves(state):
            key_types.append(jax.random.key_impl(a) if is_key(a) else None)
        return jax.tree.map(lambda a: jax.random.key_data(a) if is_key(a) else a, state)

    state = jax.eval_shape(init, shapes)
    leaves = jax.tree.leaves(params)
    devices = leaves[0].sharding.device_set if leaves else jax.devices()
    one_device = SingleDeviceSharding(min(devices, key=lambda d: d.id))

    def place(path: tuple, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = (sharding(path, a.shape) or one_device).with_memory_kind("device")
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

    placed = jax.tree_util.tree_map_with_path(place, state)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return LayerContent(
        jax.tree.structure(state),
        [f"state{jax.tree_util.keystr(path)}" for path in paths],
        jax.tree.leaves(placed),
        key_types,
    )


def _without_first_axis(sharding: Sharding | None) -> Sharding | None:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


# Programs. The update of a layer is a program of device arrays only: that of a layer in memory. In
# one program with the loads, XLA would fuse its operations in another way, which changes last bits.


class Clipping(NamedTuple):
    """The arguments of `make_clip`."""

    clip_norm: float | None
    clip_by: ClipBy
    norm: jax.Array | None


class LayerPrograms(NamedTuple):
    """The programs that initialize and update one layer on the device."""

    layers: LayerStack | LayerList
    compiled: dict

    def clipping(self, grads: Any, clip_norm: float | None, clip_by: ClipBy) -> Clipping:
        """Return how to clip gradients, with their norm if it is needed."""
        if clip_norm is None:
            return Clipping(None, clip_by, None)
        if clip_by == "layer":
            return Clipping(float(clip_norm), clip_by, None)
        norm = lambda grads: jnp.sqrt(self.layers.sum_of_squares(grads))  # noqa: E731
        norm_of_all = self._call("norm", lambda: jax.jit(norm), grads)
        return Clipping(float(clip_norm), clip_by, norm_of_all)

    def load(self, tree: Any, i: int) -> Tree:
        """Return layer i of parameters or gradients, on the device."""
        if isinstance(self.layers, LayerList):
            return put(tree[i], Space.Device)
        return self._call("load", lambda: jax.jit(load), tree, np.int32(i))

    def store(self, params: Any, w: Tree, i: int) -> Any:
        """Return the parameters with other values for layer i, in the memory of the old ones."""
        if isinstance(self.layers, LayerList):
            new = jax.tree.map(lambda old, a: jax.device_put(a, old.sharding), params[i], w)
            jax.tree.map(lambda old: old.delete(), params[i])
            leaves = jax.tree.leaves([*params[:i], new, *params[i + 1 :]])
            return jax.tree.unflatten(jax.tree.structure(params), leaves)
        shardings = jax.tree.map(lambda a: a.sharding, params)
        jit = lambda: jax.jit(write, donate_argnums=0, out_shardings=shardings)  # noqa: E731
        return self._call("store", jit, params, w, np.int32(i))

    def init(self, w: Tree, i: int, content: LayerContent) -> list[jax.Array]:
        """Return the arrays of the state of layer i."""
        tx = self.layers.tx

        def jit() -> Any:
            keys = check_per_leaf(tx, shapes_of(w))

            def init(w: Tree, i: jax.Array) -> list[jax.Array]:
                state = jax.tree.map(jnp.asarray, tx.init(w))
                return content.flatten(fold_state_keys(state, keys, i))

            return jax.jit(init, out_shardings=[a.sharding for a in content.arrays])

        return self._call("init", jit, w, np.int32(i))

    def update_function(self, content: LayerContent, clip_by: ClipBy) -> Callable[..., Any]:
        """Return ``update(w, grads, entries, clip_norm, norm) -> (w, entries)`` of a layer."""

        def update(
            w: Tree, grads: Tree, entries: list, clip_norm: Any, norm: Any
        ) -> tuple[Tree, list]:
            tx = self.layers.tx
            if clip_norm is not None:
                tx = with_clipping(tx, make_clip(clip_norm, clip_by, norm))
            w, state = apply_optimizer(tx, w, content.unflatten(entries), grads)
            return w, content.flatten(state)

        return update

    def update(
        self, w: Tree, grads: Tree, content: LayerContent, entries: list[jax.Array], clip: Clipping
    ) -> tuple[Tree, list[jax.Array]]:
        """Return the parameters of a layer and the arrays of its state after an update."""
        clip_norm, clip_by, norm = clip

        def jit() -> Any:
            check_per_leaf(self.layers.tx, shapes_of(w))
            shardings = jax.tree.map(lambda a: a.sharding, w), [a.sharding for a in content.arrays]
            function = self.update_function(content, clip_by)
            return jax.jit(function, donate_argnums=(0, 2), out_shardings=shardings)

        # The norm is an argument of the program, which other values do not compile again.
        return self._call(("update", clip_by), jit, w, grads, entries, clip_norm, norm)

    def _call(self, name: Any, jit: Callable[[], Any], *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        config = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # pyright: ignore
        types = tuple((jax.typeof(a), getattr(a, "sharding", None)) for a in leaves)
        cache_key = name, structure, types, config
        if cache_key not in self.compiled:
            self.compiled[cache_key] = compile_offloaded(jit(), *args)
        return self.compiled[cache_key](*args)
