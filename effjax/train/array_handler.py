"""Checkpoints of Orbax that are written and read in slices, without a copy of the state.

The result has the format of Orbax, with each array in Zarr. A slice is a file, a chunk of Zarr.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future

from .._slices import Bounds, Rows, create_array, own_shards, read_rows, sharding_of
from .host_memory import MAX_BYTES_IN_FLIGHT, SLICE_BYTES


def make_handler_registry() -> ocp.handlers.CheckpointHandlerRegistry:
    """Return handlers with which Orbax saves and restores a pytree without a copy of it.

    Orbax copies arrays to the host before it writes them, those in host memory too, and reads them
    to the host as a whole. With these handlers, at most 192 MiB of slices are on the host beside
    the state. Arrays may be in device or host memory and sharded over processes::

        manager = ocp.CheckpointManager(
            path, handler_registry=effjax.train.make_handler_registry()
        )
        manager.save(step, args=ocp.args.StandardSave(state))
        state = manager.restore(step, args=ocp.args.StandardRestore(shapes))

    `shapes` is the state, or its ``jax.ShapeDtypeStruct``s. Each array is restored where the
    sharding of its counterpart says, on the first device if that has none: in ``pinned_host``, on
    another mesh, or in another number of processes.

    When `save` returns, the arrays are written, and the state may be donated. The directory is
    completed in the background. Orbax's own handlers can read it: a slice is a chunk of Zarr, not
    compressed.

    Returns:
        The registry for the argument ``handler_registry`` of ``ocp.CheckpointManager`` and
        ``ocp.CompositeCheckpointHandler``. It is for ``ocp.args.StandardSave``,
        ``StandardRestore``, ``PyTreeSave`` and ``PyTreeRestore`` of all items. Their other options
        than ``item`` and ``custom_metadata`` are errors.
    """
    registry, handler = ocp.handlers.DefaultCheckpointHandlerRegistry(), _TreeHandler()
    for name in ("StandardSave", "StandardRestore", "PyTreeSave", "PyTreeRestore"):
        registry.add(None, getattr(ocp.args, name), handler)
    return registry


class _TreeHandler(ocp.PyTreeCheckpointHandler):
    """Handler of pytrees whose arrays of JAX are written and read in slices."""

    def __init__(self) -> None:
        handlers = ocp.type_handlers
        registry = handlers.create_type_handler_registry(
            (int, handlers.ScalarHandler()),
            (float, handlers.ScalarHandler()),
            (np.number, handlers.ScalarHandler()),
            (np.ndarray, handlers.NumpyHandler()),
            (jax.Array, _ArrayHandler()),
        )
        super().__init__(use_ocdbt=False, type_handler_registry=registry)

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> Any:
        _check_options(args)
        args = ocp.args.PyTreeSave(args.item, custom_metadata=args.custom_metadata)
        return await super().async_save(directory, args=args)

    def restore(self, directory: Any, *_: Any, args: Any = None) -> Any:
        if args is None or args.item is None:
            raise ValueError("`item` must be a pytree of arrays or `jax.ShapeDtypeStruct`s.")
        _check_options(args)
        restore_args = jax.tree.map(_restore_args, args.item)
        args = ocp.args.PyTreeRestore(args.item, restore_args=restore_args)
        return super().restore(directory, args=args)

    def finalize(self, directory: Any) -> None:
        """Do nothing: Orbax would look for files of its other format, and warn."""


def _check_options(args: Any) -> None:
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name not in ("item", "custom_metadata") and value != field.default:
            raise ValueError(f"`{field.name}` (={value!r:.120}) must be {field.default}.")


def _restore_args(like: Any) -> ocp.RestoreArgs:
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return ocp.RestoreArgs(restore_type=type(like))
    return ocp.ArrayRestoreArgs(
        global_shape=like.shape, dtype=like.dtype, sharding=sharding_of(like)
    )


class _ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Handler of JAX's arrays."""

    def __init__(self) -> None:
        super().__init__(enable_write_sharding_file=False)

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Write the shards that this process owns. When this returns, they are written."""
        # Orbax may still be making the directory, and signals its futures when it is there. It
        # would also run this one in the background, but the next step reuses the state's memory.
        future.CommitFutureAwaitingContractedSignals(_write(values, infos)).result()
        return []

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        """Create the arrays with the shardings of `args`, one at a time."""
        assert args is not None
        return [_restore(info, arg) for info, arg in zip(infos, args, strict=True)]


async def _write(values: Sequence[jax.Array], infos: Sequence[Any]) -> None:
    for info in infos:
        await info.await_path_creation()
    values = [jax.random.key_data(a) if _is_key(a) else a for a in values]
    openings = [_create(info, a) for info, a in zip(infos, values, strict=True)]
    writes: list[ts.WriteFutures] = []
    try:
        num_bytes = 0
        for a, opening in zip(values, openings, strict=True):
            for bounds, rows in _slices(a):
                # The slice is not copied.
                write = opening.result()[_index(bounds)].write(
                    rows, can_reference_source_data_indefinitely=True
                )
                writes.append(write)
                num_bytes += rows.nbytes
                if num_bytes >= MAX_BYTES_IN_FLIGHT:
                    _wait(writes)
                    num_bytes = 0
        _wait(writes)
    finally:  # after an error, too: what is being written must not be freed
        for write in writes:
            write.exception()
    for opening in openings:
        opening.result()


def _wait(writes: list[Any]) -> None:
    while writes:
        writes[-1].result()
        writes.pop()


def _create(info: Any, a: jax.Array) -> Any:
    """Start to open a new array of Zarr. The first process writes its description."""
    spec = _spec(info) | {
        "dtype": a.dtype.name,
        # Compressed, the numbers of a state become 8 % smaller, in six times the time.
        "metadata": {"shape": a.shape, "chunks": _chunk_shape(a), "compressor": None},
        # Otherwise Orbax would miss a chunk of zeros.
        "store_data_equal_to_fill_value": True,
    }
    options: dict[str, Any] = (
        {"create": True} if jax.process_index() == 0 else {"assume_metadata": True}
    )
    return ts.open(spec, open=True, context=_context(), **options)


def _chunk_shape(a: jax.Array) -> tuple[int, ...]:
    """Return the shape of the slices of an array, which are parts of its shards."""
    shard = a.sharding.shard_shape(a.shape)
    if not shard:
        return ()
    count = min(max(-(-math.prod(shard) * a.itemsize // SLICE_BYTES), 1), shard[0])
    if shard[0] < a.shape[0]:  # then slices must end where shards do
        while shard[0] % count:
            count += 1
    return -(-shard[0] // count), *shard[1:]


def _slices(a: jax.Array) -> Iterator[tuple[Bounds, np.ndarray]]:
    """Yield the slices of the shards of an array that this process writes."""
    for bounds, shard in own_shards(a):
        if not bounds:
            yield bounds, read_rows(shard, 0, 1, SLICE_BYTES).reshape(())
            continue
        start, size = bounds[0][0], _chunk_shape(a)[0]
        for first in range(0, shard.shape[0], size):
            last = min(first + size, shard.shape[0])
            rows = read_rows(shard, first, last, SLICE_BYTES)
            yield ((start + first, start + last), *bounds[1:]), rows


def _restore(info: Any, arg: Any) -> jax.Array:
    """Return an array of a checkpoint, with the sharding of `arg`."""
    like = jax.ShapeDtypeStruct(arg.global_shape, arg.dtype)
    if _is_key(like):
        impl = jax.random.key_impl(jnp.empty((), arg.dtype))
        return jax.random.wrap_key_data(
            _read_array(info, jax.eval_shape(jax.random.key_data, like), arg.sharding), impl=impl
        )
    return _read_array(info, like, arg.sharding)


def _read_array(info: Any, like: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    store = ts.open(
        _spec(info) | {"fill_missing_data_reads": False}, open=True, context=_context()
    ).result()
    found, wanted = (store.shape, store.dtype.name), (like.shape, like.dtype.name)
    if found != wanted:
        raise ValueError(f"{info.name} is {found}, not {wanted}")
    like = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

    chunks: Any = store.chunk_layout.read_chunk.shape

    def read(bounds: Bounds, out: np.ndarray) -> None:
        out[...] = store[_index(bounds)].read().result()

    def rows_of(bounds: Bounds) -> Iterator[Rows]:
        if not bounds:
            yield 0, 1, functools.partial(read, bounds)
            return
        (start, stop), size = bounds[0], chunks[0]
        first = start
        while first < stop:
            last = min(first - first % size + size, stop)
            part = (first, last), *bounds[1:]
            yield first - start, last - start, functools.partial(read, part)
            first = last

    return create_array(like, rows_of, SLICE_BYTES)


def _is_key(a: Any) -> bool:
    """Return True for keys of JAX's random numbers."""
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def _spec(info: Any) -> dict[str, Any]:
    """Return the place of an array for TensorStore."""
    if "://" in str(info.parent_dir):
        raise ValueError(f"{info.parent_dir} must be a directory of a file system.")
    directory = {"driver": "file", "path": f"{info.parent_dir}/"}
    store = {"driver": "ocdbt", "base": directory, "path": f"{info.name}/"}
    if not info.is_ocdbt_checkpoint:  # written here; Orbax puts all arrays into one database
        store = {"driver": "file", "path": f"{info.parent_dir / info.name}/"}
    return {"driver": "zarr3" if info.use_zarr3 else "zarr", "kvstore": store}


@functools.cache
def _context() -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _index(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)
