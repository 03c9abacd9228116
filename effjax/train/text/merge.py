"""Merging of a LoRA adapter into the weights of its base model."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ...convert import save_checkpoint
from ...ops.quantize import Format, dequantize, quantize
from ..errors import TrainError
from ..files import read_json
from ..optimizers import is_linear
from .base import GENERATION_CONFIG, eos_tokens
from .chat import CHAT_TEMPLATE
from .model import TextModel


def merge(model: TextModel, folder: Path, dequantized: bool = False) -> None:
    """Write the checkpoint of a model with its adapter added to the weights, as W + scale · B A.

    Each sum is computed in float32 and rounded to the dtype of the parameters once.

    Args:
        model: A model with an adapter, from `find_model`.
        folder: Where to write; must not exist or be empty.
        dequantized: Whether W is what the adapter was trained on, quantized and dequantized.

    Raises:
        DataError: The files cannot be read, or do not belong to each other.
        TrainError: `dequantized`, for an adapter that was not trained on a quantized base; or a sum
            is not finite.
        OSError: The folder cannot be written.
    """
    config, form, trained_on = model.config, None, model.trained_on
    if dequantized:
        if trained_on is None:
            raise TrainError(
                f"--dequantized: {model.adapter} is not of a run of effjax finetune --quantize. "
                "Leave it out, or give the adapter that the run has written."
            )
        # The run has read all weights in this dtype, and quantized those of linear layers.
        form, dtype = trained_on
        base = dataclasses.replace(model.base, model=dataclasses.replace(config, dtype=dtype))
        model = dataclasses.replace(model, base=base)
    layers, others, scale = model.load("device")
    adapters = {name: layers.pop(name) for name in [*layers] if ".lora_" in name}
    donated = 0 if config.dtype == model.config.dtype else ()
    add = jax.jit(_add_product, static_argnums=(4, 5), donate_argnums=donated)
    for name, weight in layers.items():
        module = name.removesuffix(".weight")
        a, b = (adapters.get(f"{module}.lora_{i}.weight") for i in "AB")
        layers[name] = add(weight, a, b, scale, config.dtype, form if is_linear(name) else None)
    others = {name: a.astype(config.dtype) for name, a in others.items()}
    files: dict[str, Any] = {file.name: file for file in model.base.tokenizer_files}
    stops = model.tokenizer.turn_ends()
    # The adapter was trained with this template, and on answers with these ends.
    if model.adapter is not None:
        if (template := model.adapter / CHAT_TEMPLATE).is_file():
            files[CHAT_TEMPLATE] = template
        if (file := model.adapter / GENERATION_CONFIG).is_file():
            stops |= {*eos_tokens(read_json(file))}
    files |= model.base.generation_files(stops)
    try:
        save_checkpoint(folder, layers, others, config.to_json(), copied_files=files)
    except ValueError as error:
        raise TrainError(f"{folder} is not written: {error} Check {model.adapter}.") from error


def _add_product(
    weight: jax.Array, a: Any, b: Any, scale: float, dtype: str, form: Format | None
) -> jax.Array:
    # One layer at a time: a product in float32 is as large as the layer.
    def add(_: None, arrays: tuple[jax.Array, Any, Any]) -> tuple[None, jax.Array]:
        weight, a, b = arrays
        if form is not None:
            weight = dequantize(quantize(weight, form), weight.shape[-1], jnp.float32)
        total = weight.astype(jnp.float32)
        if a is not None:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            total += scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return None, total.astype(dtype)

    return jax.lax.scan(add, None, (weight, a, b))[1]
