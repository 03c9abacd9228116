"""A run before it begins: its text is read, and what can be wrong has been looked for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ... import __version__
from ...models import TransformerLM, scan_layers
from ...models.nnx.transformer import ApplyLayers
from ..data.text import Text, check_length, load_text
from ..errors import TrainError
from ..images.job import local_devices
from ..images.steps import Devices, data_mesh
from .config import LMConfig
from .offloaded import (
    OffloadedState,
    apply_offloaded,
    initial_offloaded_state,
    layers_on_host,
    offloaded_step,
)
from .steps import LMState, lm_step, make_lm_optimizer, make_lm_schedule


@dataclasses.dataclass(frozen=True, eq=False)
class LMJob:
    """What `fit` needs. Nothing has been written yet."""

    config: LMConfig
    text: Text
    model: TransformerLM  # abstract: shapes, no arrays
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], Any]
    apply_layers: ApplyLayers
    apply_layers_in_test: ApplyLayers
    devices: Devices

    @property
    def graphdef(self) -> nnx.GraphDef:
        return nnx.graphdef(self.model)

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def describe(self) -> dict[str, Any]:
        """For config.json: the options, and what a user of the checkpoints needs to know."""
        return {
            "effjax": __version__,
            "options": dataclasses.asdict(self.config),
            "data": {
                "train_bytes": len(self.text.train),
                "test_bytes": len(self.text.test),
                "sha256": self.text.digest,
            },
        }


def prepare(config: LMConfig, devices: Devices | None = None, text: Text | None = None) -> LMJob:
    """Reads the text and checks what can be checked; writes nothing.

    Args:
      config: the options.
      devices: those to train on; default: all local ones.
      text: default: the one that `config.data` names.

    Raises:
      DataError: the text cannot be read, or is too short.
      TrainError: the batch does not fit the devices.
    """
    text = load_text(config.data) if text is None else text
    check_length(text, config.context)
    devices = local_devices() if devices is None else devices
    if config.batch_size % len(devices):
        smaller = config.batch_size // len(devices) * len(devices)
        raise TrainError(
            f"batch_size (={config.batch_size}) is not divisible by the number of devices "
            f"(={len(devices)}); use {smaller or len(devices)}"
        )
    if config.num_microbatches > 1 < len(devices):
        raise TrainError(
            f"num_microbatches (={config.num_microbatches}) is for one device, but there are "
            f"{len(devices)}"
        )
    schedule = make_lm_schedule(config.learning_rate, config.steps)
    optimizer = make_lm_optimizer(schedule, config.weight_decay)
    model = nnx.eval_shape(lambda: build(config))
    if config.offload == "none":
        apply = functools.partial(scan_layers, remat=True) if config.remat else scan_layers
        in_test = apply
    else:
        apply = apply_offloaded(config, config.num_microbatches)
        in_test = apply_offloaded(config)
    return LMJob(config, text, model, optimizer, schedule, apply, in_test, devices)


def build(config: LMConfig) -> TransformerLM:
    """The model of bytes, with the parameters that the seed draws."""
    return TransformerLM(
        vocab_size=256, num_layers=config.layers, width=config.width, num_heads=config.heads,
        use_bias=config.bias, dropout_rate=config.dropout, dtype=jnp.dtype(config.dtype),
        rngs=nnx.Rngs(config.seed),
    )  # fmt: skip


def initial_state(job: LMJob) -> LMState | OffloadedState:
    """Parameters drawn from the seed, and the optimizer's first state."""
    if layers_on_host(job.config):
        return initial_offloaded_state(job, data_mesh(job.devices))

    @jax.jit
    def init() -> LMState:
        params = nnx.to_pure_dict(nnx.state(build(job.config), nnx.Param))
        return LMState(jnp.int32(0), params, job.optimizer.init(params))

    return init()


def job_step(job: LMJob) -> Callable:
    """`(state, tokens, key) -> (state, loss)`, to be compiled."""
    if layers_on_host(job.config):
        return offloaded_step(job)
    return lm_step(job.graphdef, job.optimizer, job.apply_layers)
