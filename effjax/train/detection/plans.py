"""Training steps of detectors for the planner, and options that trade time for memory.

No data and no weights are read; of a model only config.json.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ...models.rt_detr_config import RTDetrConfig
from ..images.plans import recomputation_choices, recomputation_forms
from ..images.plans import smaller_configs as smaller_configs
from ..images.steps import jit_step, state_shardings
from ..mesh import planning_mesh
from ..optimizers import make_schedule
from ..task import Form, MemoryChoices
from .config import DetectorConfig
from .data import Batch
from .steps import make_learner, read_model

COCO = tuple(f"LABEL_{i}" for i in range(80))  # the classes of a plan without a model
MAX_OBJECTS = 100  # of an image; COCO has at most 93


def training_step(
    config: DetectorConfig, num_devices: int = 1, model: RTDetrConfig | None = None
) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`.

    The images have the largest of the sizes in training. If `model` is None, it is that of
    `weights`, or RT-DETR with a ResNet-50.
    """
    config, mesh = config.resolve(), planning_mesh(config.mesh, num_devices)
    if model is None:
        model = read_model(config.weights)[0] if config.weights else RTDetrConfig(id2label=COCO)
    # The length of the schedule does not change the memory of a step.
    schedule = make_schedule(config.schedule, config.learning_rate, 1000, config.warmup)
    learner, side = make_learner(config, model, schedule), config.train_sizes[-1]
    targets = config.batch_size, min(MAX_OBJECTS, model.num_queries)
    shapes = (config.batch_size, side, side, 3), targets, (*targets, 4)
    batch = Batch(*map(jax.ShapeDtypeStruct, shapes, (jnp.uint8, jnp.int32, jnp.float32)))
    state, key = learner.shapes(), jax.eval_shape(lambda: jax.random.key(0))
    return jit_step(learner, mesh, state_shardings(state, mesh)), state, batch, key


def forms(config: DetectorConfig, given: Collection[str], num_devices: int = 1) -> dict[str, Form]:
    """Return the forms of the step to compare, as `forms` of images does."""
    step = functools.partial(training_step, num_devices=num_devices)
    return recomputation_forms(config, given, step)


def memory_choices(
    config: DetectorConfig, given: Collection[str] = (), num_devices: int = 1
) -> MemoryChoices:
    """Return the options of a run that trade time for memory, as `memory_choices` of images."""
    step = functools.partial(training_step, num_devices=num_devices)
    return recomputation_choices(config, given, step)
