"""Training steps of fine-tuning in all forms, for the planner. Only config.json is read."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import offload_jit
from ...models import DecoderConfig
from ..errors import TrainError
from ..mesh import batch_sharding, planning_mesh
from .base import find_base
from .config import FinetuneConfig
from .task import make_learner

FORMS: dict[str, dict[str, Any]] = {
    "in memory": {"policy": "everything"},
    "jax.checkpoint": {},
    "jax.checkpoint, fused": {"fuse_update": True},
    "offload activations": {"offload": "activations"},
    "offload params": {"offload": "params"},
    "offload all": {"offload": "all"},
    "offload all, fused": {"offload": "all", "fuse_update": True},
}


def read_model(config: FinetuneConfig) -> DecoderConfig:
    """Return the model of a configuration, with the dtype of the parameters."""
    return find_base(config.checkpoint, config.param_dtype).model


def finetune_steps(
    config: FinetuneConfig, num_devices: int = 1
) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """Return a function from a batch size to the training step of each form, `(fun, *args)`.

    The policy of the configuration applies to all forms but "in memory".
    """
    model = read_model(config)

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        result = {}
        for name, form in FORMS.items():
            options = {"batch_size": batch_size, "offload": "none", "fuse_update": False, **form}
            changed = dataclasses.replace(config, **options)
            result[name] = training_step(changed, model, num_devices)
        return result

    return steps


def training_step(
    config: FinetuneConfig, model: DecoderConfig, num_devices: int = 1
) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`."""
    mesh = planning_mesh(config.mesh, num_devices)
    learner = make_learner(dataclasses.replace(config, steps=config.steps or 1000), model, mesh)
    shape, sharding = (config.batch_size, config.max_length), batch_sharding(mesh)
    names = "tokens", "labels", "positions", "segment_ids"
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return offload_jit(learner.train_step()), learner.shapes(), batch, key


# Values of the options that trade time for memory, each in the order of the memory they need; for
# `effjax.memory.choose_options`. The places of activations and parameters are the two halves of
# `FinetuneConfig.offload`.
MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "policy": ("everything", "dots", "recompute"),
    "activations": ("device", "host"),
    "params": ("device", "host"),
    "num_microbatches": (1, 2, 4, 8),
    "mlp_chunk_size": (None, 1024),
}
NOT_BY_TIME = "policy", "mlp_chunk_size"  # long contexts are recomputed faster than they are read


def with_memory_options(
    config: FinetuneConfig,
    num_devices: int = 1,
    fuse_update: bool = True,
    *,
    policy: Any,
    activations: str,
    params: str,
    num_microbatches: int,
    mlp_chunk_size: int | None,
) -> FinetuneConfig | None:
    """Return the configuration with values of `MEMORY_OPTIONS`, or None if it is not supported.

    Args:
        config: The configuration.
        num_devices: The number of devices.
        fuse_update: Whether to update each layer during the backward pass, if that is possible.
            It saves memory and takes about the same time.
        policy: See `MEMORY_OPTIONS`, as for the next arguments.
        activations: The place of the residuals.
        params: The place of the parameters and the optimizer state.
        num_microbatches: The number of microbatches.
        mlp_chunk_size: Positions that an MLP processes at a time.
    """
    places: dict[tuple[str, str], Any] = {
        ("device", "device"): "none",
        ("host", "device"): "activations",
        ("device", "host"): "params",
        ("host", "host"): "all",
    }
    if num_microbatches > 1 < num_devices:
        return None
    if mlp_chunk_size is not None and mlp_chunk_size >= config.max_length:
        return None  # the same as None
    try:
        return dataclasses.replace(
            config, policy=policy, offload=places[activations, params],
            fuse_update=fuse_update and config.on_nan != "skip",
            num_microbatches=num_microbatches, mlp_chunk_size=mlp_chunk_size,
        )  # fmt: skip
    except TrainError:  # the options do not fit each other
        return None


def min_bytes(
    config: FinetuneConfig,
    model: DecoderConfig,
    num_devices: int = 1,
    *,
    activations: str,
    **_: Any,
) -> tuple[int, int]:
    """Return lower bounds of the bytes of the residuals, on one device and on the host.

    All policies keep the inputs of the layers at least.
    """
    shape = model.num_hidden_layers, config.batch_size, config.max_length, model.hidden_size
    size = math.prod(shape) * jnp.dtype(config.dtype).itemsize
    return (0, size) if activations == "host" else (size // num_devices, 0)
