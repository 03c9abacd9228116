"""The model, the optimizer and the training step of a run of a detector. No data are read."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ...models import RTDetr
from ...models.detection import (
    DetectorOutput,
    Predictions,
    Targets,
    decode_detections,
    detection_loss,
    make_denoising_queries,
)
from ...models.rt_detr_config import RTDetrConfig
from ..errors import DataError
from ..files import read_json
from ..images.steps import Learner, TrainState, abstract_rngs
from ..mesh import batch_sharding, gather_params, replicated
from ..text.hub import download, parse_name
from .config import DetectorConfig
from .data import Batch

NUM_DETECTIONS = 300  # of each image that are compared with its objects
NO_LOGIT = -1e9  # of an object that cannot be


def read_model(name: str) -> tuple[RTDetrConfig, str]:
    """Return the configuration of an RT-DETR and its full name; raise DataError.

    The full name of a folder is absolute, and that of a name on the Hub has the commit.
    """
    folder, repository = Path(name), parse_name(name)
    if repository is not None:
        folder, repository = download(repository, ("config.json",))
    try:
        config = RTDetrConfig.from_dict(read_json(folder / "config.json"))
        return config, str(repository or os.path.realpath(folder))
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder / 'config.json'}: {error}") from error


def model_options(config: DetectorConfig) -> dict[str, Any]:
    """Return the arguments of `RTDetr` that options of a run determine."""
    return dict(
        frozen_norms=config.freeze_norms, efficient=config.efficient, save=config.save,
        dtype=jnp.dtype(config.dtype),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class DetectorLearner(Learner):
    """A detector split by `nnx.split`, and its optimizer."""

    model: RTDetrConfig
    arrays: Sequence[nnx.State]  # shapes of the parameters and of the running statistics

    @property
    def trained(self) -> Any:
        """The nnx filter of the parameters."""
        return nnx.Param

    def loss(self, params: nnx.State, stats: nnx.State, batch: Batch, key: jax.Array) -> Any:
        """Return the loss of a batch, and the new running statistics beside None."""
        model: Any = nnx.merge(self.graphdef, params, stats, copy=True)
        targets = Targets(batch.labels, batch.boxes)
        denoising = make_denoising_queries(key, targets, config=self.model)
        output = model(self.normalize(batch.images), denoising)
        loss, _ = detection_loss(output, targets, config=self.model)
        _, _, stats = nnx.split(model, self.trained, ...)
        return loss, (stats, None)

    def shapes(self) -> TrainState:
        """Return the shapes of the state."""
        return jax.eval_shape(self.init, *self.arrays)


def make_learner(
    config: DetectorConfig, model: RTDetrConfig, schedule: optax.Schedule
) -> DetectorLearner:
    """Return what a training step needs."""
    made: Any = nnx.eval_shape(lambda: RTDetr(model, **model_options(config), rngs=abstract_rngs()))
    made.eval()
    eval_graphdef = nnx.graphdef(made)
    made.train()
    graphdef, *arrays = nnx.split(made, nnx.Param, ...)
    pixels = np.zeros(3, np.float32), np.ones(3, np.float32)  # only scaled, to [0, 1]
    optimizer = make_adamw(config, schedule)
    return DetectorLearner(config, graphdef, eval_graphdef, optimizer, *pixels, model, arrays)


def make_adamw(config: DetectorConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return AdamW with a lower rate of the backbone, and no weight decay of norms and biases."""

    def is_kernel(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    def is_backbone(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[0].key == "backbone", params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.adamw(schedule, weight_decay=config.weight_decay, mask=is_kernel),
        optax.masked(optax.scale(config.backbone_rate), is_backbone),
    )


def make_eval_step(learner: DetectorLearner, mesh: Mesh, shardings: Any) -> Callable[..., Any]:
    """Compile `(state, batch, sizes, is_image) -> (loss, number of objects, detections)`.

    The loss is a sum. `sizes` [N, 2] are heights and widths in pixels. `is_image` [N] is False for
    the padding of the last batch, which has no loss. Detections are those of `decode_detections`.
    """
    num = min(NUM_DETECTIONS, learner.model.num_queries * learner.model.num_labels)

    def step(state: TrainState, batch: Batch, sizes: jax.Array, is_image: jax.Array) -> Any:
        params = gather_params(state.params, mesh)
        model: Any = nnx.merge(learner.eval_graphdef, params, state.stats)
        output = model(learner.normalize(batch.images))

        def mask(found: Predictions) -> Predictions:
            return found._replace(logits=jnp.where(is_image[:, None, None], found.logits, NO_LOGIT))

        output = DetectorOutput(tuple(map(mask, output.layers)), mask(output.encoder))
        labels = jnp.where(is_image[:, None], batch.labels, -1)
        loss, _ = detection_loss(output, Targets(labels, batch.boxes), config=learner.model)
        count = jnp.sum(labels >= 0)
        detections = decode_detections(output.layers[-1], sizes, num)
        return loss * jnp.maximum(count, 1), count, detections

    rows = batch_sharding(mesh)
    return jax.jit(step, in_shardings=(shardings, rows, rows, rows), out_shardings=replicated(mesh))
