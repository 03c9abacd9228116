"""`effjax bench`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..train.errors import TrainError
from .options import one_line_errors, option


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="all, or benchmarks by name, as --list has them.",
            metavar="all|NAME",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None, option("A folder for the tables, JSON files and pictures. (needed)")
    ] = None,
    size: Annotated[
        Literal["small", "published"],
        option("small: minutes on a laptop. published: the settings of docs/measured."),
    ] = "small",
    list_names: Annotated[
        bool, option("Name the benchmarks, and run none.", name="--list")
    ] = False,
) -> None:
    """Measure effjax beside its peers, in one process and in turn.

    Each table is printed, and written to the folder as JSON with the versions and the machine, as a
    picture, and as a part of summary.md. A peer that is not installed is said and left out; a
    benchmark that fails is said at the end (exit code 1), and Ctrl-C leaves those that are done.
    """
    with one_line_errors():
        from ..bench.suite import BENCHMARKS, INTERRUPTED, run_all

        if list_names:
            width = max(map(len, BENCHMARKS))
            for name, found in BENCHMARKS.items():
                typer.echo(f"{name:{width}}  {found.shows}")
            return
        asked = list(dict.fromkeys(names or []))
        chosen = [*BENCHMARKS] if "all" in asked else asked
        if not chosen:
            raise TrainError("say which: effjax bench all, or names; --list shows them")
        if unknown := [name for name in chosen if name not in BENCHMARKS]:
            raise TrainError(f"{unknown[0]!r} must be one of all, {', '.join(BENCHMARKS)}")
        if out is None:
            raise TrainError("--out is missing: a folder for what is found")
        _check_folder(out)
        command = ["effjax", "bench", *(names or []), "--size", size, "--out", str(out)]
        code = run_all(chosen, size, out, shlex.join(command), typer.echo)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise typer.Exit(code)


def _check_folder(out: Path) -> None:
    """What can be known before minutes of measuring."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.md").touch()
    except OSError as error:
        said = error.strerror or error
        raise TrainError(f"--out {out}: {said}; give a folder that can be written") from error
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainError(f'{error.name} is missing; run pip install "effjax[train]"') from error
