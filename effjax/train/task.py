"""Interfaces between the training loop, the tasks it trains, and the progress display."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax

from .config import RunConfig

# The metrics of one step, "loss" among them; empty if the step was skipped.
Metrics = Mapping[str, float]
Part = Literal["validation", "test"]  # of the data
Record = dict[str, Any]  # a line of metrics.jsonl
Stop = Callable[[int], bool]  # called with a step
TrainStep = Callable[[Any, Any, jax.Array], tuple[Any, Any]]  # (state, batch, key)
Result = TypeVar("Result", covariant=True)


class Task(Protocol[Result]):
    """A model, its data and its devices, as `loop.fit` trains them.

    A state is a NamedTuple of arrays with a field `step`.
    """

    @property
    def config(self) -> RunConfig:
        """The options of the run."""
        ...

    @property
    def kind(self) -> str:
        """The unit of the run's length and the kind of its records: `"epoch"` or `"step"`."""
        ...

    @property
    def eval_steps(self) -> Sequence[int]:
        """The steps after which the model is validated and saved; the last one ends the run."""
        ...

    @property
    def examples_per_step(self) -> int:
        """The number of examples in a batch."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the content of config.json.

        `options` holds the options, among them the run's length, named by the plural of `kind`.
        `data` holds what distinguishes the data of the run from other data.
        """
        ...

    def initial_state(self) -> Any:
        """Return the state before the first step."""
        ...

    def shapes(self) -> Any:
        """Return the shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`s."""
        ...

    def make_step(self) -> TrainStep:
        """Compile `(state, batch, key) -> (state, metrics)`, which donates the state.

        The step treats a loss that is not finite as `finite.skip_nonfinite` does.
        """
        ...

    def make_test(self) -> Callable[[Any, Part], Metrics]:
        """Compile an evaluation, `(state, part) -> metrics`; an empty part has no metrics."""
        ...

    def batches(self, done: int) -> Iterator[Any]:
        """Yield batches without end, from that of step `done + 1` on, as the seed says."""
        ...

    def read(self, metrics: Any) -> Metrics:
        """Wait for a step and return its metrics as numbers."""
        ...

    def where(self, step: int) -> str:
        """Return the position of a step for a message, such as `"in epoch 3"`."""
        ...

    def record(self, step: int, train: Metrics, validation: Metrics, rate: float) -> Record:
        """Return the record of an evaluation, with a `kind` and a `step`.

        Args:
            step: The number of steps taken.
            train: Means over the steps since the previous evaluation.
            validation: Metrics of the validation part.
            rate: Training speed in examples per second.
        """
        ...

    def score(self, record: Record) -> tuple[float, ...]:
        """Return a score for choosing the best parameters; higher is better."""
        ...

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """Plot the records on Matplotlib axes."""
        ...

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
        ...


class Progress:
    """Progress callbacks; the base class ignores them."""

    def start(self, steps: int, done: int) -> None:
        """Handle the start of a run of `steps` steps, `done` of which were taken earlier.

        Called before the first step is compiled.
        """

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Handle the metrics of a step; `rate` is in examples per second."""

    def report(self, record: Record) -> None:
        """Handle the record of an evaluation."""

    def log(self, text: str) -> None:
        """Handle a message, such as that of a skipped step or a damaged checkpoint."""

    def stop(self) -> None:
        """Handle the end of training, including errors and interruptions."""
