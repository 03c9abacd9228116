"""Interfaces between the training loop, the tasks it trains, and the progress display."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from .config import RunConfig
from .run_directory import RunDirectory

# The metrics of one step, "loss" among them; empty if the step was skipped.
Metrics = Mapping[str, float]
Part = Literal["validation", "test"]  # of the data
Record = dict[str, Any]  # a line of metrics.jsonl
AS_GIVEN = "as given"  # the form of a step with the options that are given
SAMPLES = "samples"  # of a record: texts as `{"prompt": ..., "text": ...}`
Stop = Callable[[int], bool]  # called with a step
TrainStep = Callable[[Any, Any, jax.Array], tuple[Any, Any]]  # (state, batch, key)
Result = TypeVar("Result", covariant=True)


def report_steps(config: Any, num_examples: int) -> list[int]:
    """Return the steps that a validation follows, the last one among them, of a run in steps."""
    # An epoch is rarely a whole number of steps. Rounding each multiple keeps the reports at the
    # ends of epochs.
    steps, every = config.steps, config.report_every or max(num_examples / config.batch_size, 1)
    reports = [round(i * every) for i in range(1, int(steps / every) + 1)]
    return [*(step for step in reports if step < steps), steps]


class MemoryChoices(NamedTuple):
    """The options of a run that trade time for memory, for `effjax.memory.choose_options`.

    Attributes:
        options: Values by name, in the order of the memory they need, the largest first.
        not_by_time: Names of options whose later values may be faster, too.
        change: ``change(**values)`` returns the configuration with values of the options, or None
            for a combination that is not supported or has no effect.
        training_step: ``training_step(config)`` returns ``(fun, *args)``.
        min_bytes: ``min_bytes(**values)`` returns lower bounds of the memory of a step.
    """

    options: Mapping[str, Sequence[Any]]
    not_by_time: Sequence[str]
    change: Callable[..., Any]
    training_step: Callable[[Any], tuple[Any, ...]]
    min_bytes: Callable[..., tuple[int, int]] | None = None


class Form(NamedTuple):
    """A form of a training step that `effjax memory` compares with others.

    Attributes:
        config: The options that make it.
        training_step: ``training_step(config)`` returns ``(fun, *args)``.
        has_command: Whether the command that trains makes it with these options.
    """

    config: Any
    training_step: Callable[[Any], tuple[Any, ...]]
    has_command: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Task(abc.ABC, Generic[Result]):
    """A model, its data and its devices, as `loop.fit` trains them.

    A state is a NamedTuple of arrays with a field `step`.

    Attributes:
        items: What the reported rate counts.
        config: The options of the run.
        mesh: The devices.
        schedule: The learning rate, a function of the number of steps taken.
    """

    items: ClassVar[Literal["images", "tokens"]]

    config: RunConfig
    mesh: Mesh
    schedule: Callable[[int], Any]

    @property
    def unit(self) -> Literal["epoch", "step"]:
        """The unit of the run's length and the kind of its records."""
        return self.config.UNIT

    @property
    def steps_per_unit(self) -> int:
        """The number of steps in an epoch; 1 if the unit is a step, the default."""
        return 1

    @property
    @abc.abstractmethod
    def eval_steps(self) -> Sequence[int]:
        """The steps after which the model is validated and saved; the last one ends the run."""

    @property
    @abc.abstractmethod
    def items_per_step(self) -> int:
        """Images or tokens per training step; the unit of the reported rate."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the content of config.json.

        `options` holds the options. `data` holds what distinguishes the data of the run from other
        data. `base`, if there is one, distinguishes the model that it started with from others.
        The loop adds the digest of its weights.
        """

    def digest_base(self) -> str | None:
        """Return the digest of the weights that the run starts with; by default there are none.

        Called in a background thread of the first process, since it may take long.
        """

    @abc.abstractmethod
    def initial_state(self) -> Any:
        """Return the state before the first step."""

    def start(self, run: RunDirectory, state: Any | None, log: Callable[[str], object]) -> None:
        """Compute what the run needs of the model at its start, or read it; by default nothing.

        Args:
            run: The directory, where it is stored.
            state: The initial state. None if the run continues after a checkpoint.
            log: Called with a message for the user.
        """

    @abc.abstractmethod
    def shapes(self) -> Any:
        """Return the shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`s."""

    @abc.abstractmethod
    def make_step(self) -> TrainStep:
        """Compile `(state, batch, key) -> (state, metrics)`, which donates the state.

        The loss of a step is NaN if it or a gradient is not finite. With `on_nan="skip"`, such a
        step changes only `step`.
        """

    @abc.abstractmethod
    def make_eval(self) -> Callable[[Any, Part], Metrics]:
        """Compile an evaluation, `(state, part) -> metrics`; an empty part has no metrics."""

    def make_sample(self) -> Callable[[Any], Record]:
        """Compile what a record has besides numbers, `state -> entries`; by default nothing."""
        return lambda state: {}

    @abc.abstractmethod
    def batches(self, done: int) -> Iterator[Any]:
        """Yield an infinite stream of batches that starts with step `done + 1`.

        The seed determines it.
        """

    @abc.abstractmethod
    def read(self, metrics: Any) -> Metrics:
        """Wait for a step and return its metrics as numbers."""

    def where(self, step: int) -> str:
        """Return the position of a step for a message, such as `"in epoch 3"`."""
        number = -(-step // self.steps_per_unit)
        return f"{'in' if self.unit == 'epoch' else 'at'} {self.unit} {number}"

    def record(self, step: int, train: Metrics, validation: Metrics, rate: float) -> Record:
        """Return the record of an evaluation, with a `kind` and a `step`.

        Args:
            step: The number of steps taken.
            train: Means over the steps since the previous evaluation.
            validation: Metrics of the validation part.
            rate: Training speed in images or tokens per second.
        """
        return {
            "kind": self.unit,
            self.unit: step // self.steps_per_unit,
            "step": step,
            **{f"train_{name}": value for name, value in train.items()},
            # That of the first step of the epoch, or of the last step.
            "learning_rate": float(self.schedule(step - self.steps_per_unit)),
            f"{self.items}_per_second": rate,
            **{f"validation_{name}": value for name, value in validation.items()},
        }

    def score(self, record: Record) -> tuple[float, ...]:
        """Return a score for choosing the best parameters; higher is better.

        By default the negative validation loss. Without validation, and of equal losses, the last
        record is the best.
        """
        return -record.get("validation_loss", 0), record["step"]

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """Plot the records on Matplotlib axes; by default the losses."""
        x = [record[self.unit] for record in records]
        axes.set(xlabel=self.unit, ylabel="loss")
        for number, part in enumerate(("train", "validation")):
            if all(f"{part}_loss" in record for record in records):
                losses = [record[f"{part}_loss"] for record in records]
                axes.plot(x, losses, f"C{number}.-", label=f"{part} loss")

    def finish(self, state: Any, run: RunDirectory) -> None:
        """Export the best parameters; by default do nothing.

        Of several processes, each one calls this. A run that is resumed after its end calls it
        again.
        """

    @abc.abstractmethod
    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> Result:
        """Return the result of the run, a dataclass.

        Args:
            records: The records of all evaluations.
            best: The record with the highest score.
            tested: Test metrics of the parameters at `best`.
            began: When the run started, by `time.perf_counter`.
        """


class Progress:
    """Progress callbacks; the base class ignores them."""

    def start(self, steps: int, done: int) -> None:
        """Handle the start of a run of `steps` steps, `done` of which were taken earlier.

        Called before the first step is compiled.
        """

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Handle the metrics of a step; `rate` is in images or tokens per second."""

    def report(self, record: Record) -> None:
        """Handle the record of an evaluation."""

    def log(self, text: str) -> None:
        """Handle a message, such as that of a skipped step or a damaged checkpoint."""

    def stop(self) -> None:
        """Handle the end of training, including errors and interruptions."""
