"""Fine-tuning of a language model, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import datetime
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._version import __version__
from ...convert import save_adapter, save_checkpoint
from ...ops.offload import offload_jit
from ..errors import DataError, TrainError, counted
from ..mesh import Devices, check_batch_size, global_batch, local_rows, make_mesh
from ..run_directory import RunDirectory
from ..task import SAMPLES, Metrics, Part, Record, Task, TrainStep, report_steps
from .base import ADAPTER, MODEL, Base, find_base, load_adapters
from .chat import CHAT_TEMPLATE, Tokenizer, load_tokenizer
from .config import TRAINED_ON, FinetuneConfig
from .learner import (
    LORA_A,
    LORA_B,
    DecoderLearner,
    DecoderState,
    Loss,
    learning_rate_schedule,
    make_learner,
)
from .packing import (
    Batch,
    PackedPairs,
    PackedRows,
    eval_batches,
    number_rows,
    pack,
    pack_pairs,
    train_batches,
)
from .rows import FinetuneData, load_rows
from .samples import Samples, read_prompts

LoadProgress = Callable[[int, int], object]  # called with the bytes read and their total


@dataclasses.dataclass(frozen=True)
class TextResult:
    """Result of a run. Losses are means over the tokens with loss, or over pairs, in nats.

    Attributes:
        train_loss: Mean over the steps between the last two reports.
        best_step: The step with the lowest validation loss, or the last one without validation.
        validation_loss: Loss of the parameters after `best_step`; None without validation.
        tokens_per_second: Median over the reports, without padding. The first step of each
            interval, which may include compilation, counts only if there is no other.
        num_params: The number of parameters of the model.
        num_trained: The number of trained parameters.
        exported: The folder with the parameters of `best_step`, within the run.
        seconds: The duration of the run.
    """

    train_loss: float
    best_step: int
    validation_loss: float | None
    tokens_per_second: float
    num_params: int
    num_trained: int
    exported: str
    seconds: float


def prepare(
    config: FinetuneConfig,
    devices: Devices | None = None,
    load_progress: LoadProgress | None = None,
    resume: bool = False,
    loss: Loss | None = None,
) -> "TextTask":
    """Read the data and check the options. Nothing is written, and no weights are read.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        load_progress: Called while the weights of the checkpoint are read.
        resume: Whether the weights will be those of a checkpoint of the run. The files of
            `config.checkpoint` are not checked then.
        loss: The loss in place of the cross entropy, ``(logits, batch) -> (loss_sum, weight)``.

    Raises:
        DataError: The data or the checkpoint cannot be read, or do not belong to each other.
        TrainError: The options do not fit each other or the devices.
    """
    config = config.resolve()
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    config.check_devices(mesh.size)
    if config.has_pairs and loss is not None:
        raise TrainError("`loss` (=dpo) cannot be combined with a function as the loss")
    config, data, base, tokenizer = _read_rows(config)
    learner = make_learner(config, base.model, mesh, loss)
    samples = read_prompts(config, base, tokenizer)
    if not resume:  # otherwise the weights are those of the run
        base.check(*learner.model_shapes())
    schedule = learning_rate_schedule(config)
    ends = data.source.end_tokens | tokenizer.turn_ends()
    names = {token: tokenizer.backend.id_to_token(token) for token in sorted(ends)}
    return TextTask(config, mesh, schedule, data, base, learner, load_progress, samples, names)


def find_tokenizer(config: FinetuneConfig) -> tuple[FinetuneConfig, Base, Tokenizer]:
    """Return the options with the checkpoint and the date, the checkpoint, and its tokenizer.

    Raises:
        DataError, TrainError: as for `prepare`.
    """
    if not config.checkpoint or not config.data:
        missing = "`data`" if config.checkpoint else "CHECKPOINT"
        raise TrainError(f"{missing} is missing. Use effjax finetune CHECKPOINT --data FILE.jsonl.")
    base = find_base(config.checkpoint, config.stored_dtype)
    # Templates write a date. A run that continues needs the date of its beginning.
    try:
        date = datetime.date.fromisoformat(config.date) if config.date else datetime.date.today()
    except ValueError as error:
        raise TrainError(f"`date` (={config.date!r:.120}) must be like 2026-01-31") from error
    tokenizer = load_tokenizer(base.folder, date, config.chat_template)
    return dataclasses.replace(config, checkpoint=base.path, date=date.isoformat()), base, tokenizer


def _read_rows(config: FinetuneConfig) -> tuple[FinetuneConfig, PackedRows, Base, Tokenizer]:
    """Return the options that the data determine, too, the rows, the checkpoint and tokenizer."""
    config, base, tokenizer = find_tokenizer(config)
    assert config.data is not None
    source = load_rows(
        config.data, tokenizer, config.max_length, config.validation, config.validation_data,
        config.weights_of_data, config.columns, config.has_pairs,
    )  # fmt: skip
    check_vocabulary(source, tokenizer, base)
    parts, layout = (
        (source.train, source.validation),
        (config.max_length, config.packing, config.order == "file"),
    )
    if config.has_pairs:
        train, validation = pack_pairs(parts, *layout)
    else:
        train, validation = (pack(part, *layout) for part in parts)
    # Batches cross the ends of epochs, so that no row is left out.
    steps = config.steps or max(round(config.epochs * len(train) / config.batch_size), 1)
    config = dataclasses.replace(config, steps=steps)
    return config, PackedRows(source, train, validation), base, tokenizer


def check_vocabulary(data: FinetuneData, tokenizer: Tokenizer, base: Base) -> None:
    """Raise DataError if the data contain a token that the model does not have."""
    # A lookup of an index that is too large raises no error in JAX.
    largest = max(int(part.tokens.max(initial=0)) for part in (data.train, data.validation))
    if largest >= base.model.vocab_size:
        token = tokenizer.backend.id_to_token(largest)
        raise DataError(
            f"{base.folder}: its tokenizer and its config.json belong to different models. Token "
            f"{largest} ({token!r:.120}) of the data is not below `vocab_size` "
            f"(={base.model.vocab_size})."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TextTask(Task[TextResult]):
    """A run on text, from `prepare`.

    Attributes:
        data: The rows of tokens.
        base: The checkpoint that the run starts with.
        learner: The decoder and its optimizer.
        load_progress: Called while the weights of the checkpoint are read.
        samples: Prompts to complete at each evaluation, or None.
        end_tokens: The tokens that end a text or an answer, in the data or the template, with their
            texts.
    """

    items = "tokens"

    config: FinetuneConfig
    data: PackedRows
    base: Base
    learner: DecoderLearner
    load_progress: LoadProgress | None = None
    samples: Samples | None = None
    end_tokens: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def eval_steps(self) -> Sequence[int]:
        return report_steps(self.config, len(self.data.train))

    @property
    def items_per_step(self) -> int:
        return round(self.config.batch_size * self.data.train.tokens_per_row)

    def describe(self) -> dict[str, Any]:
        description = self.config.describe(__version__, self.data.source.describe())
        return description | {"base": {"config_sha256": self.base.config_sha256}}

    def digest_base(self) -> str:
        return self.base.digest_weights()

    def initial_state(self) -> DecoderState:
        learner, adapters = self.learner, None
        params = self.base.load(*learner.model_shapes(), progress=self.load_progress)
        if self.config.adapter is not None:
            adapters = load_adapters(
                self.config.adapter, learner.adapter_shapes(), self.config.lora_scale
            )
        return learner.initial_state(*params, adapters=adapters)

    def shapes(self) -> DecoderState:
        return self.learner.shapes()

    def start(
        self, run: RunDirectory, state: DecoderState | None, log: Callable[[str], object]
    ) -> None:
        parts = {"train": self.data.train, "validation": self.data.validation}
        pairs = {name: part for name, part in parts.items() if isinstance(part, PackedPairs)}
        if state is not None and pairs:
            count = sum(len(part.references) for part in pairs.values())
            # They are those of the model before the first step, which a run that resumes lacks.
            log(f"computing the log probabilities of {counted(count, 'pair')} by the first model")
            for part in pairs.values():
                self._set_references(part, state)
            run.write_arrays({name: part.references for name, part in pairs.items()})
            return
        stored = run.read_arrays() if pairs else {}
        for name, part in pairs.items():
            part.references[:] = stored[name]

    @functools.cached_property
    def _log_probs(self) -> Callable:
        return offload_jit(self.learner.log_probs_step(), donate=False)

    def _set_references(self, part: PackedPairs, state: DecoderState) -> None:
        size = self._eval_size
        rows = local_rows(size, self.mesh)
        for numbers in number_rows(len(part), size):
            batch = global_batch(part.batch(numbers[rows]), size, self.mesh)
            values = self._log_probs(state.model.layers, state.model.others, batch)
            part.set_references(numbers, np.asarray(values))

    @property
    def _eval_size(self) -> int:
        # As many rows as a training step has on the device at a time, which is known to fit.
        return self.config.batch_size // self.config.num_microbatches

    def make_step(self) -> TrainStep:
        return offload_jit(self.learner.train_step())

    def make_eval(self) -> Callable[[DecoderState, Part], Metrics]:
        eval_step = offload_jit(self.learner.eval_step(), donate=False)
        size, has_pairs = self._eval_size, self.config.has_pairs
        rows = local_rows(size, self.mesh)

        def evaluate(state: DecoderState, part: Part) -> Metrics:
            if part == "test":  # there is none: the rows are for training and validation
                return {}
            totals: defaultdict[str, float] = defaultdict(float)
            weight = 0.0
            # Sums, not means of batches: the last batch has padding, and rows have different
            # numbers of tokens.
            for batch in eval_batches(self.data.validation, size, rows):
                result = eval_step(
                    state.model.layers, state.model.others, global_batch(batch, size, self.mesh)
                )
                (loss, count), sums = result if has_pairs else (result, {})
                weight += float(count)
                for name, value in {"loss": loss, **sums}.items():
                    totals[name] += float(value)
            return {name: total / weight for name, total in totals.items()}

        return evaluate

    def make_sample(self) -> Callable[[DecoderState], Record]:
        if self.samples is None:
            return super().make_sample()
        sample = self.samples.make(self.learner)
        return lambda state: {SAMPLES: sample(state)}

    def batches(self, done: int) -> Iterator[Batch]:
        size, seed = self.config.batch_size, self.config.seed
        rows = local_rows(size, self.mesh)
        for batch in train_batches(self.data.train, size, seed, done, rows):
            yield global_batch(batch, size, self.mesh)

    def read(self, metrics: Any) -> Metrics:
        metrics = jax.device_get(metrics if isinstance(metrics, dict) else {"loss": metrics})
        return {name: float(value) for name, value in metrics.items()}

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        super().draw(axes, records)
        axes.set(ylabel=f"loss (nats per {'pair' if self.config.has_pairs else 'token'})")

    @property
    def exported(self) -> str:
        """The name of the folder that `finish` writes."""
        return MODEL if self.config.lora is None else ADAPTER

    def finish(self, state: DecoderState, run: RunDirectory) -> None:
        folder, base = run.path / self.exported, self.base
        layers, others = state.model.layers, state.model.others
        files: dict[str, Any] = {**base.generation_files(self.end_tokens)}
        if self.config.chat_template:
            files[CHAT_TEMPLATE] = Path(self.config.chat_template)
        try:
            if self.config.lora is None:
                config = base.model.to_json()
                copied = {file.name: file for file in base.tokenizer_files} | files
                save_checkpoint(folder, layers, others, config, copied_files=copied, overwrite=True)
                return
            adapters = {name: a for name, a in layers.items() if name.endswith((LORA_A, LORA_B))}
            name, revision = base.repository or (str(base.folder), None)
            form = self.config.quantize
            metadata = {TRAINED_ON: f"{form} {self.config.stored_dtype}"} if form else {}
            save_adapter(
                folder, adapters, self.config.lora_scale,
                dropout=self.config.lora_dropout or 0.0, base_model=name, base_revision=revision,
                copied_files=files, metadata=metadata, overwrite=True,
            )  # fmt: skip
        except ValueError as error:
            raise TrainError(
                f"the parameters are not exported: {error} Use a `learning_rate` below "
                f"{self.config.learning_rate}."
            ) from error

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> TextResult:
        return TextResult(
            train_loss=records[-1]["train_loss"],
            best_step=best["step"],
            validation_loss=best.get("validation_loss"),
            # A median ignores the reports of a machine that was busy with something else.
            tokens_per_second=statistics.median(r["tokens_per_second"] for r in records),
            num_params=self.learner.num_params,
            num_trained=self.learner.num_trained,
            exported=self.exported,
            seconds=time.perf_counter() - began,
        )
