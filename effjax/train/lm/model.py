"""The model of a run on text, and its training steps for the planner. No text is read."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...models import DecoderConfig
from ..decoder import DecoderLearner, make_optimizer, make_schedule
from ..decoder_forms import abstract_step, make_forms
from ..mesh import AnyMesh, planning_mesh
from .config import LMConfig

NUM_BYTES = 256  # the vocabulary
# The width of an MLP is rounded up to whole tiles of a TPU: XLA copies a stack in host memory as a
# whole if its last axis has a part of a tile.
TILE = 128


def make_model(config: LMConfig) -> DecoderConfig:
    """Return a decoder of bytes, in the proportions of Llama."""
    width, multiple = config.width, TILE if config.width >= TILE else 8
    return DecoderConfig(
        model_type="llama", vocab_size=NUM_BYTES, hidden_size=width,
        intermediate_size=-(-8 * width // (3 * multiple)) * multiple,
        num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.heads, head_dim=width // config.heads,
        other_settings=json.dumps({"initializer_range": width**-0.5}),
    )  # fmt: skip


def make_learner(config: LMConfig, mesh: AnyMesh) -> DecoderLearner:
    """Create the learner of a configuration. Nothing is computed."""
    schedule = make_schedule(config.learning_rate, config.steps)
    return DecoderLearner(
        model=make_model(config), optimizer=make_optimizer(schedule, config.weight_decay),
        mesh=mesh, dtype=config.dtype, offload=config.offload, fuse_update=config.fuse_update,
        policy=config.policy, num_microbatches=config.num_microbatches,
        clip_norm=config.clip_norm or None, skip_nonfinite=config.on_nan == "skip",
    )  # fmt: skip


def lm_training_step(config: LMConfig, num_devices: int = 1) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`."""
    learner = make_learner(config, planning_mesh(config.mesh, num_devices))
    batch = {"tokens": jnp.int32, "labels": jnp.int32}
    return abstract_step(learner, batch, (config.batch_size, config.context))


def lm_steps(config: LMConfig, num_devices: int = 1) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """Return a function from a batch size to the training step of each form, `(fun, *args)`."""
    return make_forms(config, functools.partial(lm_training_step, num_devices=num_devices))
