"""Fine-tuning of a language model, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import datetime
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ... import __version__, offload_jit
from ...convert import save_adapter, save_checkpoint
from ...models import DecoderConfig
from ..data.chat import Tokenizer, load_tokenizer
from ..data.packing import Batch, PackedSequences, eval_batches, pack, train_batches
from ..data.rows import FinetuneData, load_rows
from ..decoder import LORA_A, LORA_B, DecoderLearner, DecoderState, make_optimizer, make_schedule
from ..errors import DataError, TrainError
from ..mesh import (
    AnyMesh,
    Devices,
    check_batch_size,
    global_batch,
    local_rows,
    make_mesh,
)
from ..processes import run_on_first
from ..run_directory import RunDirectory
from ..task import Metrics, Part, Record, Task, TrainStep
from .base import ADAPTER, MODEL, Base, find_base
from .config import FinetuneConfig

LoadProgress = Callable[[int, int], object]  # called with the bytes read and their total


@dataclasses.dataclass(frozen=True)
class FinetuneResult:
    """Result of a run. Losses are means over the tokens with loss, in nats.

    Attributes:
        train_loss: Mean over the steps between the last two reports.
        validation_loss: Loss of the parameters after `best_step`; None without validation.
        best_step: The step with the lowest validation loss, or the last one without validation.
        tokens_per_second: Median over the reports, without padding. The first step of each
            interval, which may include compilation, counts only if there is no other.
        num_params: The number of parameters of the model.
        num_trained: The number of trained parameters.
        exported: The folder with the parameters of `best_step`, within the run.
        seconds: The duration of the run.
    """

    train_loss: float
    validation_loss: float | None
    best_step: int
    tokens_per_second: float
    num_params: int
    num_trained: int
    exported: str
    seconds: float


def make_learner(config: FinetuneConfig, model: DecoderConfig, mesh: AnyMesh) -> DecoderLearner:
    """Create the learner of a configuration. Nothing is computed.

    Args:
        config: The options. `steps` must be a number.
        model: The model, with the dtype of the parameters.
        mesh: The devices.
    """
    assert config.steps is not None
    schedule = make_schedule(config.learning_rate, config.steps, config.warmup)
    optimizer = make_optimizer(
        schedule, config.weight_decay,
        bits=8 if config.optimizer == "adamw8bit" else 32, seed=config.seed,
    )  # fmt: skip
    return DecoderLearner(
        model=model, optimizer=optimizer, mesh=mesh, dtype=config.dtype, offload=config.offload,
        fuse_update=config.fuse_update, policy=config.policy,
        num_microbatches=config.num_microbatches, mlp_chunk_size=config.mlp_chunk_size,
        clip_norm=config.clip_norm or None, lora_rank=config.lora, lora_scale=config.lora_scale,
        skip_nonfinite=config.on_nan == "skip",
    )  # fmt: skip


def prepare(
    config: FinetuneConfig,
    devices: Devices | None = None,
    load_progress: LoadProgress | None = None,
    resume: bool = False,
) -> "FinetuneTask":
    """Read the data and check the options. Nothing is written, and no weights are read.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        load_progress: Called while the weights of the checkpoint are read.
        resume: Whether the weights will be those of a checkpoint of the run. The files of
            `config.checkpoint` are not checked then.

    Raises:
        DataError: The data or the checkpoint cannot be read, or do not belong to each other.
        TrainError: The batch does not fit the devices.
    """
    base = find_base(config.checkpoint, config.param_dtype)
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    config.check_devices(mesh.size)
    # Templates write a date. A run that continues needs the date of its beginning.
    date = _parse_date(config.date) if config.date else datetime.date.today()
    tokenizer = load_tokenizer(base.folder, date)
    data = load_rows(
        config.data, tokenizer, config.max_length, config.validation, config.validation_data
    )
    check_vocabulary(data, tokenizer, base)
    train, validation = (
        pack(part, config.max_length, config.packing) for part in (data.train, data.validation)
    )
    steps = config.steps or round_steps(config.epochs, len(train), config.batch_size)
    config = dataclasses.replace(
        config, checkpoint=str(base.folder), date=date.isoformat(), steps=steps
    )
    learner = make_learner(config, base.model, mesh)
    if not resume:  # otherwise the weights are those of the run
        base.check(*learner.model_shapes())
    schedule = make_schedule(config.learning_rate, steps, config.warmup)
    return FinetuneTask(
        config, mesh, schedule, base, data, train, validation, learner, load_progress
    )


def check_vocabulary(data: FinetuneData, tokenizer: Tokenizer, base: Base) -> None:
    """Raise DataError if the data contain a token that the model does not have."""
    largest = max(int(part.tokens.max(initial=0)) for part in (data.train, data.validation))
    if largest >= base.model.vocab_size:
        token = tokenizer.backend.id_to_token(largest)
        raise DataError(
            f"{base.folder}: its tokenizer and its config.json belong to different models. Token "
            f"{largest} ({token!r}) of the data is not below `vocab_size` "
            f"(={base.model.vocab_size})."
        )


def round_steps(epochs: int, num_rows: int, batch_size: int) -> int:
    """Return the number of steps whose batches have about as many rows as some epochs."""
    return max(round(epochs * num_rows / batch_size), 1)


def _parse_date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise TrainError(f"`date` (={text!r}) must be like 2026-01-31") from error


@dataclasses.dataclass(frozen=True, eq=False)
class FinetuneTask(Task[FinetuneResult]):
    """A run on rows of JSON, from `prepare`."""

    unit = "step"
    items = "tokens"

    config: FinetuneConfig
    base: Base
    data: FinetuneData
    train: PackedSequences
    validation: PackedSequences
    learner: DecoderLearner
    load_progress: LoadProgress | None = None

    @property
    def steps_per_unit(self) -> int:
        return 1

    @property
    def eval_steps(self) -> Sequence[int]:
        config = self.config
        assert config.steps is not None
        every = config.report_every or max(len(self.train) / config.batch_size, 1)
        steps = [round(i * every) for i in range(1, int(config.steps / every) + 1)]
        return [*(step for step in steps if step < config.steps), config.steps]

    @property
    def items_per_step(self) -> int:
        return round(self.config.batch_size * self.train.length * self.train.efficiency)

    def describe(self) -> dict[str, Any]:
        description = self.config.describe(__version__, self.data.describe())
        return description | {"base": self.base.fingerprint}

    def initial_state(self) -> DecoderState:
        params = self.base.load(*self.learner.model_shapes(), progress=self.load_progress)
        return self.learner.initial_state(*params, seed=self.config.seed)

    def shapes(self) -> DecoderState:
        return self.learner.shapes()

    def make_step(self) -> TrainStep:
        # Each array keeps its sharding and its memory.
        return offload_jit(self.learner.train_step())

    def make_eval(self) -> Callable[[DecoderState, Part], Metrics]:
        eval_step = offload_jit(self.learner.eval_step(), donate=False)
        # As many rows as a training step has on the device at a time.
        size = self.config.batch_size // self.config.num_microbatches
        rows = local_rows(size, self.mesh)

        def evaluate(state: DecoderState, part: Part) -> Metrics:
            if part == "test" or not len(self.validation):
                return {}
            total, weight = 0.0, 0.0
            for batch in eval_batches(self.validation, size, rows):
                sums = eval_step(
                    state.model.layers, state.model.others, global_batch(batch, size, self.mesh)
                )
                total, weight = total + float(sums[0]), weight + float(sums[1])
            return {"loss": total / weight}

        return evaluate

    def batches(self, done: int) -> Iterator[Batch]:
        size = self.config.batch_size
        rows = local_rows(size, self.mesh)
        for batch in train_batches(self.train, size, self.config.seed, done, rows):
            yield global_batch(batch, size, self.mesh)

    def read(self, metrics: jax.Array) -> Metrics:
        return {"loss": float(metrics)}

    def score(self, record: Record) -> tuple[float, ...]:
        return -record.get("validation_loss", 0), record["step"]

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        x = [record["step"] for record in records]
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        for number, name in enumerate(("train", "validation")):
            if name == "train" or len(self.validation):
                losses = [record[f"{name}_loss"] for record in records]
                axes.plot(x, losses, f"C{number}.-", label=f"{name} loss")

    @property
    def exported(self) -> str:
        """The name of the folder that `finish` writes."""
        return MODEL if self.config.lora is None else ADAPTER

    def finish(self, state: DecoderState, run: RunDirectory) -> None:
        # A run that was resumed with more steps has an older export.
        folder = run.path / self.exported
        run_on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
        layers, others = state.model.layers, state.model.others
        if self.config.lora is None:
            save_checkpoint(folder, layers, others, self.base.model.to_json())
            run_on_first(lambda: self.base.copy_tokenizer(folder))
            return
        adapters = {name: a for name, a in layers.items() if name.endswith((LORA_A, LORA_B))}
        save_adapter(folder, adapters, self.learner.lora_scale, base_model=str(self.base.folder))

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> FinetuneResult:
        return FinetuneResult(
            train_loss=records[-1]["train_loss"],
            validation_loss=best.get("validation_loss"),
            best_step=best["step"],
            tokens_per_second=statistics.median(r["tokens_per_second"] for r in records),
            num_params=self.learner.num_params,
            num_trained=self.learner.num_trained,
            exported=self.exported,
            seconds=time.perf_counter() - began,
        )
