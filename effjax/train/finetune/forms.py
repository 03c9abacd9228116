"""Training steps of fine-tuning for the planner. Only config.json is read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...models import DecoderConfig
from .. import decoder_forms
from ..mesh import planning_mesh
from .base import find_base
from .config import FinetuneConfig
from .task import make_learner

BATCH = {
    "tokens": jnp.int32, "labels": jnp.int32, "positions": jnp.int32, "segment_ids": jnp.int32,
    "weights": jnp.float32,
}  # fmt: skip
# Options that trade time for memory, as in `decoder_forms`.
MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {
    **decoder_forms.MEMORY_OPTIONS,
    "mlp_chunk_size": (None, 1024),
}
NOT_BY_TIME = *decoder_forms.NOT_BY_TIME, "mlp_chunk_size"


def read_model(config: FinetuneConfig) -> DecoderConfig:
    """Return the model of a configuration, with the dtype of the parameters."""
    return find_base(config.checkpoint, config.param_dtype, allow_file=True).model


def finetune_steps(
    config: FinetuneConfig, num_devices: int = 1
) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """Return a function from a batch size to the training step of each form, `(fun, *args)`."""
    options = dict(model=read_model(config), num_devices=num_devices)
    return decoder_forms.make_forms(config, functools.partial(training_step, **options))


def training_step(
    config: FinetuneConfig, model: DecoderConfig, num_devices: int = 1
) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`."""
    mesh = planning_mesh(config.mesh, num_devices)
    learner = make_learner(dataclasses.replace(config, steps=config.steps or 1000), model, mesh)
    return decoder_forms.abstract_step(learner, BATCH, (config.batch_size, config.max_length))


def with_memory_options(
    config: FinetuneConfig,
    num_devices: int = 1,
    fuse_update: bool = True,
    *,
    mlp_chunk_size: int | None,
    **options: Any,
) -> FinetuneConfig | None:
    """Return the configuration with values of `MEMORY_OPTIONS`, or None if it is not supported.

    The other arguments are those of `decoder_forms.with_memory_options`.
    """
    if mlp_chunk_size is not None and mlp_chunk_size >= config.max_length:
        return None  # the same as None
    return decoder_forms.with_memory_options(
        config, num_devices, fuse_update, mlp_chunk_size=mlp_chunk_size, **options
    )
