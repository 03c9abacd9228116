"""What `effjax memory` does with the steps that it was given: plans, tables, a drawing."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..memory import report
from ..memory.batch_size import MaxBatch, max_batch_size
from ..memory.compare import Comparison, plan_all
from ..memory.targets import find_target
from ..train.errors import TrainError

Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]


def run(
    steps: Steps,
    *,
    batch_size: int,
    only: Sequence[str],
    max_batch: bool,
    as_json: bool,
    plot: Path | None,
    **options: Any,
) -> None:
    """Plans the steps, and prints what was found."""
    try:
        find_target(options["target"])
    except ValueError as error:
        raise TrainError(str(error)) from error
    if plot is not None and not plot.parent.is_dir():
        raise TrainError(f"--plot {plot}: there is no folder {plot.parent}")
    console = Console()
    progress = Console(stderr=True).is_terminal

    def chosen(size: int) -> dict[str, tuple[Any, ...]]:
        found = steps(size)
        if unknown := [name for name in only if name not in found]:
            raise TrainError(f"--only {unknown[0]!r} must be one of {', '.join(found)}")
        return {name: step for name, step in found.items() if name in (only or found)}

    if max_batch:
        multiple = options.get("num_devices") or 1
        found = {
            name: max_batch_size(
                lambda size, name=name: chosen(size)[name],
                multiple_of=multiple, start=batch_size, progress=progress, **options,
            )
            for name in chosen(multiple)
        }  # fmt: skip
        plans = Comparison({name: result.plan for name, result in found.items()})
        _show_batches(console, found, as_json)
    else:
        plans = plan_all(chosen(batch_size), progress, **options)
        _show_plans(console, plans, as_json)
    if plot is not None:
        _save(plans, plot)
        if not as_json:
            print(f"written: {plot}")


def _show_plans(console: Console, plans: Comparison, as_json: bool) -> None:
    if as_json:
        return print(json.dumps(plans.to_dict(), indent=1))
    shown = report.SHOWN
    if len(plans) > 1:
        _show(console, plans, str(plans))
        shown //= 2
        print()
    for i, (name, plan) in enumerate(plans.items()):
        if i:
            print()
        _show(console, report.plan_tables(plan, name, shown), report.plan_text(plan, name, shown))


def _show_batches(console: Console, found: dict[str, MaxBatch], as_json: bool) -> None:
    if as_json:
        records = {name: result.to_dict() for name, result in found.items()}
        return print(json.dumps(records, indent=1))
    header = ["", "largest batch", "peak", "batches compiled"]
    rows = [
        [
            name,
            str(result.batch_size) if result.batch_size else "none fits",
            report.format_bytes(result.plan.peak_device_bytes),
            ", ".join(map(str, sorted(result.tried))),
        ]
        for name, result in found.items()
    ]
    _show(console, report.table("", header, rows), report.aligned([header, *rows]))


def _show(console: Console, table: Any, text: str) -> None:
    """Tables on a terminal; elsewhere lines, which are not cut to a width."""
    if console.is_terminal:
        console.print(table)
    else:
        print(text)


def _save(plans: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # an unknown kind of file
        raise TrainError(f"--plot {path}: {error}") from error
