"""Prediction of the bytes of a text, as a task of the training loop."""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

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
from ..task import Metrics, Part, Record, TrainStep
from .base import Base, find_base, restore_weights
from .config import LMConfig
from .steps import LMLearner, LMState, OffloadedState, make_learner

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
        tokens_per_second: Median over the reports. The first step after a start, which may include
            compilation, counts only if there is no other.
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
    base = None if resume else find_base(config)
    if base is not None:  # an absolute path: the run may be resumed in another folder
        config = dataclasses.replace(config, init_from=os.path.realpath(base.run.path))
    text = hold_out(load_text(config.data) if text is None else text, config.validation)
    check_length(text, config.context)
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    if config.num_microbatches > 1 < mesh.size:
        raise TrainError(
            f"num_microbatches (={config.num_microbatches}) needs a single device, not {mesh.size}"
        )
    return LMTask(config, text, make_learner(config, mesh), mesh, base)


@dataclasses.dataclass(frozen=True, eq=False)
class LMTask:
    """The `Task` of a run on text, from `prepare`."""

    config: LMConfig
    text: Text
    learner: LMLearner
    mesh: Mesh
    base: Base | None = None  # whose weights a new run starts with

    @property
    def kind(self) -> str:
        """The unit of the run's length."""
        return "step"

    @property
    def eval_steps(self) -> Sequence[int]:
        """The steps after which the model is validated and saved."""
        steps, every = self.config.steps, self.config.report_every
        return [*range(every, steps, every), steps]

    @property
    def examples_per_step(self) -> int:
        """The number of examples in a batch."""
        return self.config.batch_size * self.config.context

    def describe(self) -> dict[str, Any]:
        """Return the content of config.json."""
        data = {"train_bytes": len(self.text.train)}
        if len(self.text.validation):
            data["validation_bytes"] = len(self.text.validation)
        data |= {"test_bytes": len(self.text.test), "sha256": self.text.digest}
        return self.config.describe(__version__, data)

    def initial_state(self) -> State:
        """Return the state before the first step."""
        # A resumed run may have stopped before its first checkpoint.
        base = self.base or find_base(self.config)
        state = self.learner.initial_state(self.mesh)
        state = put(state, self.learner.shardings(state, self.mesh))
        return state if base is None else restore_weights(state, base, self.mesh)

    def shapes(self) -> State:
        """Return the shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(lambda: self.learner.initial_state(self.mesh))
        return with_shardings(shapes, self.learner.shardings(shapes, self.mesh))

    def make_step(self) -> TrainStep:
        """Compile a training step, in which each array keeps its sharding and its memory."""
        return offload_jit(self.learner.train_step())

    def make_test(self) -> Callable[[State, Part], Metrics]:
        """Compile an evaluation."""
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
        """Yield the batches after `done` steps, without end."""
        config, size = self.config, self.config.batch_size
        rows, data = local_rows(size, self.mesh), self.text.train
        for windows in train_batches(data, config.context, size, config.seed, done, rows):
            yield global_batch(windows, size, self.mesh)

    def read(self, metrics: jax.Array) -> Metrics:
        """Wait for a step and return its metrics."""
        return {"loss": float(metrics)}

    def where(self, step: int) -> str:
        """Return the position of a step for a message."""
        return f"at step {step}"

    def record(self, step: int, train: Metrics, validation: Metrics, rate: float) -> Record:
        """Return the record of an evaluation."""
        return {
            "kind": "step", "step": step, "train_loss": train["loss"],
            "learning_rate": float(self.learner.learning_rate(step - 1)),
            "tokens_per_second": rate,
            **{f"validation_{name}": value for name, value in validation.items()},
        }  # fmt: skip

    def score(self, record: Record) -> tuple[float, ...]:
        """Return the score of a record; higher is better."""
        return -record.get("validation_loss", 0), record["step"]

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """Plot the records."""
        x = [record["step"] for record in records]
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        for number, name in enumerate(("train", "validation")):
            if name == "train" or len(self.text.validation):
                losses = [r[f"{name}_loss"] for r in records]
                axes.plot(x, losses, f"C{number}.-", label=f"{name} loss")

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> LMResult:
        """Return the result of the run."""
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
