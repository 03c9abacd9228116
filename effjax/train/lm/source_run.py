"""Weights of another run, for `--init-from`."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ..checkpoint import Checkpoints
from ..errors import TrainError, unreadable
from ..mesh import with_shardings
from ..run_directory import RunDirectory
from .config import LMConfig
from .steps import LMState, OffloadedState, make_learner

# The options that the shapes of the weights depend on.
MODEL_OPTIONS = "layers", "width", "heads", "bias"


class SourceRun(NamedTuple):
    """A run, and the step that its weights are read from."""

    run: RunDirectory
    config: LMConfig
    step: int

    def check_apart(self, out: Path) -> None:
        """Raise TrainError if a new run in `out` could overwrite this one."""
        new = Path(os.path.realpath(out))
        for path in (self.run.path, self.run.checkpoints):
            source = Path(os.path.realpath(path))
            if new.is_relative_to(source) or source.is_relative_to(new):
                raise TrainError(
                    f"--out {out} and --init-from {self.run.path} are the same, or one lies in the "
                    "other. Give another --out."
                )


def find_source(config: LMConfig) -> SourceRun | None:
    """Find the best step of the run `config.init_from`, if that is given.

    Raises:
        TrainError: It is not a run, was trained with other model options, has adapters or has no
            evaluated checkpoint; or `lora` is given without it.
    """
    if config.init_from is None:
        if config.lora is not None:
            raise TrainError(f"`lora` (={config.lora}) needs `init_from`, the weights to adapt")
        return None
    run = RunDirectory.find(Path(config.init_from))
    try:
        source = LMConfig.from_json(run.read_config().get("options"))
    except TrainError as error:
        raise TrainError(f"{run.path}: {error}") from error
    if source.lora is not None:
        raise TrainError(
            f"{run.path} has adapters. Give the run that it started from, {source.init_from}."
        )
    if any(getattr(source, name) != getattr(config, name) for name in MODEL_OPTIONS):
        bias = "--bias" if source.bias else "--no-bias"
        raise TrainError(
            f"{run.path} was trained with other model options. Use --layers {source.layers} "
            f"--width {source.width} --heads {source.heads} {bias}."
        )
    try:
        with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            best_first = checkpoints.evaluated_steps
    except OSError as error:
        raise unreadable(run.checkpoints, error) from error
    if not best_first:
        raise TrainError(f"{run.path} has no evaluated checkpoint yet. Train it first.")
    return SourceRun(run, source, best_first[0])


def restore_weights(
    state: LMState | OffloadedState, source: SourceRun, mesh: Mesh
) -> LMState | OffloadedState:
    """Return the state with the weights of another run, each array with the same sharding."""

    def put(param: Any, weights: Any) -> Any:
        if isinstance(param, jax.Array):
            return jax.device_put(weights, param.sharding)
        return {name: put(p, weights[name]) if name in weights else p for name, p in param.items()}

    learner = make_learner(source.config, mesh)
    shapes = jax.eval_shape(lambda: learner.initial_state(mesh))
    # To the host: the state of the optimizer is not needed, and may not fit on the device.
    shardings = jax.tree.map(
        lambda sharding: sharding.with_memory_kind("pinned_host"), learner.shardings(shapes, mesh)
    )
    with Checkpoints(source.run.checkpoints, read_only=True) as checkpoints:
        weights = checkpoints.restore(with_shardings(shapes, shardings), source.step).params
    return state.with_params(put(state.params, weights))
