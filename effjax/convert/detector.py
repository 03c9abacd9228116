"""Weights of RT-DETR in Hugging Face's layout."""

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from .._files import read_json_object, replace_file
from ..models.resnet import FrozenBatchNorm
from ..models.rt_detr import RTDetr, init_class_heads
from ..models.rt_detr_config import RTDetrConfig
from ..ops._common.arguments import as_integer, check_instance
from .checkpoint import MODEL
from .files import load_weights, save_weights
from .safetensors_file import check_finite
from .tables import COUNTER, RT_DETR
from .weights import from_torch, to_torch

PREFIX = "model"
POINTS_SCALE = "encoder_attn.n_points_scale"  # a constant in files of v2
# Images as RT-DETR was trained on: of one size, in [0, 1], not normalized.
PREPROCESSOR = {
    "image_processor_type": "RTDetrImageProcessor", "format": "coco_detection",
    "do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": False, "do_pad": False, "do_convert_annotations": True,
}  # fmt: skip


def load_detector(
    source: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    seed: int = 0,
    **options: Any,
) -> RTDetr:
    """Load an RT-DETR of transformers, v1 or v2, from a folder or from the Hugging Face Hub.

    The folder contains `config.json` and `model.safetensors`. Nothing in it is executed.

    Args:
        source: the folder, or a name such as "PekingU/rtdetr_v2_r18vd" or "name@revision", which is
            downloaded into the cache of `huggingface_hub`.
        num_classes: of the new data. If it differs from that of the weights, the layers that depend
            on it are initialized, with a warning.
        seed: of these initial values.
        **options: of `effjax.models.RTDetr`, except `rngs`.

    Returns:
        The model, in training mode.

    Raises:
        TypeError, ValueError: if a file is damaged, weights do not match the configuration, or it
            is not supported; the message names what.
        OSError: if a file cannot be read, or the repository is neither on the Hub nor in its cache.

    Warns:
        UserWarning: if layers are initialized, or weights are rounded to `param_dtype`.
    """
    folder = _find_folder(source)
    config = RTDetrConfig.from_dict(read_json_object(folder / "config.json", "a config.json"))
    weights = load_weights(folder / MODEL)
    for name in [name for name in weights if name.endswith(POINTS_SCALE)]:
        if not np.allclose(weights.pop(name), 1 / config.decoder_n_points):
            raise ValueError(f"{folder}: {name} must be 1 / `decoder_n_points` everywhere.")
    model = nnx.eval_shape(lambda: RTDetr(config, **options, rngs=nnx.Rngs(0)))
    from_torch(weights, model, RT_DETR, prefix=PREFIX)
    if num_classes is not None and num_classes != config.num_labels:
        num_classes = as_integer("num_classes", num_classes, 1)
        warnings.warn(
            f"`num_classes` (={num_classes}) differs from the {config.num_labels} classes of the "
            "weights: the heads of classes and the embeddings of denoising queries are initialized "
            "and must be trained.",
            stacklevel=2,
        )
        labels = tuple(f"LABEL_{i}" for i in range(num_classes))
        init_class_heads(model, replace(config, id2label=labels), nnx.Rngs(seed))
    return model


def save_detector(
    model: RTDetr,
    folder: str | os.PathLike[str],
    *,
    id2label: Sequence[str] | None = None,
    image_size: int = 640,
) -> None:
    """Save an RT-DETR as a folder that transformers and `load_detector` load.

    Writes `config.json`, `preprocessor_config.json` and `model.safetensors`. Files of these names
    are replaced, each atomically.

    Args:
        model: the model.
        folder: where to save it; created if it is missing.
        id2label: the names of the classes, in order. If None, those of the configuration.
        image_size: the side to which transformers resizes images.

    Raises:
        TypeError, ValueError: if `model` is not an RTDetr, `id2label` has another number of
            classes, or a number is not finite; nothing is saved then.
        OSError: if a file cannot be written.
    """
    check_instance("model", model, RTDetr, "an effjax.models.RTDetr")
    config = model.config
    if id2label is not None:
        if len(id2label) != config.num_labels:
            raise ValueError(
                f"`id2label` must name the {config.num_labels} classes of the model, not "
                f"{len(id2label)}."
            )
        config = replace(config, id2label=tuple(id2label))
    weights = to_torch(model, RT_DETR, prefix=PREFIX)
    is_frozen = isinstance(model.backbone.stem_norm[0], FrozenBatchNorm)
    config = replace(config, freeze_backbone_batch_norms=is_frozen)
    for name, array in [*weights.items()]:
        check_finite(name, np.asarray(array))
        # Frozen norms of transformers count no batches.
        if is_frozen and name.startswith(f"{PREFIX}.backbone.") and name.endswith(COUNTER):
            del weights[name]
    if config.model_type == "rt_detr_v2":
        count = config.decoder_n_points * config.num_feature_levels
        scale = np.full(count, 1 / config.decoder_n_points, np.float32)
        for i in range(config.decoder_layers):
            weights[f"{PREFIX}.decoder.layers.{i}.{POINTS_SCALE}"] = scale
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder / MODEL, weights)
    settings = config.to_dict() | {"dtype": np.dtype(model.options.param_dtype).name}
    processor = PREPROCESSOR | {"size": {"height": image_size, "width": image_size}}
    for name, content in (("config.json", settings), ("preprocessor_config.json", processor)):
        replace_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def _find_folder(source: str | os.PathLike[str]) -> Path:
    """Return the folder, or that of the files of a repository of the Hub."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", os.fspath(source), re.ASCII)
    if is_name is None or Path(source).exists():
        return Path(source)
    from huggingface_hub import snapshot_download

    name, _, revision = os.fspath(source).partition("@")
    return Path(
        snapshot_download(name, revision=revision or None, allow_patterns=["config.json", MODEL])
    )
