"""A table of which token follows which, trained on packed batches by the training loop."""

import dataclasses
import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effjax.train.config import RunConfig
from effjax.train.data.chat import load_tokenizer
from effjax.train.data.packing import PackedSequences, eval_batches, pack, train_batches
from effjax.train.data.rows import FinetuneData, load_rows
from effjax.train.mesh import global_batch, local_rows, make_mesh, replicated, with_shardings
from effjax.train.task import Task

VOCAB_SIZE = 384


class State(NamedTuple):
    step: Any
    logits: Any  # [VOCAB_SIZE, VOCAB_SIZE], of the next token


def loss_sums(logits, batch):
    losses = -jax.nn.log_softmax(logits)[batch["tokens"], batch["labels"]]
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def mean_loss(logits, batch):
    total, weight = loss_sums(logits, batch)
    return total / weight


@dataclasses.dataclass(frozen=True, eq=False)
class BigramTask(Task[SimpleNamespace]):
    unit = "step"
    items = "tokens"

    data: FinetuneData
    train: PackedSequences
    validation: PackedSequences

    steps_per_unit = 1
    eval_steps = (4, 8, 10)

    @property
    def items_per_step(self):
        return self.config.batch_size * self.train.length

    def describe(self):
        return self.config.describe("", self.data.describe())

    def initial_state(self):
        logits = jnp.zeros((VOCAB_SIZE, VOCAB_SIZE))
        return jax.device_put(State(jnp.int32(0), logits), replicated(self.mesh))

    def shapes(self):
        shapes = jax.eval_shape(self.initial_state)
        return with_shardings(shapes, jax.tree.map(lambda _: replicated(self.mesh), shapes))

    def make_step(self):
        @jax.jit
        def step(state, batch, key):
            loss, grads = jax.value_and_grad(mean_loss)(state.logits, batch)
            return State(state.step + 1, state.logits - 20 * grads), loss

        return step

    def make_eval(self):
        size, sums = self.config.batch_size, jax.jit(loss_sums)
        rows = local_rows(size, self.mesh)

        def evaluate(state, part):
            parts = [
                sums(state.logits, global_batch(batch, size, self.mesh))
                for batch in eval_batches(self.validation, size, rows)
            ]
            total, weight = (float(sum(one)) for one in zip(*parts, strict=True))
            return {"loss": total / weight}

        return evaluate

    def batches(self, done):
        size = self.config.batch_size
        rows = local_rows(size, self.mesh)
        for batch in train_batches(self.train, size, self.config.seed, done, rows):
            yield global_batch(batch, size, self.mesh)

    def read(self, metrics):
        return {"loss": float(metrics)}

    def score(self, record):
        return (-record["validation_loss"],)

    def draw(self, axes, records):
        axes.plot([record["train_loss"] for record in records], label="train loss")

    def result(self, records, best, tested, began):
        return SimpleNamespace(losses=[record["train_loss"] for record in records], **tested)


class Config(RunConfig):
    COMMAND = "bigram"
    steps = 10


def bigram_task(folder, rows, devices=None):
    """Return a task of the rows of a file and the tokenizer of a checkpoint."""
    config = Config(data=str(rows), batch_size=4, learning_rate=1, weight_decay=0)
    tokenizer = load_tokenizer(folder, datetime.date(2026, 1, 2))
    data = load_rows(rows, tokenizer, 48, config.validation)
    parts = pack(data.train, 48), pack(data.validation, 48)
    return BigramTask(config, make_mesh(None, devices), lambda _: 1, data, *parts)
