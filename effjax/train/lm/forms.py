"""Training steps of a language model, in memory and offloaded, to be planned side by side. All from
shapes; no text is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import offload_jit
from ...memory._lower import make_data_mesh
from ..mesh import abstract_mesh, by_batch, data_mesh, with_shardings
from .config import LMConfig
from .offloaded import shardings_of
from .recipe import initial_state, make_learner, train_step

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
    """For a batch size, the step of `effjax train lm` in each form: `(fun, *args)` by name.

    Microbatches and policy are of the forms whose layers are offloaded or updated in the backward
    pass.
    """

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        found = {}
        plain = {"batch_size": batch_size, "offload": "none"}
        of_slices = {"num_microbatches": 1, "policy": "recompute"}
        for name, form in LM_FORMS.items():
            options: dict[str, Any] = dataclasses.asdict(config) | plain | form
            if "offload" not in form and "fuse_update" not in form:
                options |= of_slices
            found[name] = lm_training_step(LMConfig(**options), num_devices)
        return found

    return steps


def lm_training_step(config: LMConfig, num_devices: int = 1) -> tuple[Any, ...]:
    """`(fun, *args)` of one step, as the options have it; nothing is made."""
    mesh: Any = (
        abstract_mesh(config.mesh, num_devices) if config.mesh else make_data_mesh(num_devices)
    )
    learner, here = make_learner(config, mesh), data_mesh(jax.devices()[:1])
    state, key = jax.eval_shape(lambda: (initial_state(learner, here), jax.random.key(0)))
    shape = config.batch_size, config.context + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_batch(mesh))
    state = with_shardings(state, shardings_of(config, state, mesh))
    return offload_jit(train_step(learner)), state, tokens, key
