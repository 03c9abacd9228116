"""LoRA adapters in the layout of PEFT."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._files import MAX_NUMBER, MAX_SIZE, check, read_json_object
from ..ops._common.arguments import as_integer, as_number
from .checkpoint import (
    EXPERTS,
    LAYERS_PREFIX,
    Arrays,
    Shapes,
    check_arrays,
    find_arrays,
    find_tensors,
    load_arrays,
    make_sources,
    read_files,
    save_arrays,
)
from .safetensors_file import DTYPES, read_metadata

MODEL = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
BASE = "base_model.model."  # before the names of the base model
A, B = ".lora_A.weight", ".lora_B.weight"
# Options of PEFT that are read, or that do not change what a saved adapter computes. Others are
# refused if they are set: a new one may stand for another product.
KNOWN = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Initializations that do not change the base model.
INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


class AdapterOptions(NamedTuple):
    """Options of an adapter: `dropout` is that of its training, `modules` those that it adapts.

    `metadata` is that of `save_adapter`.
    """

    rank: int
    scale: float
    modules: list[str]
    dropout: float
    metadata: dict[str, str]


def load_adapter(
    folder: str | os.PathLike[str],
    layers: Shapes | None = None,
    *,
    layers_prefix: str = LAYERS_PREFIX,
) -> tuple[Arrays, float]:
    """Load a LoRA adapter in PEFT's layout, with its layers stacked.

    The folder contains `adapter_config.json` and `adapter_model.safetensors`. Unsupported are DoRA,
    patterns of ranks and alphas, `modules_to_save`, biases, initializations that change the base
    model, such as PiSSA and OLoRA, and all options of PEFT that are not known here.

    Args:
        folder: The adapter.
        layers: Shapes of the arrays, as in `load_checkpoint`. If None, all arrays of the file are
            loaded, on one device.
        layers_prefix: What stands before the number of a layer in the base model.

    Returns:
        The arrays and the scale. The array ``"self_attn.q_proj.lora_A.weight"`` has the shape
        [L, r, in] and ``"self_attn.q_proj.lora_B.weight"`` [L, out, r]; those of experts, such as
        ``"mlp.experts.gate_proj.lora_A.weight"``, have an axis of experts after that of layers.
        They add
        ``scale * B @ A`` to ``"self_attn.q_proj.weight"`` of each layer. The scale is
        ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with `use_rslora`.

    Raises:
        ValueError: as for `load_checkpoint`, or for options that are not supported.
        OSError: if a file cannot be read.
    """
    folder = Path(folder)
    config, prefix = _read_config(folder / CONFIG), f"{BASE}{layers_prefix}"
    if layers is None:
        layers = _find_shapes(folder, prefix)
    arrays, _ = load_arrays(*find_arrays(folder, MODEL, layers, {}, prefix, ()), None)
    rank = _check_matrices(arrays)
    if rank != config["r"]:
        raise ValueError(
            f"{folder / CONFIG}: r is {config['r']}, but the matrices have rank {rank}."
        )
    return arrays, _find_scale(config)


def read_adapter_options(
    folder: str | os.PathLike[str], *, layers_prefix: str = LAYERS_PREFIX
) -> AdapterOptions:
    """Return the options of an adapter.

    Args:
        folder: The adapter, as for `load_adapter`. No weights are read.
        layers_prefix: What stands before the number of a layer in the base model.

    Raises:
        ValueError, OSError: as for `load_adapter`.
    """
    folder = Path(folder)
    config, shapes = _read_config(folder / CONFIG), _find_shapes(folder, f"{BASE}{layers_prefix}")
    modules = sorted(name.removesuffix(A) for name in shapes if name.endswith(A))
    dropout, file = config.get("lora_dropout") or 0.0, folder / MODEL
    metadata = read_metadata(file) if file.is_file() else {}  # otherwise there is an index
    return AdapterOptions(config["r"], _find_scale(config), modules, dropout, metadata)


def save_adapter(
    folder: str | os.PathLike[str],
    layers: Mapping[str, Any],
    scale: float,
    *,
    dropout: float = 0.0,
    base_model: str | None = None,
    base_revision: str | None = None,
    copied_files: Mapping[str, Path | bytes] = {},
    metadata: Mapping[str, str] = {},
    layers_prefix: str = LAYERS_PREFIX,
    overwrite: bool = False,
) -> None:
    """Save a LoRA adapter in PEFT's layout, the inverse of `load_adapter`.

    The folder appears when it is complete; with several processes as in `save_checkpoint`.

    Args:
        folder: The adapter, which must not exist or be empty, unless `overwrite`.
        layers: Arrays as `load_adapter` returns them.
        scale: The factor of ``B @ A``, written as ``lora_alpha / r``.
        dropout: The `lora_dropout` of the training, which does not change what the adapter
            computes.
        base_model: The name or folder of the model that is adapted, for PEFT.
        base_revision: The commit of a model on the Hub.
        copied_files: Other files of the adapter, or their content, by their new names.
        metadata: Texts for the header of `adapter_model.safetensors`, which other programs ignore.
        layers_prefix: What stands before the number of a layer in the base model.
        overwrite: Whether to replace an older adapter, as in `save_checkpoint`.

    Raises:
        ValueError: if the arrays are not pairs of matrices of one rank, if `scale` is not finite,
            or if a number of the arrays is not.
        TypeError: if an array has a dtype that the format does not support, or if `scale` is not a
            number.
        OSError: if the folder exists, is not empty and must not be replaced, or if it cannot be
            written.
        RuntimeError: if another process has failed.
    """
    check_arrays(layers, {})
    rank = _check_matrices(layers)
    scale = as_number("scale", scale, lambda scale: math.isfinite(scale * rank), "finite")
    dropout = as_number("dropout", dropout, lambda a: 0 <= a < 1, "in [0, 1)")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
        "revision": base_revision,
        "r": rank, "lora_alpha": _find_alpha(scale, rank), "lora_dropout": dropout, "bias": "none",
        "target_modules": sorted({_target(name) for name in layers if name.endswith(A)}),
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    sources = make_sources(layers, {}, f"{BASE}{layers_prefix}")
    text = json.dumps(config, indent=2) + "\n"
    files = {CONFIG: text.encode()}
    files |= read_files(copied_files)
    save_arrays(Path(folder), MODEL, sources, files, 1 << 62, overwrite, None, metadata)


def _target(name: str) -> str:
    """Return the module of an adapter as PEFT names it, which adapts all experts alike."""
    module = name.removesuffix(A)
    return module.rpartition(".")[2] if EXPERTS in name else module


def _read_config(path: Path) -> dict[str, Any]:
    """Return the options of an adapter."""
    kind = "the configuration of LoRA"
    config = read_json_object(path, kind)
    alpha, dropout = config.get("lora_alpha"), config.get("lora_dropout")
    limit = f"between {-MAX_NUMBER:g} and {MAX_NUMBER:g}"
    try:
        check(config.get("peft_type") == "LORA", f"peft_type is {config.get('peft_type')!r:.40}")
        as_integer("r", config.get("r"), 1, MAX_SIZE)
        as_number("lora_alpha", alpha, lambda a: abs(a) <= MAX_NUMBER, limit)
        if dropout is not None:
            as_number("lora_dropout", dropout, lambda a: 0 <= a < 1, "in [0, 1)")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not {kind} ({error!s:.200})") from error
    use_rslora = config.get("use_rslora")
    if use_rslora is not None and not isinstance(use_rslora, bool):
        raise ValueError(f"{path}: use_rslora is {use_rslora!r:.80}, not true or false.")
    options = [
        f"{name:.80}={value!r:.80}" for name, value in config.items() if value and name not in KNOWN
    ]
    options += [f"bias={config['bias']!r:.80}"] if config.get("bias") not in (None, "none") else []
    if (init := config.get("init_lora_weights")) not in INITIALIZATIONS:
        options.append(f"init_lora_weights={init!r:.80}")
    if options:
        raise ValueError(f"{path}: adapters with {', '.join(options)} are not supported.")
    return config


def _find_scale(config: Mapping[str, Any]) -> float:
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _find_shapes(folder: Path, prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the stacked tensors of an adapter."""
    counts, shapes = {}, {}
    tensors, _, _ = find_tensors(folder, MODEL)
    for name, tensor in tensors.items():
        if found := re.fullmatch(rf"{re.escape(prefix)}\.([0-9]{{1,4}})\.(.+)", name):
            module, *of_expert = re.split(
                rf"{re.escape(EXPERTS)}([0-9]{{1,4}})\.", found[2], maxsplit=1
            )
            numbers, leaf = [int(found[1])], module
            if of_expert:
                numbers, leaf = [*numbers, int(of_expert[0])], f"{module}{EXPERTS}{of_expert[1]}"
            known = counts.get(leaf, [0] * len(numbers))
            counts[leaf] = [max(n, i + 1) for n, i in zip(known, numbers, strict=True)]
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{tensor.path}: {name:.200} has the dtype {tensor.dtype}.")
            shapes.setdefault(leaf, (tensor.shape, DTYPES[tensor.dtype]))
    return {
        leaf: jax.ShapeDtypeStruct((*counts[leaf], *shape), dtype)
        for leaf, (shape, dtype) in shapes.items()
    }


def _check_matrices(layers: Mapping[str, Any]) -> int:
    """Return the rank of the pairs of matrices, or raise ValueError."""
    ranks, names = set(), set()
    for name, a in layers.items():
        module = name.removesuffix(A).removesuffix(B)
        is_pair = module != name and f"{module}{A}" in layers and f"{module}{B}" in layers
        if not is_pair or len(a.shape) != 3 + (EXPERTS in name):
            names.add(name)
        else:
            ranks.add(a.shape[-2 if name.endswith(A) else -1])
    if names or len(ranks) != 1:
        raise ValueError(
            f"`layers` must be pairs NAME{A} [L, r, in] and NAME{B} [L, out, r] of one rank. "
            + (f"Others: {', '.join(sorted(names))}." if names else f"Ranks: {sorted(ranks)}.")
        )
    return ranks.pop()


def _find_alpha(scale: float, rank: int) -> float:
    """Return a number whose quotient by `rank` is `scale`, if one exists; rather an integer."""
    # PEFT divides it by the rank, which must give the same scale.
    alpha = scale * rank
    neighbors = math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf)
    exact = (a for a in (round(alpha), alpha, *neighbors) if a / rank == scale)
    return next(exact, alpha)
