"""The answer of `effjax memory`: which form of a run fits, how fast it is, and what to type."""

import dataclasses
import functools
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..train.config import command_line
from ..train.host_memory import host_phases, machine_bytes
from ..train.text.config import FinetuneConfig
from .fit import describe_changes

if TYPE_CHECKING:
    from ..memory import MemoryPlan, Target
    from ..memory.render import Report
    from ..train.task import Form


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes that a step may use: of each device, and pinned ones of the host if they are known."""

    target: "Target"
    device: int
    host: int | None


@dataclasses.dataclass
class Row:
    """A form of a run, and its memory: that of its state, until its step is compiled."""

    name: str
    form: "Form"
    limits: Limits
    state: tuple[int, int] = 0, 0  # bytes of the state and the batch, on a device and on the host
    plan: "MemoryPlan | None" = None
    error: str = ""  # why the step cannot be compiled

    @functools.cached_property
    def step(self) -> tuple[Any, ...]:
        """The step, ``(fun, *args)``. Building that of a deep network takes seconds."""
        return self.form.training_step(self.form.config)

    @property
    def device_bytes(self) -> int:
        """Bytes on a device; at least, if the step is not compiled."""
        return self.state[0] if self.plan is None else self.plan.peak_device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host of all devices; at least, if the step is not compiled."""
        return self.state[1] if self.plan is None else self.plan.peak_host_bytes

    @property
    def phases(self) -> dict[str, int]:
        """Bytes on the host in each phase of a run, beside those of the process."""
        return host_phases(self.state, self.host_bytes)

    @property
    def largest_phase(self) -> str:
        """The phase of a run that needs the most on the host; empty if the step is not compiled."""
        return max(self.phases, key=self.phases.__getitem__) if self.plan else ""

    @property
    def machine_bytes(self) -> int:
        """The memory of the machine that a run needs, with that of its process."""
        return machine_bytes(self.state, self.host_bytes)

    @property
    def shortage(self) -> tuple[int, int]:
        """Bytes that are missing on the device and on the host."""
        return _shortage(self.device_bytes, self.host_bytes, self.limits)

    @property
    def fits(self) -> bool:
        """True if the step is compiled and fits."""
        return self.plan is not None and self.plan.fits

    @property
    def items_per_second(self) -> float | None:
        """Tokens or images of a second, at the modelled time; None if it is not compiled."""
        if self.plan is None or not self.plan.step_seconds:
            return None
        return count_items(self.form.config) / self.plan.step_seconds

    @property
    def expected_seconds(self) -> tuple[float, float] | None:
        """The shortest and the longest time to expect, where measurements of the device exist."""
        from ..memory.devices import expected_seconds

        if self.plan is None:
            return None
        return expected_seconds(self.limits.target, self.plan.step_seconds)


def count_items(config: Any) -> int:
    """Return the tokens or images of a step."""
    is_text = isinstance(config, FinetuneConfig)
    length = config.rows_per_example * config.max_length if is_text else 1
    return config.batch_size * length


def estimate(
    forms: "Mapping[str, Form]", limits: Limits, num_devices: int | None
) -> dict[str, Row]:
    """Return the rows of forms, with the memory of their states. Nothing is compiled."""
    rows = {name: Row(name, form, limits) for name, form in forms.items()}
    trained = [row for row in rows.values() if row.form.has_command]
    for row in trained:
        row.state = _state_bytes(row.step, num_devices)
    for row in rows.values():  # other layers of the same network
        if not row.form.has_command:
            row.state = trained[0].state
    return rows


def make_report(rows: "Sequence[Row]", base: Any) -> "Report":
    """Return the table of the forms.

    Args:
        rows: The forms.
        base: The options that are given.
    """
    from ..memory.render import Report, ReportTable, format_bytes, format_seconds
    from ..memory.results import recomputation_note

    limits, unit = rows[0].limits, "tokens/s" if isinstance(base, FinetuneConfig) else "images/s"
    cells = []
    for row in rows:
        at_least, plan, rate = "" if row.plan else "≥ ", row.plan, row.items_per_second
        cells.append([
            row.name,
            at_least + format_bytes(row.device_bytes),
            at_least + format_bytes(row.host_bytes) if row.host_bytes else format_bytes(0),
            _describe_fit(row),
            format_seconds(plan.step_seconds) if plan else "–",
            f"{rate:.0f}" if rate else "–",
            _describe_options(row, base),
        ])  # fmt: skip
    on_host = "" if limits.host is None else f", {format_bytes(limits.host)} of the host"
    fraction = limits.device / limits.target.memory_bytes
    available = f"{format_bytes(limits.device)} ({fraction:.0%}) of {limits.target.description}"
    header = ["form", "device", "host", "fits", "step", unit, f"options of {_command(base)}"]
    title = f"{available}{on_host}; times are modelled, at published peak rates"
    notes = [
        f"{row.name}: {note}"
        for row in rows
        if row.plan and (note := recomputation_note(row.plan))
    ]
    notes += [f"{row.name}: {row.error}" for row in rows if row.error]
    return Report([ReportTable(header, cells, title)], note="\n".join(notes))


def phases_report(rows: "Sequence[Row]") -> "Report":
    """Return the table of the host memory that runs need in each phase."""
    from ..memory.render import Report, ReportTable, format_bytes

    cells = [
        [
            row.name, *map(format_bytes, row.phases.values()), row.largest_phase,
            format_bytes(row.machine_bytes),
        ]
        for row in rows
    ]  # fmt: skip
    title = "host memory of the phases of a run; the machine also has the process"
    return Report([ReportTable(["form", *rows[0].phases, "largest", "machine"], cells, title)])


def conclude(
    rows: "Sequence[Row]",
    config_type: type,
    given: Mapping[str, Any],
    plans: Any,
    num_devices: int | None = None,
) -> tuple[str, str]:
    """Return a sentence and a command: of the fastest form that fits, or of what would help.

    Args:
        rows: The forms.
        config_type: The configuration of the command.
        given: The options of the configuration that are given.
        plans: The module of the task, with `smaller_states` and `smaller_batches`.
        num_devices: The number of devices.
    """
    from ..memory.render import format_bytes, format_seconds

    fitting = [row for row in rows if row.fits and row.form.has_command]
    if not fitting:
        return advise(rows, config_type, given, plans, num_devices)
    best = min(fitting, key=lambda row: row.plan.step_seconds if row.plan else 0.0)
    sentence = f"The fastest form that fits is {best.name!r}"
    if best.plan and best.expected_seconds:
        least, most = map(format_seconds, best.expected_seconds)
        modelled = format_seconds(best.plan.step_seconds)
        sentence += f", {modelled} a step at peak rates and about {least} to {most} expected"
    if best.host_bytes and best.limits.host is None:
        sentence += f", on a machine with {format_bytes(best.machine_bytes)} of memory"
    return f"{sentence}:", write_command(config_type, given, best.form.config, best.limits)


def advise(
    rows: "Sequence[Row]",
    config_type: type,
    given: Mapping[str, Any],
    plans: Any,
    num_devices: int | None = None,
) -> tuple[str, str]:
    """Return what is short where nothing fits, and a command that plans the change that helps."""
    known = [row for row in rows if row.form.has_command and not row.error]
    if not known:
        return "The compiler refuses the forms that a command trains.", ""
    nearest = min(known, key=lambda row: sum(row.shortage))
    is_state = sum(_shortage(*nearest.state, nearest.limits)) > 0
    what = "the parameters and the optimizer state" if is_state else "the activations"
    sentence = f"Nothing fits. {nearest.name!r} comes nearest: {describe_shortage(nearest)}"
    sentence += f", because of {what}"
    if nearest.shortage[1]:
        in_all = _shortage(*nearest.state, nearest.limits)[1] > 0  # the host always has the state
        phase = "all phases" if in_all else f"the phase {nearest.largest_phase!r}"
        sentence += f", in {phase} of a run"
    sentence += "."
    changes = list(_changes(nearest, plans, num_devices, is_state))
    if not changes:
        return f"{sentence} Use a device with more memory.", ""
    changed, missing = next((c for c in changes if not c[1]), min(changes, key=lambda c: c[1]))
    base = nearest.form.config
    options = describe_changes(base, dataclasses.replace(changed, learning_rate=base.learning_rate))
    verb = "would fit, by an estimate" if not missing else "helps most, and does not suffice"
    plain = {
        name: getattr(config_type(**given), name) for name in _options_of_forms(nearest, given)
    }
    changed = dataclasses.replace(changed, **plain)
    return f"{sentence} With {options} it {verb}:", write_command(config_type, given, changed, None)


def _options_of_forms(row: Row, given: Mapping[str, Any]) -> list[str]:
    """Return the options that make a form, which a plan of all forms must not fix."""
    names = "offload", "fuse_update", "policy", "efficient", "save"
    return [name for name in names if hasattr(row.form.config, name) and name not in given]


def write_command(
    config_type: Any, given: Mapping[str, Any], config: Any, limits: Limits | None
) -> str:
    """Return the command that trains with the options that are given and those of a form.

    Without limits, it is the command that plans them.
    """
    base = config_type(**given).resolve()
    words = [_command(base) if limits else f"effjax memory {base.COMMAND}"]
    for field in sorted(dataclasses.fields(config_type), key=_is_named):
        name, flag = field.name, f"--{field.name.replace('_', '-')}"
        if name in given and getattr(config, name) == getattr(base, name):
            value = getattr(config, name)
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                values = given[name] if isinstance(given[name], list) else [given[name]]
                texts = [shlex.quote(str(one)) for one in values]
                words += texts if field.metadata["positional"] else [f"{flag} {t}" for t in texts]
    if limits and base.COMMAND == "finetune" and "data" not in given:
        words.append("--data FILE.jsonl")
    rate = {} if "learning_rate" in given else {"learning_rate": base.learning_rate}
    words.append(describe_changes(base, dataclasses.replace(config, **rate)))
    if limits and limits.target.is_gpu:
        fraction = limits.device / limits.target.memory_bytes
        if fraction > limits.target.default_memory_fraction + 1e-6:
            words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.4g}")
    return " ".join(filter(None, words))


def _is_named(field: dataclasses.Field) -> bool:
    return not field.metadata["positional"]


def describe_shortage(row: Row) -> str:
    """Return by how much a form does not fit."""
    from ..memory.render import format_bytes

    if row.plan is not None and row.plan.refusal:
        return "the compiler refuses it"
    places = zip(row.shortage, ("", " on the host"), strict=True)
    at_least = "" if row.plan else "at least "
    texts = [f"{at_least}{format_bytes(size)} short{place}" for size, place in places if size]
    return " and ".join(texts)


def _describe_fit(row: Row) -> str:
    if row.fits:
        return "yes"
    if row.error:
        return "cannot be compiled"
    if row.plan is None and not any(row.shortage):
        return "not planned, see --details"
    return f"no: {describe_shortage(row)}"


def _describe_options(row: Row, base: Any) -> str:
    if not row.form.has_command:
        return "(layers of Flax)"
    return describe_changes(base, row.form.config) or "(as given)"


def _changes(
    row: Row, plans: Any, num_devices: int | None, is_state: bool
) -> Iterator[tuple[Any, int]]:
    """Yield changed configurations, and the estimated bytes that are then missing."""
    config, limits = row.form.config, row.limits
    rest = row.device_bytes - row.state[0], row.host_bytes - row.state[1]

    def smaller_states() -> Iterator[tuple[Any, int]]:
        for changed in plans.smaller_states(config):
            state = _state_bytes(row.form.training_step(changed), num_devices)
            needed = state[0] + rest[0], state[1] + rest[1]
            yield changed, sum(_shortage(*needed, limits))

    def smaller_batches() -> Iterator[tuple[Any, int]]:
        for changed, share in plans.smaller_batches(config):
            device, host = (s + int(share * r) for s, r in zip(row.state, rest, strict=True))
            yield changed, sum(_shortage(device, host, limits))

    if not is_state:
        yield from smaller_batches()
    yield from smaller_states()


def _state_bytes(step: Sequence[Any], num_devices: int | None) -> tuple[int, int]:
    from ..memory.search.budget import argument_bytes

    return argument_bytes(step[1:], num_devices or 1)


def _shortage(device: int, host: int, limits: Limits) -> tuple[int, int]:
    on_host = 0 if limits.host is None else max(host - limits.host, 0)
    return max(device - limits.device, 0), on_host


def _command(config: Any) -> str:
    return command_line(config.COMMAND)


def select(rows: Mapping[str, Row], only: Collection[str], compare_all: bool) -> list[str]:
    """Return the names of the forms to compile.

    They are the named ones, or those whose state may fit. Without `compare_all`, forms that no
    command trains are left out: those of a deep network take minutes.
    """
    if only:
        return [name for name in rows if name in only]
    return [
        name
        for name, row in rows.items()
        if not any(row.shortage) and (compare_all or row.form.has_command)
    ]


def to_dict(rows: "Sequence[Row]", sentence: str, command: str) -> dict[str, Any]:
    """Return the answer as JSON-serializable data."""
    return {
        "answer": {"fits": any(row.fits for row in rows), "text": sentence, "command": command},
        "forms": {
            row.name: {
                "device_bytes": row.device_bytes,
                "host_bytes": row.host_bytes,
                "phases_host_bytes": row.phases,
                "largest_phase": row.largest_phase,
                "machine_bytes": row.machine_bytes,
                "state_bytes": sum(row.state),
                "is_compiled": row.plan is not None,
                "fits": row.fits,
                "error": row.error or None,
                "step_seconds": row.plan.step_seconds if row.plan else None,
                "expected_seconds": row.expected_seconds,
                "items_per_second": row.items_per_second,
                "plan": row.plan.to_dict() if row.plan else None,
            }
            for row in rows
        },
    }
