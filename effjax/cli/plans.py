"""What `effjax memory` does with the steps that it was given: plans, tables, a drawing."""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..memory import Comparison, MaxBatch, compare, max_batch_size
from ..memory._lower import DeviceCountError
from ..memory.batch_size import split_over_devices
from ..memory.render import MAX_ROWS, Report, Table, format_bytes
from ..memory.targets import find_target
from ..train.errors import TrainError

Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]


def run(
    steps: Steps,
    *,
    own: bool,
    batch_size: int,
    only: Sequence[str],
    max_batch: bool,
    multiple_of: int | None,
    as_json: bool,
    plot: Path | None,
    **options: Any,
) -> None:
    """Plans the steps, and prints what was found. `own`: they are the user's."""
    try:
        find_target(options["target"])
    except ValueError as error:
        raise TrainError(str(error)) from error
    if plot is not None:
        _check_plot(plot)
    devices, unit = options["num_devices"], multiple_of or 1
    start = -(-batch_size // unit) * unit

    @functools.lru_cache(maxsize=2)  # of the batches that `split_over_devices` compares
    def chosen(size: int) -> dict[str, tuple[Any, ...]]:
        found = steps(size)
        if unknown := [name for name in only if name not in found]:
            raise TrainError(f"--only {unknown[0]!r} must be one of {', '.join(found)}")
        return {name: step for name, step in found.items() if name in (only or found)}

    def planned(split: bool) -> dict[str, MaxBatch] | Comparison:
        of: dict[str, Any] = {n: lambda size, n=n: chosen(size)[n] for n in chosen(start)}
        if split:
            of = {name: split_over_devices(step, devices) for name, step in of.items()}
        if not max_batch:
            return compare({n: step(start) for n, step in of.items()}, progress=True, **options)
        search = dict(multiple_of=multiple_of or devices, start=start, progress=True)
        return {name: max_batch_size(step, **search, **options) for name, step in of.items()}

    try:
        found = planned(split=False)
    except DeviceCountError as error:
        if not own or error.spanned > 1:
            raise TrainError(
                f"--num-devices {devices}: the step spans {error.spanned}, as its shardings say"
            ) from error
        print(
            f"effjax: the step says nothing of devices; what grows with its batch is split over "
            f"{devices}, all else is whole on each",
            file=sys.stderr,
        )
        found = planned(split=True)

    console = Console()
    if isinstance(found, Comparison):
        plans = found
        _show_plans(console, plans, as_json)
    else:
        plans = Comparison({name: result.plan for name, result in found.items()})
        _show_batches(console, found, as_json)
    if plot is not None:
        _save(plans, plot)
        if not as_json:
            print(f"written: {plot}")


def _show_plans(console: Console, plans: Comparison, as_json: bool) -> None:
    if as_json:
        return print(json.dumps(plans.to_dict(), indent=1))
    max_rows = MAX_ROWS
    if len(plans) > 1:
        _show(console, plans.report())
        max_rows //= 2
        print()
    for i, (name, plan) in enumerate(plans.items()):
        if i:
            print()
        _show(console, plan.report(name, max_rows))


def _show_batches(console: Console, found: dict[str, MaxBatch], as_json: bool) -> None:
    if as_json:
        records = {name: result.to_dict() for name, result in found.items()}
        return print(json.dumps(records, indent=1))
    header = ["", "largest batch", "peak", "batches compiled"]
    rows = [
        [
            name,
            str(result.batch_size) if result.batch_size else "none fits",
            format_bytes(result.plan.peak_device_bytes),
            ", ".join(map(str, sorted(result.tried))),
        ]
        for name, result in found.items()
    ]
    _show(console, Report([Table(header, rows)]))


def _show(console: Console, report: Report) -> None:
    """Print tables on a terminal, and text, which is not cut to a width, elsewhere."""
    if console.is_terminal:
        console.print(report)
    else:
        print(report)


def _check_plot(path: Path) -> None:
    """What can be known before minutes of compiling."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise TrainError(f"--plot {path}: {what}")
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise TrainError(f"--plot {path}: must end in one of {', '.join(sorted(kinds))}")


def _save(plans: Comparison, path: Path) -> None:
    figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise TrainError(f"--plot {path}: {error}") from error
