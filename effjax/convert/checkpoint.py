"""Language models in Hugging Face's layout, and their adapters, from and to stacks of layers."""

import contextlib
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._files import check, remove_folder
from .._slices import Bounds, Rows, create_array, devices_by_shard, own_shards, read_rows, whole
from ..models.decoder import CODES, SCALES
from ..ops._common.arguments import check_instance, check_named_arrays
from ..ops.quantize import BLOCK, quantize
from .safetensors_file import (
    DTYPES,
    Description,
    Tensor,
    check_finite,
    create_file,
    describe,
    dtype_name,
    make_header,
    num_bytes,
    read_header,
    read_index,
    read_tensor,
    row_ranges,
    sync_files,
    write_tensor,
)

MODEL = "model.safetensors"
LAYERS_PREFIX = "model.layers"
EXPERTS = ".experts."  # in names of layers, before the number of an expert in the files
IGNORED = ("rotary_emb.inv_freq",)  # buffers in old checkpoints of Llama
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # dtypes that are converted to each other
# Larger arrays are moved layer by layer, or by rows of this size.
CHUNK_BYTES = 32 << 20

Shapes = Mapping[str, jax.ShapeDtypeStruct]
Arrays = dict[str, jax.Array]
Progress = Callable[[int, int], object]


class Source(NamedTuple):
    """An array and the tensors that it consists of.

    Attributes:
        array: Its shape, dtype and sharding.
        names: The names of its tensors, in order.
        axes: The number of axes along which they are stacked: 0 for a single tensor, 1 for one of
            each layer, and 2 for one of each expert of each layer.
        part: `CODES` or `SCALES` if it is this part of the quantized tensors; otherwise empty.
    """

    array: Any
    names: list[str]
    axes: int
    part: str = ""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor, or of this part of it."""
        return tuple(self.array.shape)[self.axes :]

    def layer_names(self, i: int) -> list[str]:
        """Return the names of the tensors of layer i."""
        count = math.prod(self.array.shape[1 : self.axes])
        return self.names[i * count : (i + 1) * count]

    @property
    def num_values(self) -> int:
        """The number of values of a row of a quantized tensor that an entry belongs to."""
        if self.part == SCALES:
            return BLOCK
        return 2 if self.array.dtype == jnp.uint8 else 1

    def has_shape(self, tensor: Tensor) -> bool:
        """Return True if a tensor has the shape that the array needs."""
        if not self.part:
            return tensor.shape == self.tensor_shape
        # Rows are padded to whole blocks, of which a byte holds one or two codes.
        *rows, size = tensor.shape or (0,)
        padded = size + -size % BLOCK
        return (*rows, padded) == (*self.tensor_shape[:-1], self.tensor_shape[-1] * self.num_values)

    def tensor_bounds(self, tensor: Tensor, bounds: Bounds) -> Bounds:
        """Return the part of a tensor from which a part of the array is computed."""
        if not self.part:
            return bounds
        first, last = (end * self.num_values for end in bounds[-1])
        return (*bounds[:-1], (first, min(last, tensor.shape[-1])))

    def ranges(self, bounds: Bounds) -> Iterator[tuple[list[str], tuple[int, int], Bounds]]:
        """Yield names of tensors, rows of a shard within `bounds`, and the bounds of each tensor.

        The rows are those of the tensors, one after the other.
        """
        # The tensors of a layer are one row. A single tensor is cut, so that the host holds one
        # part of it at a time.
        if not bounds:
            yield self.names, (0, 1), bounds
        elif self.axes:
            for i in range(*bounds[0]):
                names, row = self.layer_names(i), i - bounds[0][0]
                if self.axes == 2:
                    names = names[slice(*bounds[1])]
                yield names, (row, row + 1), bounds[self.axes :]
        else:
            shape = [last - first for first, last in bounds]
            for first, last in row_ranges(shape, self.array.dtype.itemsize, CHUNK_BYTES):
                rows = bounds[0][0] + first, bounds[0][0] + last
                yield self.names, (first, last), (rows, *bounds[1:])

    def parts(self, bounds: Bounds) -> Iterator[tuple[str, Bounds]]:
        """Yield the name of each tensor that a shard within `bounds` has, and the bounds in it."""
        for names, _, part in self.ranges(bounds):
            for name in names:
                yield name, part


Sources = dict[str, Source]  # by the name of the array


def load_checkpoint(
    folder: str | os.PathLike[str],
    layers: Shapes,
    others: Shapes,
    *,
    layers_prefix: str = LAYERS_PREFIX,
    ignore: Collection[str] = IGNORED,
    progress: Progress | None = None,
) -> tuple[Arrays, Arrays]:
    """Load a language model in Hugging Face's layout, with its layers stacked.

    The folder contains `model.safetensors`, or its shards and `model.safetensors.index.json`. The
    arrays are created where the shapes say, such as in pinned host memory, and filled layer by
    layer, so that loading needs little more memory than the arrays. Each process reads only the
    parts that are on its devices. Nothing in the files is executed. Checkpoints with
    `pytorch_model.bin` only are not supported.

    Floating-point tensors of 16, 32 and 64 bits are converted to the dtype of the shape, and may be
    rounded. Tensors of other dtypes must already have the dtype of the shape. Weights that are
    quantized in `effjax.models.decoder_shapes` are converted to the dtype of their scales, and
    quantized on the device while they are read, in parts of 32 MiB.

    Args:
        folder: The checkpoint.
        layers: Shapes [L, ...] of the parameters of the layers. The array
            ``"self_attn.q_proj.weight"`` is the stack of the tensors
            ``"model.layers.0.self_attn.q_proj.weight"``, ``"model.layers.1. ..."``. One of experts,
            ``"mlp.experts.gate_proj.weight"`` [L, E, ...], is that of the tensors
            ``"model.layers.0.mlp.experts.0.gate_proj.weight"`` and so on. The sharding of a shape
            says where the array is created; without one, on one device.
        others: Shapes of all other tensors by their names in the files.
        layers_prefix: What stands before the number of a layer.
        ignore: Ends of the names of tensors that may be in the files, and are not read. Files of
            models with tied embeddings may contain ``"lm_head.weight"``.
        progress: Called as ``progress(done, total)`` with numbers of bytes, those that this process
            reads from the files.

    Returns:
        The arrays of `layers` and those of `others`.

    Raises:
        ValueError: if files are missing, truncated or damaged, or tensors are missing, left over,
            of another shape, or of a dtype that is not converted; the message lists all of them. Or
            if a value is too large for the dtype of its shape.
        OSError: if a file cannot be read.
    """
    found = find_arrays(Path(folder), MODEL, layers, others, layers_prefix, ignore)
    return load_arrays(*found, progress)


def check_checkpoint(
    folder: str | os.PathLike[str],
    layers: Shapes,
    others: Shapes,
    *,
    layers_prefix: str = LAYERS_PREFIX,
    ignore: Collection[str] = IGNORED,
) -> None:
    """Raise the errors of `load_checkpoint` that the headers of the files show."""
    find_arrays(Path(folder), MODEL, layers, others, layers_prefix, ignore)


def differ(folder: Path, first: str, second: str) -> bool:
    """Return True if a checkpoint has both tensors and their values differ."""
    tensors, _, _ = find_tensors(folder, MODEL)
    if first not in tensors or second not in tensors:
        return False
    a, b = tensors[first], tensors[second]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.dtype not in DTYPES:
        return True
    for rows in row_ranges(a.shape, DTYPES[a.dtype].itemsize, CHUNK_BYTES):
        bounds = (rows, *whole(a.shape)[1:])
        # Compared as bytes, NaN equals itself.
        one, other = (read_tensor(tensor, bounds).view(np.uint8) for tensor in (a, b))
        if not np.array_equal(one, other):
            return True
    return False


def save_checkpoint(
    folder: str | os.PathLike[str],
    layers: Mapping[str, Any],
    others: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    layers_prefix: str = LAYERS_PREFIX,
    max_shard_bytes: int = 5_000_000_000,
    copied_files: Collection[Path] | Mapping[str, Path | bytes] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Save a language model in Hugging Face's layout, the inverse of `load_checkpoint`.

    Writes `config.json`, and `model.safetensors` or several shards and their index, which the
    transformers library loads. The host holds one layer of an array at a time. The folder appears
    when it is complete and on the disk. With several processes, all call this function, each writes
    the parts on its devices, and the folder must be on a file system that they share.

    Args:
        folder: The checkpoint, which must not exist or be empty, unless `overwrite`.
        layers: Arrays [L, ...], as in `load_checkpoint`.
        others: All other arrays.
        config: The content of `config.json`, such as that of the checkpoint that was loaded.
        layers_prefix: What stands before the number of a layer.
        max_shard_bytes: The size of a shard, unless a single tensor is larger.
        copied_files: Other files of the checkpoint, such as those of its tokenizer; or a mapping
            from their new names to the files, or to their content.
        overwrite: Whether to replace an older checkpoint, all at once. If the process is killed
            between the two renames, the next `load_checkpoint` completes them.
        progress: Called as ``progress(done, total)`` with numbers of bytes, those that this process
            writes.

    Raises:
        TypeError: if an array has a dtype that the format does not support.
        ValueError: if a number is not finite; the message has the tensor, and nothing is saved. Or
            if weights are quantized.
        OSError: if the folder exists, is not empty and must not be replaced, or if it cannot be
            written.
        RuntimeError: if another process has failed.
    """
    check_arrays(layers, others)
    if quantized := [name for name in layers if is_quantized(name)]:
        raise ValueError(
            f"`layers` must not be quantized, as {quantized[0]!r:.80} is. Save the adapter by "
            "`save_adapter`, or the weights of the checkpoint that was quantized."
        )
    check_instance("config", config, Mapping, "the content of a config.json, a dict")
    sources = make_sources(layers, others, layers_prefix)
    try:
        text = json.dumps(dict(config), indent=2) + "\n"
    except TypeError as error:
        raise TypeError(f"`config` must be the content of a config.json: {error!s:.200}.") from None
    files = {"config.json": text.encode()}
    files |= read_files(copied_files)
    save_arrays(Path(folder), MODEL, sources, files, max_shard_bytes, overwrite, progress)


def read_files(
    copied_files: Collection[Path] | Mapping[str, Path | bytes],
) -> dict[str, bytes]:
    """Return the content of `copied_files`, by name."""
    if not isinstance(copied_files, Mapping):
        copied_files = {path.name: path for path in copied_files}
    files = {}
    for name, content in copied_files.items():
        if not isinstance(content, bytes):
            check(Path(content).is_file(), f"`copied_files`: {content} must be a regular file.")
            content = Path(content).read_bytes()
        files[str(name)] = content
    return files


def check_arrays(layers: Any, others: Any) -> None:
    """Raise an error unless both are dicts of arrays, or shapes, and those of `layers` [L, ...]."""
    check_named_arrays("layers", layers)
    check_named_arrays("others", others)
    for name, a in layers.items():
        if len(a.shape) < 1 + (EXPERTS in name):
            form = "[L, E, ...]" if EXPERTS in name else "[L, ...]"
            raise ValueError(f"`layers[{name!r:.80}]` of shape {a.shape} must be {form}.")
        for part, other in ((CODES, SCALES), (SCALES, CODES)):
            if is_quantized(name, part):
                pair = layers.get(name.removesuffix(part) + other)
                is_codes = part != CODES or a.dtype in (jnp.uint8, jnp.int8)
                num_axes = 3 + (EXPERTS in name)
                if pair is None or len(a.shape) != num_axes or not is_codes:
                    raise ValueError(
                        f"`layers[{name!r:.80}]` must be a part of a quantized weight, as in "
                        "`effjax.models.decoder_shapes`."
                    )


def make_sources(
    layers: Mapping[str, Any], others: Mapping[str, Any], layers_prefix: str
) -> tuple[Sources, Sources]:
    """Return the sources of `layers` and of `others`."""

    def stack(leaf: str, a: Any) -> Source:
        part = next((end for end in (CODES, SCALES) if is_quantized(leaf, end)), "")
        name, names, axes = leaf.removesuffix(part), [], 1 + (EXPERTS in leaf)
        for i, *expert in np.ndindex(*a.shape[:axes]):
            of_expert = name.replace(EXPERTS, f"{EXPERTS}{expert[0]}.", 1) if expert else name
            names.append(f"{layers_prefix}.{i}.{of_expert}")
        return Source(a, names, axes, part)

    return (
        {leaf: stack(leaf, a) for leaf, a in layers.items()},
        {name: Source(a, [name], 0) for name, a in others.items()},
    )


def is_quantized(leaf: str, part: str = CODES) -> bool:
    """Return True for the name of this part of a quantized weight."""
    return leaf.endswith(f".weight{part}")


# Loading


class Problem(NamedTuple):
    """Something wrong with a tensor or a file."""

    kind: str
    name: str
    detail: str = ""


def load_arrays(
    layers: Sources, others: Sources, tensors: Mapping[str, Tensor], progress: Progress | None
) -> tuple[Arrays, Arrays]:
    """Load the arrays that `find_arrays` has found; see `load_checkpoint`."""
    total = sum(
        num_bytes(tensors[name], source.tensor_bounds(tensors[name], bounds))
        for source in [*layers.values(), *others.values()]
        if source.part != SCALES  # computed with the codes
        for shard in devices_by_shard(source.array)
        for name, bounds in source.parts(shard)
    )
    report = _make_report(total, progress)
    # Single tensors are the largest of all, so they come while there is little else.
    new_others = {name: _load_array(source, tensors, report) for name, source in others.items()}
    new_layers: Arrays = {}
    for leaf, source in layers.items():
        if source.part == CODES:
            other = leaf.removesuffix(CODES) + SCALES
            pair = _load_quantized(leaf, source, layers[other], tensors, report)
            new_layers[leaf], new_layers[other] = pair
        elif not source.part:
            new_layers[leaf] = _load_array(source, tensors, report)
    return {leaf: new_layers[leaf] for leaf in layers}, new_others


def find_arrays(
    folder: Path,
    file_name: str,
    layers: Shapes,
    others: Shapes,
    layers_prefix: str,
    ignore: Collection[str],
) -> tuple[Sources, Sources, dict[str, Tensor]]:
    """Return the sources of `layers` and `others`, and the tensors of the files if they match."""
    check_arrays(layers, others)
    with contextlib.suppress(OSError):  # a folder that must not be changed
        complete_replacement(folder)
    tensors, unread, problems = find_tensors(folder, file_name)
    # Before their names are listed: a billion layers in config.json would take all memory.
    wanted = len(others) + sum(
        math.prod(a.shape[: 1 + (EXPERTS in name)]) for name, a in layers.items()
    )
    if wanted > 10 * len(tensors) + 1000:
        raise ValueError(
            f"{folder} has {len(tensors)} tensors, and the model {wanted}. Check the number of "
            "layers and of experts in config.json."
        )
    sources = make_sources(layers, others, layers_prefix)
    problems += _compare(tensors, unread, [*sources[0].values(), *sources[1].values()], ignore)
    if problems:
        lines = "".join(f"\n- {line}" for line in _describe(problems, layers_prefix))
        raise ValueError(f"{folder} does not have the expected tensors:{lines}")
    return *sources, tensors


def find_tensors(folder: Path, file_name: str) -> tuple[dict[str, Tensor], set[str], list[Problem]]:
    """Return the tensors of a file, or of its shards.

    Returns:
        The tensors by name, the names of those in shards that cannot be read, and the problems.

    Raises:
        ValueError: The file and the index are missing, or the one that exists is damaged.
    """
    path, index = folder / file_name, folder / f"{file_name}.index.json"
    if path.exists():
        return read_header(path), set(), []
    if not index.exists():
        remedy = ""
        if any(folder.glob("pytorch_model*.bin")):
            remedy = (
                " pytorch_model.bin is not supported: save the model with transformers, by "
                "`model.save_pretrained(folder, safe_serialization=True)`."
            )
        raise ValueError(f"{folder} must contain {file_name} or {index.name}.{remedy}")
    files, unread_files = read_index(index), set()
    tensors: dict[str, Tensor] = {}
    problems = []
    for file in sorted(set(files.values())):
        try:
            shard = read_header(folder / file)
        except (ValueError, FileNotFoundError) as error:
            unread_files.add(file)
            is_there = isinstance(error, ValueError)
            problems.append(Problem("file", str(error)) if is_there else Problem("no file", file))
        else:
            problems += [Problem("in two files", name[:200]) for name in shard if name in tensors]
            tensors |= shard
    return tensors, {name for name, file in files.items() if file in unread_files}, problems


def _compare(
    tensors: Mapping[str, Tensor],
    unread: Collection[str],
    sources: Collection[Source],
    ignore: Collection[str],
) -> list[Problem]:
    """Return the differences between the tensors and the sources."""
    problems, used = [], set()
    for source in sources:
        wanted = jax.dtypes.canonicalize_dtype(source.array.dtype)
        for name in source.names:
            used.add(name)
            if name in unread:
                continue
            if name not in tensors:
                problems.append(Problem("missing", name))
                continue
            tensor = tensors[name]
            if not source.has_shape(tensor):
                of_part = f" {source.part[1:]} of" if source.part else ""
                detail = f"{tensor.shape}, not{of_part} {source.tensor_shape}"
                problems.append(Problem("of another shape", name, detail))
            if source.part:
                if source.part == CODES and tensor.dtype not in FLOATS:
                    detail = f"{tensor.dtype}, not floating-point"
                    problems.append(Problem("of another dtype", name, detail))
            elif not _is_converted(tensor.dtype, wanted):
                problems.append(Problem("of another dtype", name, f"{tensor.dtype}, not {wanted}"))
    ends = ignore if isinstance(ignore, str) else tuple(ignore)
    left_over = [name for name in tensors if name not in used and not name.endswith(ends)]
    return problems + [Problem("left over", name[:200]) for name in left_over]


def _is_converted(name: str, dtype: np.dtype) -> bool:
    """Return True if tensors of this name of a dtype may become arrays of `dtype`."""
    # A dtype that cannot be read is never equal: NumPy takes None for float64.
    return (name in DTYPES and DTYPES[name] == dtype) or {name, dtype_name(dtype)} <= FLOATS


def _describe(problems: Collection[Problem], layers_prefix: str) -> Iterator[str]:
    """Yield a line for each kind of problem, in which the same tensors of layers are one entry."""
    in_layer = re.compile(rf"{re.escape(layers_prefix)}\.([0-9]{{1,9}})\.(.+)", re.DOTALL)
    entries: dict[str, dict[tuple[str, str], list[int]]] = {}
    for kind, name, detail in problems:
        found = in_layer.fullmatch(name)
        form = f"{layers_prefix}.{{}}.{found[2]}" if found else name
        form = re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", form)
        numbers = entries.setdefault(kind, {}).setdefault((form, detail), [])
        numbers += [int(found[1])] if found else []
    for kind, forms in entries.items():
        listed = []
        for (form, detail), numbers in forms.items():
            name = form.replace("{}", _describe_numbers(numbers), 1) if numbers else form
            listed.append(f"{name} ({detail})" if detail else name)
        yield f"{kind}: {', '.join(listed)}"


def _describe_numbers(numbers: Collection[int]) -> str:
    """Return numbers like `0-3,5`."""
    ranges: list[list[int]] = []
    for n in sorted({*numbers}):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)
    return text if text.isdecimal() else f"{{{text}}}"


def _load_array(
    source: Source, tensors: Mapping[str, Tensor], report: Callable[[int], None]
) -> jax.Array:
    """Read the parts of an array that are on devices of this process."""

    def read(name: str, part: Bounds, out: np.ndarray) -> None:
        _read_converted(tensors[name], part, out, name)
        report(num_bytes(tensors[name], part))

    return _create(source, read)


def _create(source: Source, read: Callable[[str, Bounds, np.ndarray], object]) -> jax.Array:
    """Create an array, and fill its parts by ``read(name, part, out)``."""

    def read_parts(names: list[str], part: Bounds, out: np.ndarray) -> None:
        parts = out.reshape([len(names), *(last - first for first, last in part)])
        for i, name in enumerate(names):
            read(name, part, parts[i, ...])

    def rows_of(bounds: Bounds) -> Iterator[Rows]:
        for names, rows, part in source.ranges(bounds):
            yield *rows, functools.partial(read_parts, names, part)

    return create_array(source.array, rows_of, CHUNK_BYTES)


_quantize = jax.jit(quantize, static_argnums=1)


def _load_quantized(
    leaf: str,
    codes: Source,
    scales: Source,
    tensors: Mapping[str, Tensor],
    report: Callable[[int], None],
) -> tuple[jax.Array, jax.Array]:
    """Return the codes and scales of a stack of weights."""
    # The weights are read once. So the scales of all layers, one for each 64 numbers, wait on the
    # host until the codes are complete.
    _check_shards(leaf, codes, scales, tensors)
    form, dtype = "int8" if codes.array.dtype == jnp.int8 else "nf4", np.dtype(scales.array.dtype)
    kept: dict[tuple[str, Bounds], np.ndarray] = {}

    def quantize_rows(name: str, part: Bounds, out: np.ndarray) -> None:
        tensor = tensors[name]
        bounds = codes.tensor_bounds(tensor, part)
        (start, end), (left, right) = bounds
        kept[name, bounds] = found = np.empty((end - start, -(-(right - left) // BLOCK)), dtype)
        for first, last in row_ranges((end - start, right - left), dtype.itemsize, CHUNK_BYTES):
            rows = np.empty((last - first, right - left), dtype)
            _read_converted(tensor, ((start + first, start + last), (left, right)), rows, name)
            out[first:last], found[first:last] = _quantize(rows, form)
        report(num_bytes(tensor, bounds))

    def copy_scales(name: str, part: Bounds, out: np.ndarray) -> None:
        out[...] = kept.pop((name, scales.tensor_bounds(tensors[name], part)))

    return _create(codes, quantize_rows), _create(scales, copy_scales)


def _check_shards(leaf: str, codes: Source, scales: Source, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both arrays are split alike, and between blocks."""
    parts = [
        {
            (name, source.tensor_bounds(tensors[name], part))
            for shard in devices_by_shard(source.array)
            for name, part in source.parts(shard)
        }
        for source in (codes, scales)
    ]
    if parts[0] != parts[1]:
        raise ValueError(
            f"`layers[{leaf!r:.80}]` must be sharded as its scales are, so that no block of "
            f"{BLOCK} values is split."
        )


def _read_converted(tensor: Tensor, bounds: Bounds, out: np.ndarray, name: str) -> None:
    """Read a part of a tensor into an array, which may have another floating-point dtype."""
    if DTYPES[tensor.dtype] == out.dtype:
        read_tensor(tensor, bounds, out)
        return
    a = read_tensor(tensor, bounds)
    # Rounding is expected, but a weight that becomes infinite makes every result NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = a
    if jnp.finfo(out.dtype).max < jnp.finfo(a.dtype).max and np.any(np.isinf(out) & ~np.isinf(a)):
        raise ValueError(
            f"{name:.200} in {tensor.path} has values of {a.dtype} that are too large for "
            f"{out.dtype}."
        )


def _make_report(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Return a function that adds to the number of bytes done."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return report


# Saving


def save_arrays(
    folder: Path,
    file_name: str,
    sources: tuple[Sources, Sources],
    files: Mapping[str, bytes],
    max_shard_bytes: int,
    overwrite: bool,
    progress: Progress | None,
    metadata: Mapping[str, str] = {},
) -> None:
    """Save the arrays of both dicts of sources and some small files; see `save_checkpoint`."""
    folder = Path(os.path.abspath(folder))
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty.")
    layers, others = sources
    # The tensors of a layer are next to each other, as models read them.
    depth = max((source.array.shape[0] for source in layers.values()), default=0)
    by_layer = [(source, source.layer_names(i)) for i in range(depth) for source in layers.values()]
    shapes = {
        name: describe(name, source.array)._replace(shape=source.tensor_shape)
        for source, names in [*((source, source.names) for source in others.values()), *by_layer]
        for name in names
    }
    # The first process creates files of their final size, and each writes its shards into them: no
    # shard is sent to another process.
    partial, _ = _hidden_folders(folder)
    shards = _split(shapes, file_name, max_shard_bytes)
    headers = {name: make_header(partial / name, shard, metadata) for name, shard in shards.items()}
    tensors = {name: t for _, shard in headers.values() for name, t in shard.items()}
    if len(shards) > 1:
        total = sum(num_bytes(t) for t in tensors.values())
        places = {name: t.path.name for name, t in sorted(tensors.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        files = {**files, f"{file_name}.index.json": text.encode()}
    is_first = jax.process_index() == 0
    try:
        with _in_all_processes("create"):
            if is_first:
                complete_replacement(folder)
                for left in _hidden_folders(folder):  # by a process that was killed
                    remove_folder(left)
                partial.mkdir(parents=True)
                for name, (header, shard) in headers.items():
                    create_file(partial / name, header, shard)
                for name, content in files.items():
                    (partial / name).write_bytes(content)
        with _in_all_processes("write"):
            arrays = [*others.values(), *layers.values()]
            _write_all(arrays, tensors, progress)
        with _in_all_processes("rename"):
            if is_first:
                sync_files([*partial.iterdir(), partial])
                _replace_folder(folder)
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _hidden_folders(folder: Path) -> tuple[Path, Path]:
    """Return where a folder is written, and where an older one is kept while it is replaced."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")


def _replace_folder(folder: Path) -> None:
    """Give the complete partial folder its name, in place of an older one."""
    partial, old = _hidden_folders(folder)
    if folder.exists():
        folder.replace(old)
    if partial.exists():  # a reader may have called `complete_replacement`
        partial.replace(folder)
    sync_files([folder.parent])
    remove_folder(old)


def complete_replacement(folder: Path) -> None:
    """Complete the replacement of a folder in which a process was killed, if there is one."""
    # The older folder is renamed when the new one is complete, so for a moment none has the name.
    partial, old = _hidden_folders(folder)
    if old.exists() and not folder.exists():
        (partial if partial.exists() else old).replace(folder)


def _split(
    shapes: Mapping[str, Description], file_name: str, max_bytes: int
) -> dict[str, dict[str, Description]]:
    """Distribute tensors over files, in order; return their descriptions by file."""
    shards: list[dict[str, Description]] = [{}]
    size = 0
    for name, description in shapes.items():
        tensor_bytes = math.prod(description.shape) * DTYPES[description.dtype].itemsize
        if shards[-1] and size + tensor_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = description
        size += tensor_bytes
    if len(shards) == 1:
        return {file_name: shards[0]}
    # As transformers names them.
    stem, suffix = os.path.splitext(file_name)
    return {
        f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}": shard for i, shard in enumerate(shards, 1)
    }


def _write_all(
    sources: Collection[Source],
    tensors: Mapping[str, Tensor],
    progress: Progress | None,
) -> None:
    """Write the parts of all arrays that are on devices of this process, each by one of them."""
    shards = [(source, bounds, a) for source in sources for bounds, a in own_shards(source.array)]
    total = sum(
        num_bytes(tensors[name], part)
        for source, bounds, _ in shards
        for name, part in source.parts(bounds)
    )
    report = _make_report(total, progress)
    for source, bounds, a in shards:
        for names, rows, part in source.ranges(bounds):
            arrays = read_rows(a, *rows, CHUNK_BYTES)
            arrays = arrays.reshape([len(names), *(last - first for first, last in part)])
            for i, name in enumerate(names):
                array = arrays[i, ...]
                check_finite(name, array)
                write_tensor(tensors[name], array, part)
                report(array.nbytes)


@contextlib.contextmanager
def _in_all_processes(step: str) -> Iterator[None]:
    """Run a step of saving. All processes end it together, and raise an error if one does."""
    # Without this exchange, the others would wait forever for the one that has failed.
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed: list[int] = []
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        flags = np.asarray(process_allgather(np.int32(error is not None)))
        failed = np.flatnonzero(flags).tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"Process {failed[0]} failed to {step} the files.")
