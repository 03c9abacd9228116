"""Training steps of a language model in all forms, for the planner. No text is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import offload_jit
from ..mesh import batch_sharding, make_mesh, planning_mesh, with_shardings
from .config import LMConfig
from .steps import make_learner

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
