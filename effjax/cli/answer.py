"""Output of `effjax memory`: tables, sentences, JSON and plots of its results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.config import command_line
from ..train.errors import TrainError, printable
from ..train.text.config import FinetuneConfig
from .planning import Limits, PlannedRun, Row
from .shell import describe_changes, find_weights

if TYPE_CHECKING:
    from ..memory import Comparison, MaxBatch, OptionSearch
    from ..memory.render import Report


def print_reports(reports: "Sequence[Report | OptionSearch]") -> None:
    """Print rich tables on a terminal, and unwrapped plain text otherwise."""
    from rich.console import Console

    # A pipe or a file has no width to wrap lines at.
    console = Console()
    for i, report in enumerate(reports):
        if i:
            print()
        if console.is_terminal:
            console.print(report)
        else:
            print(report)


def print_answer(text: str, command: str) -> None:
    """Print a sentence, and a command below it if there is one."""
    print(f"\n{printable(text)}")
    if command:
        print(f"  {printable(command)}")


def forms_report(rows: "Sequence[Row]", config: Any) -> "Report":
    """Return the table of the forms of a run.

    Args:
        rows: The forms.
        config: The configuration of the run.
    """
    from ..memory.render import Report, ReportTable, format_bytes
    from ..memory.results import format_step, recomputation_note

    unit = "tokens/s" if isinstance(config, FinetuneConfig) else "images/s"
    cells, notes = [], []
    for row in rows:
        # Without a plan, the bytes are those of the state. Nothing on the host stays nothing.
        at_least, plan, rate = "" if row.plan else "≥ ", row.plan, row.items_per_second
        at_most = "≤ " if plan and plan.step_time.is_lower_bound else ""
        device, host = (at_least * bool(size) + format_bytes(size) for size in row.bytes)
        cells.append({
            "form": row.name, "device": device, "host": host, "fits": _describe_fit(row),
            "step": format_step(plan.step_time) if plan else "–",
            unit: f"{at_most}{rate:.0f}" if rate else "–",
            f"options of {command_line(config.COMMAND)}": _describe_options(row, config),
        })  # fmt: skip
        if note := row.error or (plan and recomputation_note(plan)):
            notes.append(f"{row.name}: {note}")
    title = f"{_describe_limits(rows[0].limits)}; times are modelled, at published peak rates"
    return Report([ReportTable(cells, title)], note="\n".join(notes))


def phases_report(rows: "Sequence[Row]") -> "Report":
    """Return the table of the host memory that runs need in each phase."""
    from ..memory.render import Report, ReportTable, format_bytes

    cells = [
        {"form": row.name}
        | {phase: format_bytes(size) for phase, size in row.phases.items()}
        | {"largest": row.largest_phase, "machine": format_bytes(row.machine_bytes)}
        for row in rows
    ]
    title = "host memory of the phases of a run; the machine also has the process"
    return Report([ReportTable(cells, title)])


def batches_report(results: "Mapping[str, MaxBatch]") -> "Report":
    """Return the table of the largest batches of several steps."""
    from ..memory.render import Report, ReportTable, format_bytes

    cells = [
        {
            "": name,
            "largest batch": str(result.batch_size or "none fits"),
            "peak": format_bytes(result.plan.peak_device_bytes),
            "batches compiled": ", ".join(map(str, sorted(result.tried))),
        }
        for name, result in results.items()
    ]
    return Report([ReportTable(cells)])


def plans_reports(plans: "Comparison") -> "list[Report]":
    """Return the report of a plan; of several, that of the comparison and shorter ones of each."""
    from ..memory.render import MAX_ROWS

    reports = [plans.report()] if len(plans) > 1 or plans.errors else []
    max_rows = MAX_ROWS // 2 if len(plans) > 1 else MAX_ROWS
    return reports + [plan.report(name, max_rows) for name, plan in plans.items()]


def describe_fastest(row: Row) -> str:
    """Return the sentence about the fastest form that fits, before its command."""
    from ..memory.render import format_seconds
    from ..memory.results import format_step

    text = f"The fastest form that fits is {row.name!r}"
    # No device reaches its peak rates, so where speeds have been measured, the text says by how
    # much they fall short.
    if row.plan and row.expected_seconds:
        least, most = map(format_seconds, row.expected_seconds)
        modelled = format_step(row.plan.step_time)
        text += f", {modelled} a step at peak rates and about {least} to {most} expected"
    return f"{text}{_on_machine(row)}."


def describe_nearest(row: Row) -> str:
    """Return the sentence about the form that comes nearest where nothing fits."""
    what = "the parameters and the optimizer state" if row.has_large_state else "the activations"
    text = f"Nothing fits. {row.name!r} comes nearest: {_describe_missing(row)}, because of {what}"
    if row.missing[1]:
        # The host has the state in each phase, and more in some of them.
        in_all = row.limits.missing(*row.state)[1] > 0
        phase = "all phases" if in_all else f"the phase {row.largest_phase!r}"
        text += f", in {phase} of a run"
    return f"{text}."


def describe_smaller(nearest: Row, smaller: Row | None) -> str:
    """Return the sentence about what a run can change to fit; see `find_smaller`."""
    if smaller is None:
        where = "device" if nearest.missing[0] else "machine"
        return f"No smaller step fits. Use a {where} with more memory."
    options = describe_changes(nearest.form.config, smaller.form.config)
    return f"With {options} it fits{_on_machine(smaller)}."


def describe_weights(run: PlannedRun) -> str:
    """Return a sentence about the weights that a run needs and a plan does not; often empty."""
    if not isinstance(run.config, FinetuneConfig):
        return ""
    checkpoint = str(run.config.checkpoint)
    return {
        "folder": "",
        "hub": f" The run downloads the weights of {checkpoint}, too.",
        "": f" The run needs the weights, too, which {checkpoint} lacks: CHECKPOINT is a folder "
        "that has them, or a name on the Hub.",
    }[find_weights(checkpoint)]


def to_dict(rows: "Sequence[Row]", text: str, command: str) -> dict[str, Any]:
    """Return the answer as JSON-serializable data."""
    return {
        "answer": {"fits": any(row.fits for row in rows), "text": text, "command": command},
        "forms": {
            row.name: {
                "device_bytes": row.bytes[0],
                "host_bytes": row.bytes[1],
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


def save_plot(plans: "Comparison", path: Path) -> None:
    """Draw one plan, or a comparison of several, into a file."""
    import matplotlib

    matplotlib.use("agg")  # without a display
    figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an unknown file format
        raise TrainError(f"--plot {path}: {error}") from error


def _describe_limits(limits: Limits) -> str:
    from ..memory.render import format_bytes

    on_host = f", {format_bytes(limits.host_bytes)} of the host" if limits.host_bytes else ""
    return (
        f"{format_bytes(limits.device_bytes)} ({limits.memory_fraction:.0%}) of "
        f"{limits.target.description}{on_host}"
    )


def _on_machine(row: Row) -> str:
    """Return the memory that the machine must have, if it is not known what it has."""
    from ..memory.render import format_bytes

    if row.limits.host_bytes is not None or not row.bytes[1]:
        return ""
    return f", on a machine with {format_bytes(row.machine_bytes)} of memory"


def _describe_missing(row: Row) -> str:
    from ..memory.render import format_bytes

    if row.plan is not None and row.plan.refusal:
        return "the compiler refuses it"
    places = zip(row.missing, ("", " on the host"), strict=True)
    at_least = "" if row.plan else "at least "
    texts = [f"{at_least}{format_bytes(size)} short{place}" for size, place in places if size]
    return " and ".join(texts)


def _describe_fit(row: Row) -> str:
    if row.fits:
        return "yes"
    if row.error:
        return "cannot be compiled"
    if row.plan is None and not any(row.missing):
        return "not planned, see --details"
    return f"no: {_describe_missing(row)}"


def _describe_options(row: Row, config: Any) -> str:
    if not row.form.has_command:
        return "(layers of Flax)"
    return describe_changes(config, row.form.config) or "(as given)"
