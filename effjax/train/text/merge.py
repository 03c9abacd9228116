"""Merging of a LoRA adapter into the weights of its base model."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ...convert import save_checkpoint
from .base import GENERATION_CONFIG, eos_tokens
from .chat import CHAT_TEMPLATE
from .files import read_json
from .model import TextModel


def merge(model: TextModel, folder: Path) -> None:
    """Write the checkpoint of a model with its adapter added to the weights, as W + scale · B A.

    Each product is added in float32 and rounded to the dtype of the parameters once.

    Args:
        model: A model with an adapter, from `find_model`.
        folder: Where to write; must not exist or be empty.

    Raises:
        DataError: The files cannot be read, or do not belong to each other.
        OSError: The folder cannot be written.
    """
    layers, others, scale = model.load("device")
    for name in [name for name in layers if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = layers.pop(name), layers.pop(f"{module}.lora_B.weight")
        layers[f"{module}.weight"] = _add_product(layers[f"{module}.weight"], a, b, scale)
    files: dict[str, Any] = {file.name: file for file in model.base.tokenizer_files}
    stops = model.tokenizer.template_ends
    # The adapter was trained with this template, and on answers with these ends.
    if model.adapter is not None:
        if (template := model.adapter / CHAT_TEMPLATE).is_file():
            files[CHAT_TEMPLATE] = template
        if (file := model.adapter / GENERATION_CONFIG).is_file():
            stops |= {*eos_tokens(read_json(file))}
    files |= model.base.generation_files(stops)
    save_checkpoint(folder, layers, others, model.config.to_json(), copied_files=files)


@functools.partial(jax.jit, donate_argnums=0)
def _add_product(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    # One layer at a time: a product in float32 is as large as the layer.
    def add(_: None, arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        weight, a, b = arrays
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return None, (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)

    return jax.lax.scan(add, None, (weight, a, b))[1]
