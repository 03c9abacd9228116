"""Prediction of the bytes of a text, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ... import __version__, offload_jit
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
    local_rows,
    make_mesh,
    put,
    with_shardings,
)
from ..task import Metrics, Part, Record, Task, TrainStep
from .config import LMConfig
from .source_run import SourceRun, find_source, restore_weights
from .steps import LMLearner, LMState, OffloadedState, make_learner, make_lm_schedule

State = LMState | OffloadedState


@dataclasses.dataclass(frozen=True)
class LMResult:
    """Result of a run. Losses are means over bytes, in nats.

    Attributes:
        train_loss: Mean over the steps between the last two reports.
        test_loss: Of the parameters after `best_step`.
        test_bits_per_byte: The same in bits.
        best_step: The step with the lowest validation loss, or the last one without validation.
        validation_loss: Of `best_step`; None without validation.
        tokens_per_second: Median over the reports. The first step of each interval, which may
            include compilation, counts only if there is no other.
        unigram_bits: Bits per test byte of a model without context, for comparison.
        num_params: The number of parameters.
        seconds: The duration of the run.
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
    """Read the text and check the options. Nothing is written.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        text: The default is that of `config.data`.
        resume: The task is that of a run that continues, which does not need `config.init_from`.

    Raises:
        DataError: The text cannot be read, or is too short.
        TrainError: The batch does not fit the devices, or `config.init_from` not the model.
    """
    source = None if resume else find_source(config)
    if source is not None:  # an absolute path: the run may be resumed in another folder
        config = dataclasses.replace(config, init_from=os.path.realpath(source.run.path))
    text = hold_out(load_text(config.data) if text is None else text, config.validation)
    check_length(text, config.context)
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    if config.num_microbatches > 1 < mesh.size:
        raise TrainError(
            f"`num_microbatches` (={config.num_microbatches}) needs a single device, not "
            f"{mesh.size}"
        )
    schedule = make_lm_schedule(config.learning_rate, config.steps)
    return LMTask(config, mesh, schedule, text, make_learner(config, mesh), source)


@dataclasses.dataclass(frozen=True, eq=False)
class LMTask(Task[LMResult]):
    """A run on text, from `prepare`."""

    unit = "step"
    items = "tokens"

    config: LMConfig
    text: Text
    learner: LMLearner
    source: SourceRun | None = None  # whose weights a new run starts with

    @property
    def steps_per_unit(self) -> int:
        return 1

    @property
    def eval_steps(self) -> Sequence[int]:
        steps, every = self.config.steps, self.config.report_every
        return [*range(every, steps, every), steps]

    @property
    def items_per_step(self) -> int:
        return self.config.batch_size * self.config.context

    def describe(self) -> dict[str, Any]:
        data = {"train_bytes": len(self.text.train)}
        if len(self.text.validation):
            data["validation_bytes"] = len(self.text.validation)
        data |= {"test_bytes": len(self.text.test), "sha256": self.text.digest}
        return self.config.describe(__version__, data)

    def initial_state(self) -> State:
        # A resumed run may have stopped before its first checkpoint.
        source = self.source or find_source(self.config)
        state = self.learner.initial_state(self.mesh)
        # The parameters are sharded already. The step and the counts of the optimizer in
        # `OffloadedState` are not.
        state = put(state, self.learner.shardings(state, self.mesh))
        return state if source is None else restore_weights(state, source, self.mesh)

    def shapes(self) -> State:
        shapes = jax.eval_shape(lambda: self.learner.initial_state(self.mesh))
        return with_shardings(shapes, self.learner.shardings(shapes, self.mesh))

    def make_step(self) -> TrainStep:
        # Each array keeps its sharding and its memory.
        return offload_jit(self.learner.train_step())

    def make_eval(self) -> Callable[[State, Part], Metrics]:
        eval_step = offload_jit(self.learner.eval_step(), donate=False)
        context, size = self.config.context, self.config.batch_size
        rows = local_rows(size, self.mesh)

        def test(state: State, part: Part) -> Metrics:
            total, count = 0.0, 0.0
            data = getattr(self.text, part)
            if not len(data):
                return {}
            for tokens, weights in test_batches(data, context, size):
                batch = global_batch((tokens[rows], weights[rows]), size, self.mesh)
                total += float(eval_step(state.params, *batch))
                count += float(weights.sum())
            loss = total / count
            return {"loss": loss, "bits_per_byte": loss / math.log(2)}

        return test

    def batches(self, done: int) -> Iterator[jax.Array]:
        config, size = self.config, self.config.batch_size
        rows, data = local_rows(size, self.mesh), self.text.train
        for windows in train_batches(data, config.context, size, config.seed, done, rows):
            yield global_batch(windows, size, self.mesh)

    def read(self, metrics: jax.Array) -> Metrics:
        return {"loss": float(metrics)}

    def score(self, record: Record) -> tuple[float, ...]:
        return -record.get("validation_loss", 0), record["step"]

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
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
