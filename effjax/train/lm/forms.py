"""Training steps of a language model in all forms, for the planner. No text is read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ... import offload_jit
from ...memory import residual_bytes
from ...models import scan_layers
from ..errors import TrainError
from ..mesh import batch_sharding, make_mesh, planning_mesh, with_shardings
from .config import LMConfig
from .steps import POLICIES, lm_loss, make_learner

LM_FORMS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "jax.checkpoint": {"remat": True},
    "in memory, fused": {"fuse_update": True},
    "offload activations": {"offload": "activations"},
    "offload params": {"offload": "params"},
    "offload all": {"offload": "all"},
    "offload all, fused": {"offload": "all", "fuse_update": True},
}


def lm_steps(config: LMConfig, num_devices: int = 1) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """Return a function from a batch size to the training step of each form, `(fun, *args)`.

    Microbatches and the policy apply to the forms that offload, or update during the backward pass.
    """

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        result = {}
        for name, form in LM_FORMS.items():
            options = {"batch_size": batch_size, "offload": "none", **form}
            if "offload" not in form and "fuse_update" not in form:
                options |= {"num_microbatches": 1, "policy": "recompute"}
            result[name] = lm_training_step(dataclasses.replace(config, **options), num_devices)
        return result

    return steps


def lm_training_step(config: LMConfig, num_devices: int = 1) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`."""
    mesh = planning_mesh(config.mesh, num_devices)
    learner, one_device = make_learner(config, mesh), make_mesh(None, jax.devices()[:1])
    state, key = jax.eval_shape(lambda: (learner.initial_state(one_device), jax.random.key(0)))
    shape = config.batch_size, config.context + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    state = with_shardings(state, learner.shardings(state, mesh))
    return offload_jit(learner.train_step()), state, tokens, key


# Values of the options that trade time for memory, each in the order of the memory they need; for
# `effjax.memory.choose_options`. The places of activations and parameters are the two halves of
# `LMConfig.offload`.
LM_MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "policy": ("everything", "dots", "recompute"),
    "activations": ("device", "host"),
    "params": ("device", "host"),
    "num_microbatches": (1, 2, 4, 8),
}
LM_NOT_BY_TIME = ("policy",)  # long contexts are recomputed faster than they are read


def with_memory_options(
    config: LMConfig,
    num_devices: int = 1,
    fuse_update: bool = True,
    *,
    policy: Any,
    activations: str,
    params: str,
    num_microbatches: int,
) -> LMConfig | None:
    """Return the configuration with values of `LM_MEMORY_OPTIONS`, or None if it is not supported.

    Args:
        config: The configuration.
        num_devices: The number of devices.
        fuse_update: Whether to update each layer during the backward pass, if that is possible.
            It saves memory and takes about the same time. Without it, layers that are not offloaded
            keep everything, or recompute everything (`remat`).
        policy: See `LM_MEMORY_OPTIONS`, as for the next arguments.
        activations: The place of the residuals.
        params: The place of the parameters of the layers and their optimizer state.
        num_microbatches: The number of microbatches.
    """
    places: dict[tuple[str, str], Any] = {
        ("device", "device"): "none",
        ("host", "device"): "activations",
        ("device", "host"): "params",
        ("host", "host"): "all",
    }
    offload, fuse_update = places[activations, params], fuse_update and config.on_nan != "skip"
    remat = not fuse_update and offload == "none" and policy == "recompute"
    if not fuse_update and offload == "none":
        if policy == "dots":
            return None
        policy = LMConfig.policy  # has no effect
    if num_microbatches > 1 < num_devices:
        return None
    try:
        return dataclasses.replace(
            config, policy=policy, offload=offload, remat=remat, fuse_update=fuse_update,
            num_microbatches=num_microbatches,
        )  # fmt: skip
    except TrainError:  # the options do not fit each other
        return None


def kept_bytes(
    config: LMConfig, num_devices: int = 1, *, policy: str, activations: str, **_: Any
) -> tuple[int, int]:
    """Return lower bounds of the bytes of the residuals, on one device and on the host.

    Args:
        config: The configuration. With `lora` the bounds are 0.
        num_devices: The number of devices.
        policy: See `LM_MEMORY_OPTIONS`.
        activations: See `LM_MEMORY_OPTIONS`.
    """
    if config.lora is not None:
        return 0, 0
    size = _residual_bytes(config, policy)
    return (0, size) if activations == "host" else (size // num_devices, 0)


@functools.lru_cache(maxsize=16)  # the options of a search differ in other values as well
def _residual_bytes(config: LMConfig, policy: str) -> int:
    """Return the bytes that the layers keep under a policy."""
    learner = make_learner(config, planning_mesh(None, 1))
    tokens = np.zeros((config.batch_size, config.context + 1), np.int32)

    def apply_layers(layer: Any, *args: Any) -> jax.Array:
        kept = POLICIES[policy]
        return scan_layers(jax.checkpoint(layer, policy=kept, prevent_cse=False), *args)

    def loss(params: Any) -> jax.Array:
        return lm_loss(learner.graphdef, params, tokens, None, apply_layers)

    params = nnx.to_pure_dict(nnx.state(learner.model, nnx.Param))
    report = residual_bytes(loss, params)
    # Parameters are arguments. Those of the layers and their residuals are stacked.
    stacked = sum(size for shape, *_, size in report.arrays if shape[:1] == (config.layers,))
    return max(stacked - report.argument_bytes, 0)
