"""Reading and writing of weight files: `.safetensors`, and reading of PyTorch's own."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .._files import check_distinct
from .safetensors_file import read_header, read_index, read_tensor, write_file
from .torch_file import read_torch

# Keys under which training scripts save the weights of a checkpoint.
NESTED = ("state_dict", "model", "module")
TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
SHOWN = 5  # names in a message
INDEX_SUFFIX = ".safetensors.index.json"
# Dtypes of .safetensors with the values of NumPy's real dtypes or bfloat16. Smaller ones, such as
# F8_E4M3, need scales, which are arrays of their own.
REAL = frozenset(
    {"BOOL", "BF16", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"}
)


def load_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Load the named arrays of a weight file, such as a `state_dict`.

    A `.safetensors.index.json` loads all of its shards. Files of `torch.save` (`.pth`, `.pt`,
    `.bin`, `.ckpt`, `.tar`), in both of its formats, are read without PyTorch by an unpickler that
    creates tensors only. It refuses a pickle that names anything else and runs no code of the file.
    Of a larger checkpoint, the entry `state_dict`, `model` or `module` is loaded.

    Args:
        path: of the file; its suffix determines the format.

    Returns:
        NumPy arrays by name, bfloat16 as that of ml_dtypes.

    Raises:
        ValueError: if the suffix is unknown, or the file is damaged, refused, without named arrays,
            or contains two arrays of the same name, expanded tensors, or tensors of float8 or
            float4.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: must be a regular file; copy it into one.")
    if suffix in TORCH_SUFFIXES:
        return _state_dict(path, read_torch(path))
    if suffix == ".safetensors" or path.name.endswith(INDEX_SUFFIX):
        return _read_safetensors(path)
    raise ValueError(f"{path}: `path` must end in .safetensors or {', '.join(TORCH_SUFFIXES)}.")


def save_weights(path: str | os.PathLike[str], weights: Mapping[str, Any]) -> None:
    """Save named arrays as `.safetensors`.

    The file is replaced atomically.

    Args:
        path: of the file, which ends in `.safetensors`.
        weights: arrays by name.

    Raises:
        TypeError, ValueError: if the suffix is another one, or a value is not an array that the
            format supports.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    arrays = {name: np.asarray(a, order="C") for name, a in as_named_arrays(weights).items()}
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"{path}: `path` must end in .safetensors.")
    with replacing(path) as partial:
        write_file(partial, arrays)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if no error occurs."""
    # Beside the file, because a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        yield partial
        os.replace(partial, path)


def as_named_arrays(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return named arrays or PyTorch tensors as NumPy arrays of real numbers."""
    check_named("weights", weights)
    arrays = {}
    for name, value in weights.items():
        try:
            arrays[name] = np.asarray(value)
        except (TypeError, RuntimeError) as error:  # tensors on a GPU, with gradients, of bfloat16
            raise TypeError(
                f"`weights[{name!r}]`: this {type(value).__name__} cannot become a NumPy array "
                f"({error!s:.120}); pass tensor.detach().cpu(), bfloat16 as .float()."
            ) from None
        check_real(name, arrays[name], integers=True)
    return arrays


def check_named(argument: str, weights: Any) -> None:
    """Raise TypeError unless `weights` maps names."""
    if not isinstance(weights, Mapping):
        hint = ""
        if isinstance(weights, (str, os.PathLike)):
            hint = " Read the file with effjax.convert.load_weights."
        elif hasattr(weights, "state_dict"):
            hint = " Pass its .state_dict()."
        raise TypeError(
            f"`{argument}` must be arrays by name, not a {type(weights).__name__}.{hint}"
        )


def check_real(name: str, array: np.ndarray, integers: bool = False) -> None:
    """Raise TypeError unless the array is floating point, or integer if `integers` is true."""
    if array.dtype.kind not in ("fiub" if integers else "f") and array.dtype.name != "bfloat16":
        kind = "of real numbers" if integers else "floating point"
        raise TypeError(f"`weights[{name!r}]` must be {kind}, but its dtype is {array.dtype}.")


def list_names(names: Any) -> str:
    """Return the first names, and the number of further ones."""
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"{name:.120}" for name in names[:SHOWN]) + more


def _state_dict(path: Path, value: Any) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint."""
    for name in NESTED:
        if isinstance(value, dict) and isinstance(value.get(name), dict):
            value = value[name]
            break
    if not isinstance(value, dict) or not value or any(type(name) is not str for name in value):
        raise ValueError(f"{path}: must contain named tensors; save model.state_dict().")
    others = [name for name, array in value.items() if not isinstance(array, np.ndarray)]
    if others:
        raise ValueError(
            f"{path}: must contain tensors only, not {list_names(others)}; save "
            f"model.state_dict() alone, or under the name {NESTED[0]!r}."
        )
    return as_named_arrays(value)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    paths = [path]
    if path.name.endswith(INDEX_SUFFIX):
        paths = [path.with_name(name) for name in sorted(set(read_index(path).values()))]
    tensors = [item for shard in paths for item in read_header(shard).items()]
    for name, tensor in tensors:
        if tensor.dtype not in REAL:
            raise ValueError(
                f"{tensor.path}: {name:.120} must have a real dtype of NumPy or bfloat16, not "
                f"{tensor.dtype}. Save the weights as F32 or BF16, with their scales applied."
            )
    try:
        check_distinct(name for name, _ in tensors)  # those of a file are
    except ValueError as error:
        raise ValueError(f"{path}: the shards have {error}") from None
    return {name: read_tensor(tensor) for name, tensor in tensors}
