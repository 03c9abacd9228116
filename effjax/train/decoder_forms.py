"""Forms of the training step of a decoder, and the options that trade time for its memory.

They apply to all commands that train a decoder, whose options are a `DecoderRunConfig`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import offload_jit
from ..models import DecoderConfig
from .decoder import DecoderLearner
from .decoder_config import DecoderRunConfig
from .errors import TrainError
from .mesh import batch_sharding

FORMS: dict[str, dict[str, Any]] = {
    "in memory": {"policy": "everything"},
    "jax.checkpoint": {},
    "jax.checkpoint, fused": {"fuse_update": True},
    "offload activations": {"offload": "activations"},
    "offload params": {"offload": "params"},
    "offload all": {"offload": "all"},
    "offload all, fused": {"offload": "all", "fuse_update": True},
}


def make_forms(
    config: DecoderRunConfig, make_step: Callable[[Any], tuple[Any, ...]]
) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """Return a function from a batch size to the training step of each form.

    Args:
        config: The configuration. The forms replace its `offload` and `fuse_update`, and "in
            memory" also its `policy`.
        make_step: ``make_step(config)`` returns the training step, `(fun, *args)`.
    """

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        plain = {"batch_size": batch_size, "offload": "none", "fuse_update": False}
        return {
            name: make_step(dataclasses.replace(config, **plain | form))
            for name, form in FORMS.items()
        }

    return steps


def abstract_step(
    learner: DecoderLearner, batch: dict[str, Any], shape: tuple[int, int]
) -> tuple[Any, ...]:
    """Return a training step and the shapes of its arguments, `(fun, *args)`.

    Args:
        learner: The learner.
        batch: The dtypes of the arrays of a batch.
        shape: Their shape.
    """
    sharding = batch_sharding(learner.mesh)
    arrays = {n: jax.ShapeDtypeStruct(shape, d, sharding=sharding) for n, d in batch.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return offload_jit(learner.train_step()), learner.shapes(), arrays, key


# Values of the options that trade time for memory, for `effjax.memory.choose_options`. Those that
# need the most memory come first. `activations` and `params` together are the option `offload`.
MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "policy": ("everything", "dots", "recompute"),
    "activations": ("device", "host"),
    "params": ("device", "host"),
    "num_microbatches": (1, 2, 4, 8),
}
# Later values may be faster too: long contexts are recomputed faster than residuals are read.
NOT_BY_TIME = ("policy",)
_PLACES: dict[tuple[str, str], Any] = {
    ("device", "device"): "none",
    ("host", "device"): "activations",
    ("device", "host"): "params",
    ("host", "host"): "all",
}


def with_memory_options(
    config: DecoderRunConfig,
    num_devices: int = 1,
    fuse_update: bool = True,
    *,
    policy: str,
    activations: str,
    params: str,
    num_microbatches: int,
    **options: Any,
) -> Any:
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
        **options: Values of other options of the configuration.
    """
    if num_microbatches > 1 < num_devices:
        return None
    try:
        return dataclasses.replace(
            config, policy=policy, offload=_PLACES[activations, params],
            fuse_update=fuse_update and config.on_nan != "skip",
            num_microbatches=num_microbatches, **options,
        )  # fmt: skip
    except TrainError:  # the options do not fit each other
        return None


def min_bytes(
    model: DecoderConfig,
    shape: tuple[int, int],
    dtype: str,
    num_devices: int = 1,
    *,
    activations: str,
    **_: Any,
) -> tuple[int, int]:
    """Return lower bounds of the bytes of the residuals, on one device and on the host.

    All policies keep the inputs of the layers at least.

    Args:
        model: The decoder.
        shape: Sequences in a batch and their tokens.
        dtype: The dtype of the computation.
        num_devices: The number of devices.
        activations: See `MEMORY_OPTIONS`.
    """
    size = math.prod(
        (model.num_hidden_layers, *shape, model.hidden_size, jnp.dtype(dtype).itemsize)
    )
    return (0, size) if activations == "host" else (size // num_devices, 0)
