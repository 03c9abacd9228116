"""The names of PyTorch's modules beside those of effjax's."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Table(NamedTuple):
    """How a network's modules are called in PyTorch, and how here.

    A row holds for a module and all that is in it, and the first that fits counts: what is below
    it, and a module without a row, has the same name in both. Letters in braces are numbers, and
    `{i+1}` is one more than `{i}`. Modules here are named as in nnx, `blocks.0.layers.1`; linen's
    `blocks_0/layers_1` is the same.

    Attributes:
        rows: PyTorch's name to effjax's.
        older: (regular expression, replacement): names that older versions wrote, made new.
    """

    rows: Mapping[str, str] = {}
    older: tuple[tuple[str, str], ...] = ()


SAME_NAMES = Table()

# How arrays are called here and there. Kernels have their two axes of features last here and
# first there, the other way around.
ARRAYS = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias",
    "mean": "running_mean", "var": "running_var", "num_batches": "num_batches_tracked",
}  # fmt: skip
COUNTER = "num_batches_tracked"

DENSENET = Table(
    {
        "features.conv0": "stem_conv",
        "features.norm0": "stem_norm",
        "features.denseblock{i+1}.denselayer{j+1}": "blocks.{i}.layers.{j}",
        "features.transition{i+1}": "transitions.{i}",
        "features.norm5": "final_norm",
    },
    older=(
        (r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2."),
        (r"features\.norm_final\.", "features.norm5."),
    ),
)

RESNET = Table(
    {
        "conv1": "stem_conv",
        "bn1": "stem_norm",
        "layer{i+1}.{j}.conv{k}.conv_offset": "stages.{i}.{j}.conv{k}.offset_conv",
        "layer{i+1}.{j}.bn{k}": "stages.{i}.{j}.norm{k}",
        "layer{i+1}.{j}.downsample.0": "stages.{i}.{j}.shortcut",
        "layer{i+1}.{j}.downsample.1": "stages.{i}.{j}.shortcut_norm",
        "layer{i+1}": "stages.{i}",
        "fc": "classifier",
    },
    older=((r"(conv\d+)_offset\.", r"\1.conv_offset."),),
)

DEFORM_CONV = Table(
    {"conv_offset": "offset_conv", "offset": "conv.offset_conv"},
    older=((r"conv_offset_mask\.", "conv_offset."), (r"(conv\d+)_offset\.", r"\1.conv_offset.")),
)

DCNV3 = Table({"dw_conv.0": "dw_conv", "dw_conv.1.1": "dw_norm"})


def nnx_path(path: str) -> str:
    """Where linen's `blocks_0.layers_1.conv1.kernel` is in nnx."""
    return re.sub(r"(_\d+)+(?=\.)", lambda numbers: numbers[0].replace("_", "."), path)


def torch_name(path: str, table: Table) -> str:
    """PyTorch's name of the array at `path`, in nnx or in linen."""
    module, dot, array = nnx_path(path).rpartition(".")
    for name, pattern in table.rows.items():
        pattern = re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(pattern))
        if found := re.fullmatch(rf"{pattern}(?P<below>\..+)?", module):
            module = _numbered(name, found) + (found["below"] or "")
            break
    return f"{module}{dot}{ARRAYS.get(array, array)}"


def _numbered(name: str, found: re.Match) -> str:
    """Fills in the numbers of a name."""
    return re.sub(
        r"{(\w)(\+1)?}", lambda number: str(int(found[number[1]]) + bool(number[2])), name
    )


def renewed(name: str, table: Table) -> str:
    """A name of PyTorch's, as new versions write it."""
    for pattern, replacement in table.older:
        name = re.sub(pattern, replacement, name)
    return name


def from_torch_layout(path: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array of PyTorch's as it is here, where it has this shape if it fits."""
    kind = path.rpartition(".")[2]
    if kind == "kernel" and array.ndim > 1:
        return array.transpose(*range(2, array.ndim), 1, 0)
    if kind == "num_batches" and not array.ndim:  # one number a channel here, one in all there
        return np.broadcast_to(array, shape)
    return array


def to_torch_layout(path: str, array: np.ndarray) -> np.ndarray:
    """The same, back."""
    kind = path.rpartition(".")[2]
    if kind == "kernel" and array.ndim > 1:
        return array.transpose(-1, -2, *range(array.ndim - 2))
    if kind == "num_batches":
        return np.asarray(array.max(initial=0), np.int64)
    return array
