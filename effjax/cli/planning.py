"""Forms of a training step: which ones fit, and what a run can change if none does."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..train.host_memory import host_phases, machine_bytes
from ..train.text.config import FinetuneConfig
from .errors import shorten

if TYPE_CHECKING:
    from ..memory import Comparison, MemoryPlan, Target
    from ..train.task import Form


class PlannedRun(NamedTuple):
    """A run to plan."""

    config: Any  # a RunConfig, resolved
    given: Mapping[str, Any]  # the options of the configuration that are given
    forms: "Mapping[str, Form]"
    smaller_configs: Callable[[Any, bool], Iterator[Any]]  # of the `plans` of the task
    num_devices: int


class Limits(NamedTuple):
    """Limits of a step: a share of each device, and pinned bytes of the host if known."""

    target: "Target"
    memory_fraction: float
    host_bytes: int | None

    @property
    def device_bytes(self) -> int:
        """Bytes of each device."""
        return int(self.memory_fraction * self.target.memory_bytes)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan`."""
        host = {"host_memory_bytes": self.host_bytes}
        return {"target": self.target, "memory_fraction": self.memory_fraction, **host}

    def missing(self, device: int, host: int) -> tuple[int, int]:
        """Return by how many bytes a device and the host are too small."""
        on_host = 0 if self.host_bytes is None else max(host - self.host_bytes, 0)
        return max(device - self.device_bytes, 0), on_host


@dataclasses.dataclass
class Row:
    """A form of a run, and its memory: that of its state, until its step is compiled.

    Bytes are those on a device, and those on the host for all devices.
    """

    name: str
    form: "Form"
    limits: Limits
    state: tuple[int, int] = 0, 0  # bytes of the state and the batch
    plan: "MemoryPlan | None" = None
    error: str = ""  # why the step cannot be compiled

    @functools.cached_property
    def step(self) -> tuple[Any, ...]:
        """The step, ``(fun, *args)``. Building that of a deep network takes seconds."""
        return self.form.training_step(self.form.config)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the step; lower bounds if it is not compiled."""
        plan = self.plan
        return self.state if plan is None else (plan.peak_device_bytes, plan.peak_host_bytes)

    @property
    def missing(self) -> tuple[int, int]:
        """Bytes that are missing on the device and on the host."""
        return self.limits.missing(*self.bytes)

    @property
    def has_large_state(self) -> bool:
        """True if the state alone does not fit."""
        return any(self.limits.missing(*self.state))

    @property
    def fits(self) -> bool:
        """True if the step is compiled and fits."""
        return self.plan is not None and self.plan.fits

    @property
    def phases(self) -> dict[str, int]:
        """Bytes on the host in each phase of a run, beside those of the process."""
        return host_phases(self.state, self.bytes[1])

    @property
    def largest_phase(self) -> str:
        """The phase of a run that needs the most on the host; empty if the step is not compiled."""
        return max(self.phases, key=self.phases.__getitem__) if self.plan else ""

    @property
    def machine_bytes(self) -> int:
        """The memory of the machine that a run needs, with that of its process."""
        return machine_bytes(self.state, self.bytes[1])

    @property
    def items_per_second(self) -> float | None:
        """Tokens or images of a second, at the modelled time; None if it is not compiled."""
        if self.plan is None or not self.plan.step_seconds:
            return None
        config, is_text = self.form.config, isinstance(self.form.config, FinetuneConfig)
        length = config.rows_per_example * config.max_length if is_text else 1
        return config.batch_size * length / self.plan.step_seconds

    @property
    def expected_seconds(self) -> tuple[float, float] | None:
        """The shortest and the longest time to expect, where measurements of the device exist."""
        from ..memory.devices import expected_seconds

        return self.plan and expected_seconds(self.limits.target, self.plan.step_seconds)


def estimate(run: PlannedRun, limits: Limits) -> list[Row]:
    """Return the rows of the forms of a run, with the memory of their states. Compile nothing."""
    rows = [Row(name, form, limits) for name, form in run.forms.items()]
    # The forms that no command trains are those of a DenseNet with Flax's layers, which have the
    # same state. Building their steps takes seconds, and they are rarely compiled.
    trained = [row for row in rows if row.form.has_command]
    for row in trained:
        _estimate_state(row, run)
    for row in rows:
        if not row.form.has_command:
            row.state = trained[0].state
    return rows


def select(rows: Sequence[Row], only: Collection[str], compare_all: bool) -> list[Row]:
    """Return the rows to compile: the named ones, or those whose state may fit."""
    if only:
        return [row for row in rows if row.name in only]
    rows = [row for row in rows if not row.has_large_state]
    # Flax's layers of a deep network take minutes, and no command trains them.
    return [row for row in rows if compare_all or row.form.has_command]


def compile_rows(rows: Sequence[Row], run: PlannedRun) -> "Comparison":
    """Compile the steps of rows, which get their plans or errors."""
    from ..memory import Comparison, compare
    from ..memory.compiler.cache import default_folder

    if not rows:
        return Comparison()
    steps, options = {row.name: row.step for row in rows}, rows[0].limits.arguments
    options |= {"num_devices": run.num_devices, "cache": default_folder(), "progress": True}
    plans = compare(steps, **options)
    for row in rows:
        row.plan = plans.get(row.name)
        if row.name in plans.errors:
            row.error = shorten(str(plans.errors[row.name]))
    return plans


def find_fastest(rows: Sequence[Row]) -> Row | None:
    """Return the fastest form that fits and that a command trains, or None."""
    fitting = [row for row in rows if row.fits and row.form.has_command]
    return min(fitting, key=lambda row: row.plan.step_seconds if row.plan else 0.0, default=None)


def find_nearest(rows: Sequence[Row]) -> Row | None:
    """Return the form with the least missing, of those that a command trains, or None."""
    known = [row for row in rows if row.form.has_command and not row.error]
    # Forms with the same state miss the same if that is too large. The last one adds the least.
    return min(reversed(known), key=lambda row: sum(row.missing), default=None)


def find_smaller(row: Row, run: PlannedRun) -> Row | None:
    """Return the first change of a form that fits; None if none does."""
    from ..memory import PlanError

    # Each is compiled, since the command that is printed must not run out of memory. The size of
    # the state, which is known without, rules out most of them.
    for config in run.smaller_configs(row.form.config, row.has_large_state):
        smaller = Row(row.name, row.form._replace(config=config), row.limits)
        _estimate_state(smaller, run)
        if not smaller.has_large_state:
            with contextlib.suppress(PlanError):
                compile_rows([smaller], run)
            if smaller.fits:
                return smaller
    return None


def _estimate_state(row: Row, run: PlannedRun) -> None:
    from ..memory.search.budget import argument_bytes

    row.state = argument_bytes(row.step[1:], run.num_devices)
