"""Files of named arrays: `.safetensors`, `.npz`, and PyTorch's own."""

import io
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .torch_file import read_torch

# Where training scripts put the weights among the rest of a checkpoint.
NESTED = ("state_dict", "model", "module")
OF_TORCH = (".pth", ".pt", ".bin", ".ckpt", ".tar")
SHOWN = 5  # names in a message


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The named arrays of a file, such as a `state_dict`.

    `.safetensors` needs that package. What `torch.save` wrote (`.pth`, `.pt`, `.bin`, `.ckpt`,
    `.tar`), in either of its formats, is read without PyTorch, and by an unpickler that makes
    tensors only: a pickle that asks for anything else is refused, and nothing of it runs. Of a
    checkpoint that holds more, the part named `state_dict`, `model` or `module` is taken. An `.npz`
    may be compressed, and then a small file can fill the memory: its sender is trusted in that.

    Args:
        path: of the file; its ending says what it is.

    Returns:
        NumPy arrays by name, bfloat16 as that of ml_dtypes.

    Raises:
        TypeError: if `path` is no path.
        ValueError: for another ending, and for a file that is damaged, refused, holds no named
            arrays, or tensors of `expand`.
        OSError: if it cannot be read.
        ModuleNotFoundError: if safetensors is missing.
    """
    path = as_path(path)
    ending = ending_of(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: is no regular file, and may never end; copy it into one.")
    if ending in OF_TORCH:
        return _state_dict(path, read_torch(path))
    if ending == ".safetensors":
        return _read_safetensors(path)
    if ending == ".npz":
        return _read_npz(path)
    raise ValueError(
        f"{path}: `path` must end in .safetensors, .npz or {', '.join(OF_TORCH)}, which say what "
        "the file is."
    )


def write(path: str | os.PathLike[str], weights: Mapping[str, Any]) -> None:
    """Writes named arrays as `.safetensors`, or as `.npz`, which has no bfloat16.

    The file is put in place when it is whole.

    Args:
        path: of the file; its ending says what it shall be.
        weights: arrays by name.

    Raises:
        TypeError, ValueError: for another ending, and for what is no array or does not fit.
        OSError: if it cannot be written.
        ModuleNotFoundError: if safetensors is missing.
    """
    path = as_path(path)
    arrays = {name: np.asarray(a, order="C") for name, a in as_arrays(weights).items()}
    if ending_of(path) == ".safetensors":
        from safetensors.numpy import save

        with replacing(path) as partial:
            partial.write_bytes(save(arrays))
    elif ending_of(path) == ".npz":
        if coarse := [name for name, array in arrays.items() if array.dtype.kind == "V"]:
            raise ValueError(f"{path}: .npz cannot hold {arrays[coarse[0]].dtype} ({coarse[0]}).")
        with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    else:
        raise ValueError(f"{path}: `path` must end in .safetensors or .npz.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` for what then takes its place, unless an error comes first."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        yield partial
        os.replace(partial, path)


def as_path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise TypeError(f"`path` must be a path, not a {type(path).__name__}.") from None


def ending_of(path: Path) -> str:
    return path.suffix.lower()


def as_arrays(weights: Any) -> dict[str, np.ndarray]:
    """Named arrays, PyTorch's tensors among them, as NumPy's; complex numbers are none."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"`weights` must map names to arrays, not be a {type(weights).__name__}.")
    return {_as_name(name): _as_array(name, value) for name, value in weights.items()}


def _as_name(name: Any) -> str:
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(f"`weights` must have strings for names, not one of type {kind}.")
    return name


def _as_array(name: str, value: Any) -> np.ndarray:
    kind = type(value).__name__
    if not hasattr(value, "__array__"):
        raise TypeError(f"`weights[{name!r}]` must be an array, not of type {kind}.")
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError) as error:  # tensors on a GPU, with gradients, of bfloat16
        raise TypeError(
            f"`weights[{name!r}]`: this {kind} cannot become a NumPy array ({error!s:.120}); pass "
            "tensor.detach().cpu(), bfloat16 as .float()."
        ) from None
    check_real(name, array, integers=True)
    return array


def check_real(name: str, array: np.ndarray, integers: bool = False) -> None:
    """Counters are integers, and what a file holds may be; weights are not."""
    if array.dtype.kind not in ("fiub" if integers else "f") and array.dtype.name != "bfloat16":
        kind = "of real numbers" if integers else "floating point"
        raise TypeError(f"`weights[{name!r}]` must be {kind}, but its dtype is {array.dtype}.")


def shown(names: Any) -> str:
    """The first of some names, and how many there are more."""
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"{name:.120}" for name in names[:SHOWN]) + more


def _state_dict(path: Path, value: Any) -> dict[str, np.ndarray]:
    """The weights in a checkpoint."""
    for name in NESTED:
        if isinstance(value, dict) and isinstance(value.get(name), dict):
            value = value[name]
            break
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{path}: holds no named tensors; save model.state_dict().")
    if not all(type(name) is str for name in value):
        raise ValueError(f"{path}: has names that are no strings; save model.state_dict().")
    others = [name for name, array in value.items() if not isinstance(array, np.ndarray)]
    if others:
        raise ValueError(
            f"{path}: holds what is no tensor: {shown(others)}; save model.state_dict() alone, or "
            f"under the name {NESTED[0]!r}."
        )
    return as_arrays(value)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        with path.open("rb"):  # its own errors do not say which file
            return as_arrays(load_file(path))
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole .safetensors file ({error!s:.200})") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    data = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(data) as archive:
            members = {name: _member(archive, name) for name in archive.namelist()}
        return as_arrays({name.removesuffix(".npy"): a for name, a in members.items()})
    except MemoryError:
        raise
    except Exception as error:  # of zipfile, of what decompresses, and of NumPy
        raise ValueError(f"{path}: not a whole .npz file of numbers ({error!s:.200})") from error


def _member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise ValueError(f"{name:.120} goes on after its array")
        return array
