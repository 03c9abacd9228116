"""What the loop trains, what it needs to know of it, and whom it tells how it goes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax

from .finite import OnNan

Measured = Mapping[str, float]  # by name; "loss" is among them, unless nothing was measured
Part = Literal["validation", "test"]  # of the data
Record = dict[str, Any]  # a line of metrics.jsonl
Stop = Callable[[int], bool]  # of a step
TrainStep = Callable[[Any, Any, jax.Array], tuple[Any, Any]]  # (state, batch, key)
Result = TypeVar("Result", covariant=True)


class Options(Protocol):
    """What the loop needs to know of a task's config."""

    @property
    def seed(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def checkpoint_every(self) -> int | None: ...
    @property
    def on_nan(self) -> OnNan: ...


class Task(Protocol[Result]):
    """What `fit` trains: its data, its model and its devices, and what is measured of it.

    A run is counted in epochs or in steps (`kind`). After some `numbers` of these it is validated,
    which gives a line of metrics.jsonl and a checkpoint; the last number is the run's end, at which
    the best checkpoint is tested. A number is `steps_each` steps: those of an epoch, or one. The
    state is a NamedTuple with a `step`.
    """

    @property
    def config(self) -> Options: ...
    @property
    def kind(self) -> str: ...
    @property
    def numbers(self) -> Sequence[int]: ...
    @property
    def steps_each(self) -> int: ...
    @property
    def examples_per_step(self) -> int: ...

    @property
    def fields(self) -> Sequence[str]:
        """The numbers that each line of metrics.jsonl has."""
        ...

    def describe(self) -> dict[str, Any]:
        """For config.json: under `options` the options, among them the run's length, whose name is
        the plural of `kind`, and under `data` what tells other data from these."""
        ...

    def initial_state(self) -> Any:
        """What step 0 begins with: what the seed gives, or the weights of another run."""
        ...

    def shapes(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the state, with the shardings that the train step wants, to
        restore one; nothing is read."""
        ...

    def make_step(self) -> TrainStep:
        """Compiles `(state, batch, key) -> (state, metrics)`; the state is donated. What it does
        at numbers that are not finite is the config's `on_nan`, as `finite.guarded` has it."""
        ...

    def make_test(self) -> Callable[[Any, Part], Measured]:
        """Compiles `(state, part) -> measured` over a part of the data; nothing is measured of a
        validation part that is empty."""
        ...

    def batches(self, done: int) -> Iterator[Any]:
        """Batches to train on for ever, from that after `done` steps on; the same for a seed."""
        ...

    def read(self, metrics: Any) -> Measured:
        """A step's metrics as numbers, which waits for the step."""
        ...

    def where(self, step: int) -> str:
        """For a message: `in epoch 3`, `at step 70`."""
        ...

    def record(self, number: int, train: Measured, validation: Measured, rate: float) -> Record:
        """A line of metrics.jsonl; `train` holds means over the steps since the line before, and
        `rate` is in examples a second."""
        ...

    def score(self, record: Record) -> Any:
        """Higher is better: by the validation set, and without one later is better."""
        ...

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """The run's curve, on matplotlib's axes."""
        ...

    def result(
        self, records: Sequence[Record], best: Record, tested: Measured, began: float
    ) -> Result:
        """What the run came to, a dataclass: `tested` is of the parameters at the `best` record,
        and `began` is by `time.perf_counter`."""
        ...


class Progress:
    """Is told how a run goes. This one does nothing with it."""

    def start(self, steps: int, done: int) -> None:
        """Before the first step is compiled: the number of steps, and how many are done already."""

    def step(self, step: int, measured: Measured, rate: float) -> None:
        """After each step, with what was measured of its batch, and examples a second."""

    def report(self, record: Record) -> None:
        """After each validation; `record` is its line of metrics.jsonl."""

    def say(self, text: str) -> None:
        """What else there is to say: of a step that was skipped, of a checkpoint."""

    def stop(self) -> None:
        """After training, however it ends."""
