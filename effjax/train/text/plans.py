"""Training steps of fine-tuning for the planner, and the options that trade time for memory.

No data and no weights are read; of a checkpoint only config.json.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...models import DecoderConfig
from ...ops.offload import offload_jit
from ..errors import TrainError
from ..mesh import batch_sharding, planning_mesh
from ..task import AS_GIVEN, Form, MemoryChoices
from .base import find_base
from .config import FinetuneConfig
from .learner import DecoderLearner, make_learner

# The options that `effjax memory` changes to compare forms of a step.
FORMS: dict[str, dict[str, Any]] = {
    "in memory": {"fuse_update": False, "policy": "everything"},
    "jax.checkpoint": {"fuse_update": False},
    "jax.checkpoint, fused": {"fuse_update": True},
    "offload activations": {"activations_in": "host", "fuse_update": False},
    "offload params": {"params_in": "host", "activations_in": "device", "fuse_update": False},
    "offload all": {"params_in": "host", "fuse_update": False},
    "offload all, fused": {"params_in": "host", "fuse_update": True},
}
STEPS = 1000  # of a schedule; its length does not change the memory of a step


def read_model(config: FinetuneConfig) -> DecoderConfig:
    """Return the model of a configuration, with the dtype of the parameters."""
    if config.checkpoint is None:
        raise TrainError("finetune needs CHECKPOINT, the config.json of a model or its folder.")
    return find_base(config.checkpoint, config.stored_dtype, allow_file=True).model


def planned_learner(
    config: FinetuneConfig, num_devices: int = 1, model: DecoderConfig | None = None
) -> DecoderLearner:
    """Return the learner of `training_step`, which has the same arguments."""
    config = config.resolve()
    mesh = planning_mesh(config.mesh, num_devices)
    config = dataclasses.replace(config, steps=config.steps or STEPS)
    return make_learner(config, model or read_model(config), mesh)


def training_step(
    config: FinetuneConfig, num_devices: int = 1, model: DecoderConfig | None = None
) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`.

    Args:
        config: The configuration.
        num_devices: The number of devices.
        model: The result of `read_model`, by default read here.
    """
    learner = planned_learner(config, num_devices, model)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(learner.mesh))
        for name, (shape, dtype) in learner.config.batch_shapes().items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    return offload_jit(learner.train_step()), learner.shapes(), batch, key


def forms(config: FinetuneConfig, given: Collection[str], num_devices: int = 1) -> dict[str, Form]:
    """Return the forms of the step of a run to compare; one, if the options choose it.

    Args:
        config: The configuration, resolved.
        given: The names of the options that must keep their values.
        num_devices: The number of devices.
    """
    changes = FORMS
    if {"params_in", "activations_in", "fuse_update"} & {*given}:
        changes = {AS_GIVEN: {}}
    elif config.on_nan == "skip":  # which a fused update does not support
        changes = {name: form for name, form in FORMS.items() if not form["fuse_update"]}
    step = functools.partial(training_step, num_devices=num_devices, model=read_model(config))
    result: dict[str, Form] = {}
    for name, form in changes.items():
        changed = dataclasses.replace(
            config, **{key: value for key, value in form.items() if key not in given}
        )
        # Forms that differ in an option that was given are the same step.
        if all(changed != other.config for other in result.values()):
            result[name] = Form(changed, step)
    return result


def smaller_configs(config: FinetuneConfig, of_state: bool) -> Iterator[FinetuneConfig]:
    """Yield configurations that train with less memory, those that change the least first.

    Args:
        config: The configuration.
        of_state: Whether parameters and moments must become smaller, and not only activations.
    """
    if not of_state:
        size, length = config.batch_size, config.max_length
        while size > 1 and size // 2 % config.num_microbatches == 0:
            size //= 2
            yield dataclasses.replace(config, batch_size=size)
        # Rows first: fewer of them change the gradients' noise, shorter ones cut conversations.
        while length > 512:
            length //= 2
            yield dataclasses.replace(config, batch_size=size, max_length=length)
    # In the order of what they change of the result: rounding of moments, the trained parameters,
    # the weights of the base.
    if config.optimizer != "adamw8bit":
        yield dataclasses.replace(config, optimizer="adamw8bit")
    if config.lora is None:
        optimizer = "adamw" if config.optimizer == "muon" else config.optimizer  # not of adapters
        config = dataclasses.replace(config, lora=16, optimizer=optimizer)
        yield config
    if config.quantize is None:
        yield dataclasses.replace(config, quantize="nf4", matmul=None)


def memory_choices(config: FinetuneConfig, given: set[str], num_devices: int = 1) -> MemoryChoices:
    """Return the options of a run that trade time for memory.

    Args:
        config: The configuration.
        given: The names of the options that must keep their values.
        num_devices: The number of devices.
    """
    model, dtype = read_model(config.resolve()), jnp.dtype(config.dtype)
    options: dict[str, tuple[Any, ...]] = {
        "policy": ("everything", "dots", "recompute"),
        "activations_in": ("device", "host"),
        "params_in": ("device", "host"),
        "num_microbatches": (1, 2, 4, 8),
        "mlp_chunk_size": (None, 1024) if model.num_experts is None else (None,),
    }
    # Later values of these may be faster, too: long contexts are recomputed faster than residuals
    # are read.
    not_by_time = ["policy", "mlp_chunk_size"]
    options |= {name: (getattr(config, name),) for name in options.keys() & given}
    # To update layers during the backward pass saves memory, and takes about the same time.
    fuses = config.fuse_update or "fuse_update" not in given

    def change(
        params_in: Any, activations_in: Any, mlp_chunk_size: int | None, **values: Any
    ) -> FinetuneConfig | None:
        if "mlp_chunk_size" not in given and (mlp_chunk_size or 0) >= config.max_length:
            return None  # the same as None
        fuse_update = fuses and config.on_nan != "skip"
        if activations_in == params_in and "activations_in" not in given:
            activations_in = None  # the default, which no command needs
        try:
            changed = dataclasses.replace(
                config,
                params_in=params_in,
                activations_in=activations_in,
                fuse_update=fuse_update,
                mlp_chunk_size=mlp_chunk_size,
                **values,
            ).resolve()
            changed.check_devices(num_devices)
        except TrainError:  # the options do not fit each other
            return None
        return changed

    tokens = config.batch_size * config.rows_per_example * config.max_length
    # All policies keep the inputs of the layers.
    residuals = model.num_hidden_layers * tokens * model.hidden_size * dtype.itemsize

    def min_bytes(activations_in: str, **_: Any) -> tuple[int, int]:
        return (0, residuals) if activations_in == "host" else (residuals // num_devices, 0)

    def step(config: FinetuneConfig) -> tuple[Any, ...]:
        return training_step(config, num_devices, model)

    return MemoryChoices(options, not_by_time, change, step, min_bytes)
