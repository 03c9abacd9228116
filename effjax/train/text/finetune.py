"""Fine-tuning from Python, as `effjax finetune` does it."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ..loop import fit
from ..mesh import Devices
from ..run import open_run
from ..run_directory import default_path
from ..task import Metrics, Progress, Record
from ..trackers import track
from .config import FinetuneConfig
from .learner import Loss
from .task import TextResult, prepare

Callback = Callable[[Record], Any]


class FinetunedModel(NamedTuple):
    """A finished run.

    Attributes:
        path: The directory of the run.
        result: Losses, the number of parameters and the speed.
    """

    path: Path
    result: TextResult

    @property
    def exported(self) -> Path:
        """The folder with the model in Hugging Face's layout, or the adapters in PEFT's."""
        return self.path / self.result.exported


def finetune(
    config: FinetuneConfig,
    out: str | PathLike[str] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    loss: Loss | None = None,
    resume: bool = False,
    overwrite: bool = False,
    devices: Devices | None = None,
) -> FinetunedModel:
    """Fine-tune a language model.

    Example::

        from effjax.train import FinetuneConfig, finetune

        config = FinetuneConfig(checkpoint="Qwen/Qwen3-0.6B", data=["chats.jsonl"], lora=16)
        model = finetune(config, "run", callbacks=[print])
        model.exported  # run/adapter

    The run is that of ``effjax finetune``: the same options, files and bits. Nothing is printed.
    Where parameters are in the memory of a GPU's host, set
    ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` before JAX starts, as the command does.

    Args:
        config: The options of the command, as fields.
        out: The directory of the run. By default a new one in ``runs``.
        callbacks: Functions of a record. The record of a step has ``kind="train_step"``, ``step``,
            ``loss`` and ``tokens_per_second``; those of evaluations are the lines of
            metrics.jsonl. Those of preferences have further metrics. If a callback returns True,
            the run is saved and ends after the next step.
        loss: A function ``(logits, batch) -> (loss_sum, weight)`` in place of the cross entropy,
            for training and validation. Logits are float32 ``[N, T, vocab_size]``, in device
            memory as a whole. The batch has "labels" and "weights" ``[N, T]``. Losses are
            divided by the sum of the weights of a step. Give the same function on `resume`. Not
            with ``config.loss="dpo"``.
        resume: Continue after the newest checkpoint of `out`.
        overwrite: Replace a run in `out`.
        devices: Where to train. By default on all devices of all processes.

    Returns:
        The run and its result.

    Raises:
        TrainError: The options do not fit each other or the devices, the data, the checkpoint or
            the directory cannot be used, or a loss is not finite.
        PreemptionError: A callback ended the run. It is saved, and `resume` continues it.
    """
    task = prepare(config, devices, resume=resume, loss=loss)
    path = Path(default_path(config.COMMAND) if out is None else out)
    run = open_run(task, path, resume, overwrite)
    progress = _Callbacks(callbacks)
    tracked = track(progress, task.config, run.path) if run.writes else progress
    result = fit(task, run, tracked, resume, lambda step: progress.stopped)
    return FinetunedModel(run.path, result)


class _Callbacks(Progress):
    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks, self.stopped = callbacks, False

    # The loop reads the metrics of a step while the next one runs, which then ends the run.
    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        self.report({"kind": "train_step", "step": step, **metrics, "tokens_per_second": rate})

    def report(self, record: Record) -> None:
        for callback in self.callbacks:
            self.stopped |= callback(record) is True
