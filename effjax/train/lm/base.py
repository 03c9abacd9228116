"""The run whose weights another one begins with."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ..checkpoint import Checkpoints
from ..errors import DamagedCheckpointError, TrainError, unreadable
from ..mesh import with_shardings
from ..run_directory import RunDirectory
from .config import LMConfig
from .offloaded import OffloadedState, shardings_of
from .recipe import initial_state, make_learner
from .steps import LMState

SHAPES = "layers", "width", "heads", "bias"  # options of which the weights are


class Base(NamedTuple):
    """A run, and the step whose weights are taken."""

    run: RunDirectory
    config: LMConfig
    step: int

    def check_apart(self, out: Path) -> None:
        """Raises `TrainError` if a new run in `out` could overwrite this one."""
        begun = Path(os.path.realpath(out))
        for path in (self.run.path, self.run.checkpoints):
            kept = Path(os.path.realpath(path))
            if begun.is_relative_to(kept) or kept.is_relative_to(begun):
                raise TrainError(
                    f"--out {out} and --init-from {self.run.path} are the same, or one lies in the "
                    "other; give another --out"
                )


def find_base(config: LMConfig) -> Base | None:
    """The best step of the run `init_from`, if there is one.

    Raises:
        TrainError: that is no run, one of another model, or one without a checkpoint; adapters
            without such a run.
    """
    if config.init_from is None:
        if config.lora is not None:
            raise TrainError(
                f"lora (={config.lora}) trains beside the weights of a run; give it with init_from"
            )
        return None
    run = RunDirectory.find(Path(config.init_from))
    options = run.config.get("options")
    try:
        base = LMConfig.from_json(options)
    except TrainError as error:
        raise TrainError(f"{run.path}: {error}") from error
    if base.lora is not None:
        raise TrainError(
            f"{run.path}: has adapters of its own; give the run that it began with, "
            f"{base.init_from}"
        )
    if any(getattr(base, name) != getattr(config, name) for name in SHAPES):
        bias = "--bias" if base.bias else "--no-bias"
        raise TrainError(
            f"{run.path}: is of another model; give --layers {base.layers} --width {base.width} "
            f"--heads {base.heads} {bias}"
        )
    try:
        with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            evaluated = checkpoints.evaluated_steps
    except OSError as error:
        raise unreadable(run.checkpoints, error) from error
    if not evaluated:
        raise TrainError(f"{run.path}: has no checkpoint of a step yet; train it first")
    return Base(run, base, evaluated[0])


def with_weights(
    state: LMState | OffloadedState, base: Base, mesh: Mesh
) -> LMState | OffloadedState:
    """The state with the weights of another run in the place of its own, each array where it is."""

    def put(param: Any, weights: Any) -> Any:
        if isinstance(param, jax.Array):
            return jax.device_put(weights, param.sharding)
        return {name: put(p, weights[name]) if name in weights else p for name, p in param.items()}

    learner = make_learner(base.config, mesh)
    shapes = jax.eval_shape(lambda: initial_state(learner, mesh))
    # To the host: what the optimizer keeps is not wanted, and need not fit on a device.
    where = shardings_of(base.config, shapes, mesh)
    where = jax.tree.map(lambda to: to.with_memory_kind("pinned_host"), where)
    shapes = with_shardings(shapes, where)
    with Checkpoints(base.run.checkpoints, read_only=True) as checkpoints:
        try:
            weights = checkpoints.restore(shapes, base.step).params
        except DamagedCheckpointError as error:
            raise TrainError(f"{error}; give another run") from error
    return state.with_params(put(state.params, weights))
