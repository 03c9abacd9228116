"""A text to predict byte by byte, as a task for `effjax.train.loop`: counted in steps."""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ... import __version__
from ..data.text import (
    Text,
    check_length,
    hold_out,
    load_text,
    test_batches,
    train_batches,
)
from ..errors import TrainError
from ..mesh import (
    Devices,
    check_batch_size,
    global_batch,
    place,
    rows_here,
    run_mesh,
    with_shardings,
)
from ..task import Metrics, Part, Record, TrainStep
from .base import Base, find_base, with_weights
from .config import LMConfig
from .offloaded import OffloadedState, shardings_of
from .recipe import LMLearner, initial_state, make_learner, train_step
from .steps import LMState, compile_lm_step, make_lm_eval_step


@dataclasses.dataclass(frozen=True)
class LMResult:
    """What a run came to; losses are means over bytes, in nats.

    train_loss: of the last steps, as many as between two reports.
    test_loss: of the parameters after `best_step`.
    validation_loss: that by which this step is the best one; None without a validation text, where
        it is the last one.
    tokens_per_second: of training, the median of the reports; the first step after a start, which
        can include compilation, is not counted unless it is the only one.
    unigram_bits: bits per test byte without any context, to compare with.
    """

    train_loss: float
    test_loss: float
    test_bits_per_byte: float
    best_step: int
    validation_loss: float | None
    tokens_per_second: float
    unigram_bits: float
    num_params: int
    seconds: float


def prepare(
    config: LMConfig,
    devices: Devices | None = None,
    text: Text | None = None,
    resume: bool = False,
) -> "LMTask":
    """Reads the text and checks what can be checked; writes nothing.

    Args:
        config: the options.
        devices: those to train on; default: those of all processes.
        text: default: the one that `config.data` names.
        resume: the task is of a run that goes on; the one that it began with need not be there.

    Raises:
        DataError: the text cannot be read, or is too short.
        TrainError: the batch does not fit the devices, or the run to begin with not the model.
    """
    base = None if resume else find_base(config)
    if base is not None:  # the run can go on from another folder
        config = dataclasses.replace(config, init_from=os.path.realpath(base.run.path))
    text = hold_out(load_text(config.data) if text is None else text, config.validation)
    check_length(text, config.context)
    mesh = run_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    if config.num_microbatches > 1 < mesh.size:
        raise TrainError(
            f"num_microbatches (={config.num_microbatches}) is for one device, but there are "
            f"{mesh.size}"
        )
    return LMTask(config, text, make_learner(config, mesh), mesh, base)


@dataclasses.dataclass(frozen=True, eq=False)
class LMTask:
    """A `Task`; made by `prepare`. Nothing has been written yet."""

    config: LMConfig
    text: Text
    learner: LMLearner
    mesh: Mesh
    base: Base | None = None  # that a new run begins with

    @property
    def kind(self) -> str:
        return "step"

    @property
    def eval_steps(self) -> Sequence[int]:
        """After which steps the model is tested: every so many, and the last one."""
        steps, every = self.config.steps, self.config.report_every
        return [*range(every, steps, every), steps]

    @property
    def examples_per_step(self) -> int:
        return self.config.batch_size * self.config.context

    @property
    def fields(self) -> Sequence[str]:
        held_out = ("validation_loss",) if len(self.text.validation) else ()
        return "train_loss", "tokens_per_second", *held_out

    def describe(self) -> dict[str, Any]:
        held_out = {"validation_bytes": len(self.text.validation)}
        return self.config.describe(
            __version__,
            {
                "train_bytes": len(self.text.train),
                **(held_out if len(self.text.validation) else {}),
                "test_bytes": len(self.text.test),
                "sha256": self.text.digest,
            },
        )

    def initial_state(self) -> LMState | OffloadedState:
        base = self.base or find_base(self.config)  # a run may go on before its first checkpoint
        state = self._drawn()
        state = place(state, shardings_of(self.config, state, self.mesh))
        return state if base is None else with_weights(state, base, self.mesh)

    def shapes(self) -> LMState | OffloadedState:
        shapes = jax.eval_shape(self._drawn)
        return with_shardings(shapes, shardings_of(self.config, shapes, self.mesh))

    def _drawn(self) -> LMState | OffloadedState:
        return initial_state(self.learner, self.mesh)

    def make_step(self) -> TrainStep:
        return compile_lm_step(train_step(self.learner), self.mesh)

    def make_test(self) -> Callable[[LMState | OffloadedState, Part], Metrics]:
        learner = self.learner
        eval_step = make_lm_eval_step(learner.graphdef, self.mesh, learner.apply_layers_in_test)
        return lambda state, part: evaluate(self, eval_step, state, part)

    def batches(self, done: int) -> Iterator[jax.Array]:
        config, size = self.config, self.config.batch_size
        rows = rows_here(size, self.mesh)
        data = self.text.train
        for windows in train_batches(data, config.context, size, config.seed, done, rows):
            yield global_batch(windows, size, self.mesh)

    def read(self, metrics: jax.Array) -> Metrics:
        return {"loss": float(metrics)}

    def where(self, step: int) -> str:
        return f"at step {step}"

    def record(self, step: int, train: Metrics, validation: Metrics, rate: float) -> Record:
        return {
            "kind": "step", "step": step, "train_loss": train["loss"],
            "learning_rate": float(self.learner.learning_rate(step - 1)),
            "tokens_per_second": rate,
            **{f"validation_{name}": value for name, value in validation.items()},
        }  # fmt: skip

    def score(self, record: Record) -> tuple[float, ...]:
        return -record.get("validation_loss", 0), record["step"]

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """The loss on the train and on the validation part, by step."""
        x = [record["step"] for record in records]
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        for number, name in enumerate(("train", "validation")):
            if name == "train" or len(self.text.validation):
                losses = [r[f"{name}_loss"] for r in records]
                axes.plot(x, losses, f"C{number}.-", label=f"{name} loss")

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> LMResult:
        return LMResult(
            train_loss=records[-1]["train_loss"],
            test_loss=tested["loss"],
            test_bits_per_byte=tested["bits_per_byte"],
            best_step=best["step"],
            validation_loss=best.get("validation_loss"),
            tokens_per_second=statistics.median(r["tokens_per_second"] for r in records),
            unigram_bits=self.text.unigram_bits,
            num_params=self.learner.num_params,
            seconds=time.perf_counter() - began,
        )


def evaluate(task: LMTask, eval_step: Any, state: LMState | OffloadedState, part: Part) -> Metrics:
    """Mean loss over the windows of a part of the text; nothing of one without bytes."""
    data = getattr(task.text, part)
    if not len(data):
        return {}
    total, count = 0.0, 0.0
    config, size = task.config, task.config.batch_size
    rows = rows_here(size, task.mesh)
    for tokens, weights in test_batches(data, config.context, size):
        here = global_batch((tokens[rows], weights[rows]), size, task.mesh)
        total += float(eval_step(state.params, *here))
        count += float(weights.sum())
    loss = total / count
    return {"loss": loss, "bits_per_byte": loss / math.log(2)}
