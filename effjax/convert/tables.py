"""The names of PyTorch's modules beside those of effjax's."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np


class Table(NamedTuple):
    """How a network's modules are called in PyTorch, and how here.

    A row holds for a module and all that is in it, and the first that fits counts: what is below
    it, and a module without a row, has the same name in both. Letters in braces are numbers, and
    `{i+2}` is two more than `{i}`. Modules here are named as in nnx, `blocks.0.layers.1`; linen's
    `blocks_0/layers_1` is the same.

    Attributes:
        rows: PyTorch's name to effjax's.
        older: (regular expression, replacement): names that older versions wrote, made new.
        below: where PyTorch's arrays of a convolution lie that has an `offset_conv` here: in a
            module of this name in the layer, or with "" in the layer itself.
        counters: whether running statistics have a `num_batches_tracked` with them.
    """

    rows: Mapping[str, str] = {}
    older: tuple[tuple[str, str], ...] = ()
    below: str = ""
    counters: bool = True


SAME_NAMES = Table()

# How arrays are called here and there. Kernels have their two axes of features last here and
# first there, the other way around.
ARRAYS = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias",
    "mean": "running_mean", "var": "running_var", "num_batches": "num_batches_tracked",
}  # fmt: skip
COUNTER = "num_batches_tracked"
OFFSETS = ".offset_conv.kernel"  # of a deformable convolution that predicts them

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
    older=((r"(conv\d+)_offset\.", r"\1.conv_offset."), (r"conv_offset_mask\.", "conv_offset.")),
)

# Of maskrcnn-benchmark: what lies below `backbone.body`.
BENCHMARK_RESNET = Table(
    {
        "stem.conv1": "stem_conv",
        "stem.bn1": "stem_norm",
        "layer{i+1}.{j}.conv{k}.offset": "stages.{i}.{j}.conv{k}.offset_conv",
        "layer{i+1}.{j}.bn{k}": "stages.{i}.{j}.norm{k}",
        "layer{i+1}.{j}.downsample.0": "stages.{i}.{j}.shortcut",
        "layer{i+1}.{j}.downsample.1": "stages.{i}.{j}.shortcut_norm",
        "layer{i+1}": "stages.{i}",
    },
    below="conv",
    counters=False,
)

# Feature pyramids: of mmdetection (below `neck`), of maskrcnn-benchmark and torchvision (below
# `backbone.fpn`). Those of RetinaNet have three levels, from C3 on, and P6 and P7 by convolutions.
PYRAMID = Table({"lateral_convs.{i}.conv": "laterals.{i}", "fpn_convs.{i}.conv": "outputs.{i}"})
BENCHMARK_PYRAMID = Table({"fpn_inner{i+1}": "laterals.{i}", "fpn_layer{i+1}": "outputs.{i}"})
BENCHMARK_RETINANET = Table(
    {
        "top_blocks.p6": "outputs.3",
        "top_blocks.p7": "outputs.4",
        "fpn_inner{i+2}": "laterals.{i}",
        "fpn_layer{i+2}": "outputs.{i}",
    }
)
_BEFORE_0_14 = ((r"((?:inner|layer)_blocks\.\d+)\.(weight|bias)", r"\1.0.\2"),)
TORCHVISION_PYRAMID = Table(
    {"inner_blocks.{i}.0": "laterals.{i}", "layer_blocks.{i}.0": "outputs.{i}"}, _BEFORE_0_14
)
TORCHVISION_RETINANET = Table(
    {
        "extra_blocks.p6": "outputs.3",
        "extra_blocks.p7": "outputs.4",
        "inner_blocks.{i}.0": "laterals.{i}",
        "layer_blocks.{i}.0": "outputs.{i}",
    },
    _BEFORE_0_14,
)

DEFORM_CONV = Table(
    {"conv_offset": "offset_conv", "offset": "conv.offset_conv"},
    older=((r"conv_offset_mask\.", "conv_offset."), (r"(conv\d+)_offset\.", r"\1.conv_offset.")),
)

# Of mmcv and maskrcnn-benchmark: ReLUs are counted too.
DEFORM_ROI_POOL = Table(
    {
        "offset_fc.0": "offset_fc1", "offset_fc.2": "offset_fc2", "offset_fc.4": "offset_fc3",
        "mask_fc.0": "mask_fc1", "mask_fc.2": "mask_fc2",
    }
)  # fmt: skip

DCNV3 = Table({"dw_conv.0": "dw_conv", "dw_conv.1.1": "dw_norm"})


def joined(parts: Mapping[str, tuple[str, Table]]) -> Table:
    """The table of a network of several parts, each with a table of its own.

    Args:
        parts: by the name of the module here, its name in PyTorch and its table:
            `{"body": ("backbone.body", BENCHMARK_RESNET), "fpn": ("backbone.fpn", …)}`.

    Returns:
        A `Table`, with the `below` of those that have one, and counters if all have them.

    Raises:
        TypeError: for what is no such mapping.
    """
    rows: dict[str, str] = {}
    tables: list[Table] = []
    for ours, given in parts.items() if isinstance(parts, Mapping) else [("", parts)]:
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Table)):
            raise TypeError(
                "`parts` must map names of modules to (PyTorch's name, Table), not be or have "
                f"{given!r:.80}."
            )
        theirs, table = given
        rows |= {f"{theirs}.{a}": f"{ours}.{b}" for a, b in table.rows.items()} | {theirs: ours}
        tables.append(table)
    older = dict.fromkeys(rule for table in tables for rule in table.older)
    below = next((table.below for table in tables if table.below), "")
    return Table(rows, tuple(older), below, all(table.counters for table in tables))


def nnx_path(path: str) -> str:
    """Where linen's `blocks_0.layers_1.conv1.kernel` is in nnx."""
    return re.sub(r"(_\d+)+(?=\.)", lambda numbers: numbers[0].replace("_", "."), path)


def torch_names(paths: Iterable[str], table: Table) -> dict[str, str]:
    """PyTorch's names of the arrays at these paths of one network, in nnx or in linen."""
    of_nnx = {path: nnx_path(path) for path in paths}
    moved = {
        path.removesuffix(OFFSETS) for path in of_nnx.values() if path.endswith(OFFSETS)
    }  # fmt: skip
    found = {}
    for path, name in of_nnx.items():
        below = table.below if name.rpartition(".")[0] in moved else ""
        found[path] = _torch_name(name, table, below and f".{below}")
    return found


def _torch_name(path: str, table: Table, inside: str) -> str:
    module, dot, array = path.rpartition(".")
    for name, pattern in table.rows.items():
        pattern = re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(pattern))
        if found := re.fullmatch(rf"{pattern}(?P<below>\..+)?", module):
            module = _numbered(name, found) + (found["below"] or "")
            break
    return f"{module}{inside}{dot}{ARRAYS.get(array, array)}"


def _numbered(name: str, found: re.Match) -> str:
    """Fills in the numbers of a name."""
    return re.sub(
        r"{(\w)(\+\d)?}", lambda number: str(int(found[number[1]]) + int(number[2] or 0)), name
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
