"""Tables of PyTorch's module names and the corresponding names of effjax."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Table(NamedTuple):
    """Names of a network's modules in PyTorch and in effjax.

    A row applies to a module and everything in it; the first matching row counts. Names below the
    module, and modules without a row, are the same in both. Letters in braces are numbers, and
    `{i+2}` is `{i}` plus two, `{i-2}` minus two. Modules of effjax are named as in nnx,
    `blocks.0.layers.1`, which also stands for linen's `blocks_0/layers_1`.

    Attributes:
        rows: maps PyTorch's names to effjax's.
        older: pairs (regular expression, replacement) that update names of older versions.
        below: the submodule in which PyTorch keeps the arrays of a convolution that predicts its
            offsets; "" for the layer itself.
        counters: True if running statistics come with a `num_batches_tracked`.
        epsilon: of the source's batch norms, which no weight file contains. `from_torch` warns if
            an nnx network has another. If None, any.
    """

    rows: Mapping[str, str] = {}
    older: tuple[tuple[str, str], ...] = ()
    below: str = ""
    counters: bool = True
    epsilon: float | None = None


SAME_NAMES = Table()

# Array names of Flax and PyTorch. Kernels have the axes [..., in, out] in Flax and [out, in, ...]
# in PyTorch.
ARRAYS = {
    "kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias",
    "mean": "running_mean", "var": "running_var", "num_batches": "num_batches_tracked",
}  # fmt: skip
COUNTER = "num_batches_tracked"
OFFSETS = "offset_conv.kernel"  # of a deformable convolution that predicts them

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
    epsilon=1e-5,
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
    epsilon=1e-5,
)

# maskrcnn-benchmark, prefix `backbone.body`.
MASKRCNN_RESNET = Table(
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
    epsilon=0.0,
)

# Feature pyramids of mmdetection (prefix `neck`), maskrcnn-benchmark and torchvision (prefix
# `backbone.fpn`). RetinaNet's have three levels, from C3, and P6 and P7 by convolutions.
PYRAMID = Table({"lateral_convs.{i}.conv": "laterals.{i}", "fpn_convs.{i}.conv": "outputs.{i}"})
MASKRCNN_PYRAMID = Table({"fpn_inner{i+1}": "laterals.{i}", "fpn_layer{i+1}": "outputs.{i}"})
MASKRCNN_RETINANET = Table(
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

# RT-DETR as transformers names it in files, prefix `model`. Shortcuts begin with a pool, except in
# the first stage.
_RT_DETR_RESNET = {
    "embedder.embedder.{i}.convolution": "stem_conv.{i}",
    "embedder.embedder.{i}.normalization": "stem_norm.{i}",
    "encoder.stages.{i}.layers.{j}.layer.{k-1}.convolution": "stages.{i}.{j}.conv{k}",
    "encoder.stages.{i}.layers.{j}.layer.{k-1}.normalization": "stages.{i}.{j}.norm{k}",
    "encoder.stages.0.layers.{j}.shortcut.convolution": "stages.0.{j}.shortcut",
    "encoder.stages.0.layers.{j}.shortcut.normalization": "stages.0.{j}.shortcut_norm",
    "encoder.stages.{i}.layers.{j}.shortcut.1.convolution": "stages.{i}.{j}.shortcut",
    "encoder.stages.{i}.layers.{j}.shortcut.1.normalization": "stages.{i}.{j}.shortcut_norm",
}
RT_DETR = Table(
    {f"backbone.model.{theirs}": f"backbone.{ours}" for theirs, ours in _RT_DETR_RESNET.items()}
    | {
        "encoder_input_proj.{i}.0": "encoder_input_proj.{i}.conv",
        "encoder_input_proj.{i}.1": "encoder_input_proj.{i}.norm",
        "decoder_input_proj.{i}.0": "decoder_input_proj.{i}.conv",
        "decoder_input_proj.{i}.1": "decoder_input_proj.{i}.norm",
        "encoder.encoder.{i}.layers.{j}": "encoder.encoder.{i}.{j}",
        "enc_output.0": "enc_output",
        "enc_output.1": "enc_output_norm",
    },
    # The names of transformers 5 in memory.
    older=(
        (r"encoder\.aifi\.", "encoder.encoder."),
        (r"\.o_proj\.", ".out_proj."),
        (r"\.mlp\.(fc\d)", r".\1"),
    ),
)

DEFORM_CONV = Table(
    {"conv_offset": "offset_conv"},
    older=((r"conv_offset_mask\.", "conv_offset."), (r"(conv\d+)_offset\.", r"\1.conv_offset.")),
)

# mmcv and maskrcnn-benchmark; their numbers include the ReLUs.
DEFORM_ROI_POOL = Table(
    {
        "offset_fc.0": "offset_fc1", "offset_fc.2": "offset_fc2", "offset_fc.4": "offset_fc3",
        "mask_fc.0": "mask_fc1", "mask_fc.2": "mask_fc2",
    }
)  # fmt: skip

DCNV3 = Table({"dw_conv.0": "dw_conv", "dw_conv.1.1": "dw_norm"})


def join_tables(parts: Mapping[str, tuple[str, Table]]) -> Table:
    """Return the table of a network whose modules have different tables.

    Args:
        parts: maps the name of a module to its name in PyTorch and its table:
            `{"body": ("backbone.body", MASKRCNN_RESNET), "fpn": ("backbone.fpn", …)}`.

    Returns:
        A `Table`. `below` is the first non-empty one; `counters` is True if all are; `epsilon` is
        that of the tables, and None if they have several.
    """
    rows: dict[str, str] = {}
    tables = [table for _, table in parts.values()]
    for ours, (theirs, table) in parts.items():
        rows |= {f"{theirs}.{a}": f"{ours}.{b}" for a, b in table.rows.items()} | {theirs: ours}
    older = dict.fromkeys(rule for table in tables for rule in table.older)
    below = next((table.below for table in tables if table.below), "")
    counters = all(table.counters for table in tables)
    epsilons = {table.epsilon for table in tables} - {None}
    epsilon = epsilons.pop() if len(epsilons) == 1 else None
    return Table(rows, tuple(older), below, counters, epsilon)


def nnx_path(path: str) -> str:
    """Return the nnx path of linen's `blocks_0.layers_1.conv1.kernel`."""
    return re.sub(r"(_\d+)+(?=\.)", lambda numbers: numbers[0].replace("_", "."), path)


def check_table(table: Any) -> None:
    """Raise an error for a table that cannot be applied."""
    if not isinstance(table, Table) or not isinstance(table.rows, Mapping):
        raise TypeError(
            f"`table` must be a Table, such as Table({{'fc': 'classifier'}}), not {table!r:.80}."
        )
    names = [*table.rows, *table.rows.values(), table.below]
    if others := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"`table` must have strings as names, not {others[0]!r:.80}.")
    for theirs, ours in table.rows.items():
        if not set(re.findall(r"{(\w)", theirs)) <= set(re.findall(r"{(\w)", ours)):
            raise ValueError(
                f"`table` maps {theirs!r} to {ours!r}, which must have its letters in braces too."
            )


def torch_names(paths: Iterable[str], table: Table) -> dict[str, str]:
    """Return PyTorch's name of each array path of one network, in nnx or linen."""
    of_nnx = {path: nnx_path(path) for path in paths}
    # The deformable convolutions; "" is a layer that is no part of a network.
    moved = {
        path.removesuffix(OFFSETS).removesuffix(".")
        for path in of_nnx.values()
        if f".{path}".endswith(f".{OFFSETS}")
    }
    found = {}
    for path, name in of_nnx.items():
        below = table.below if name.rpartition(".")[0] in moved else ""
        found[path] = _torch_name(name, table, below)
    return found


def _torch_name(path: str, table: Table, below: str) -> str:
    module, _, array = path.rpartition(".")
    for name, pattern in table.rows.items():
        pattern = re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(pattern))
        if found := re.fullmatch(rf"{pattern}(?P<below>\..+)?", module):
            module = _numbered(name, found) + (found["below"] or "")
            break
    return ".".join(filter(None, (module, below, ARRAYS.get(array, array))))


def _numbered(name: str, found: re.Match) -> str:
    """Fill in the numbers of a name."""
    return re.sub(
        r"{(\w)([+-]\d)?}", lambda number: str(int(found[number[1]]) + int(number[2] or 0)), name
    )


def update_name(name: str, table: Table) -> str:
    """Return the current form of a name of PyTorch."""
    for pattern, replacement in table.older:
        name = re.sub(pattern, replacement, name)
    return name


def from_torch_layout(path: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of PyTorch in the layout of Flax."""
    kind = path.rpartition(".")[2]
    if kind == "kernel" and array.ndim > 1:
        return array.transpose(*range(2, array.ndim), 1, 0)
    if kind == "num_batches" and not array.ndim:  # effjax counts per channel, PyTorch per layer
        return np.broadcast_to(array, shape)
    return array


def to_torch_layout(path: str, array: np.ndarray) -> np.ndarray:
    """Return an array of Flax in the layout of PyTorch."""
    kind = path.rpartition(".")[2]
    if kind == "kernel" and array.ndim > 1:
        return array.transpose(-1, -2, *range(array.ndim - 2))
    if kind == "num_batches":
        return np.asarray(array.max(initial=0), np.int64)
    return array
