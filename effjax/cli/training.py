"""What the commands of `effjax train` share: where a run is written, and how one goes on."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..train.errors import TrainError
from ..train.images.config import Config
from ..train.options import RunOptions
from .options import fail, one_line_errors, option, parameters_of, take

if TYPE_CHECKING:
    from ..train.images.task import ImageResult
    from ..train.run_directory import RunDirectory


def train_command(
    name: str,
    options: type[RunOptions],
    go_on: Callable[..., Any],
    saver: str,
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., None]], Callable]:
    """Makes a command of `start(out, overwrite, *, more options, **options of a run)`.

    The command has the options of a run, then those of `start` after its `*`, then `--out`,
    `--overwrite` and `--resume`. An error of the user's is one line.

    Args:
      name: of the command, and of its run directories.
      options: the options of a run.
      go_on: where `--resume` is given, called with the run's options, its directory, and
        `resume=True`.
      saver: the option that saves memory.
      without, defaults: as `parameters_of` has them.
    """

    def decorate(start: Callable[..., None]) -> Callable:
        def command(
            command_line: typer.Context,
            *,
            out: Annotated[
                Path | None, option(f"Run directory. (default: runs/{name}-DATE-TIME)")
            ] = None,
            overwrite: Annotated[
                bool, option("Replace the run in --out.", name="--overwrite")
            ] = False,
            resume: Annotated[
                Path | None,
                option("Go on with this run from its last checkpoint, options as they were."),
            ] = None,
            **given: Any,
        ) -> None:
            with one_line_errors(saver):
                from ..train.run_directory import RunDirectory, unused

                if resume is None:
                    return start(unused(name) if out is None else out, overwrite, **given)
                _no_other_option(command_line)
                config = RunDirectory.open(resume).config.get("options")
                go_on(options.from_json(config), resume, resume=True)

        command.__doc__ = start.__doc__
        of_start = inspect.signature(start).parameters.values()
        more = [one for one in of_start if one.kind is one.KEYWORD_ONLY]
        return take([*parameters_of(options, without, defaults), *more])(command)

    return decorate


def _no_other_option(command_line: typer.Context) -> None:
    for name in command_line.params:
        given = str(command_line.get_parameter_source(name)).endswith("COMMANDLINE")
        if given and name != "resume":
            raise TrainError(
                f"--{name.replace('_', '-')} cannot be given with --resume; the run has its options"
            )


def train_images(
    config: Config,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
) -> "ImageResult":
    """Trains a model of images in `out`: checks everything, then writes."""
    from ..train.images import report
    from ..train.images.task import prepare

    command = "deform-resnet" if config.model == "deform-resnet" else "densenet"
    task, console = prepare(config), Console()
    run, result = follow(command, console, task, report, out, overwrite, resume)
    report.show_result(console, task, run, result)
    return result


def follow(
    command: str,
    console: Console,
    task: Any,
    report: Any,
    out: Path,
    overwrite: bool,
    resume: bool,
) -> tuple["RunDirectory", Any]:
    """Trains what is prepared, and shows how it goes; returns the directory and the result."""
    from ..train.loop import fit
    from ..train.run_directory import RunDirectory

    if resume:
        run = RunDirectory.open(out)
    else:
        run = RunDirectory.create(out, task.describe(), overwrite)
    report.announce(console, task, run)
    try:
        return run, fit(task, run, report.make_progress(console, task), resume)
    except KeyboardInterrupt:
        fail(f"interrupted; go on with effjax train {command} --resume {run.path}", 130)
