"""Prediction of the bytes of a text, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ... import __version__, offload_jit
from ..data.text import (
    Text,
    check_length,
    hold_out,
    load_text,
    test_batches,
    train_batches,
)
from ..decoder import DecoderLearner, DecoderState, make_schedule
from ..mesh import Devices, check_batch_size, global_batch, local_rows, make_mesh
from ..task import Metrics, Part, Record, Task, TrainStep
from .config import LMConfig
from .model import make_learner

Batch = dict[str, Any]  # arrays [batch_size, context]


@dataclasses.dataclass(frozen=True)
class LMResult:
    """Result of a run. Losses are means over bytes, in nats.

    Attributes:
        train_loss: Mean over the steps between the last two reports.
        test_loss: Loss of the parameters after `best_step`.
        test_bits_per_byte: The same in bits.
        best_step: The step with the lowest validation loss, or the last one without validation.
        validation_loss: Loss of the parameters after `best_step`; None without validation.
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
) -> "LMTask":
    """Read the text and check the options. Nothing is written.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        text: The default is that of `config.data`.

    Raises:
        DataError: The text cannot be read, or is too short.
        TrainError: The batch does not fit the devices.
    """
    text = hold_out(load_text(config.data) if text is None else text, config.validation)
    check_length(text, config.context)
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    config.check_devices(mesh.size)
    schedule = make_schedule(config.learning_rate, config.steps)
    return LMTask(config, mesh, schedule, text, make_learner(config, mesh))


@dataclasses.dataclass(frozen=True, eq=False)
class LMTask(Task[LMResult]):
    """A run on text, from `prepare`."""

    unit = "step"
    items = "tokens"

    config: LMConfig
    text: Text
    learner: DecoderLearner

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

    def initial_state(self) -> DecoderState:
        return self.learner.initial_state(*self.learner.random_params(self.config.seed))

    def shapes(self) -> DecoderState:
        return self.learner.shapes()

    def make_step(self) -> TrainStep:
        # Each array keeps its sharding and its memory.
        return offload_jit(self.learner.train_step())

    def make_eval(self) -> Callable[[DecoderState, Part], Metrics]:
        eval_step = offload_jit(self.learner.eval_step(), donate=False)
        context, size = self.config.context, self.config.batch_size
        rows = local_rows(size, self.mesh)

        def evaluate(state: DecoderState, part: Part) -> Metrics:
            total, count = 0.0, 0.0
            data = getattr(self.text, part)
            if not len(data):
                return {}
            for windows, weights in test_batches(data, context, size):
                local = _split(windows[rows])
                local["weights"] = weights[rows, None].repeat(context, 1)
                batch = global_batch(local, size, self.mesh)
                sums = eval_step(state.model.layers, state.model.others, batch)
                total, count = total + float(sums[0]), count + float(sums[1])
            loss = total / count
            return {"loss": loss, "bits_per_byte": loss / math.log(2)}

        return evaluate

    def batches(self, done: int) -> Iterator[Batch]:
        config, size = self.config, self.config.batch_size
        rows, data = local_rows(size, self.mesh), self.text.train
        for windows in train_batches(data, config.context, size, config.seed, done, rows):
            yield global_batch(_split(windows), size, self.mesh)

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


def _split(windows: np.ndarray) -> Batch:
    """Return the tokens of windows [N, T + 1], and the next tokens."""
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}
