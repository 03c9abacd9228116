"""What the commands of `effjax train` share: where a run is written, and how one goes on."""

import contextlib
import dataclasses
import inspect
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..train.errors import OutOfDeviceMemory, Preempted, TrainError
from ..train.images.config import Config
from ..train.options import RunOptions
from .distributed import (
    OPTIONS,
    PREEMPTED,
    Coordinator,
    Distributed,
    HeartbeatTimeout,
    NumProcesses,
    ProcessId,
    cluster_of,
    ends_all,
)
from .memory_command import memory_command
from .options import fail, one_line_errors, option, parameters_of, take

if TYPE_CHECKING:
    from ..train.images.task import ImageResult
    from ..train.run_directory import RunDirectory


def train_command(
    name: str,
    options: type[RunOptions],
    go_on: Callable[..., Any],
    saver: str,
    with_resume: Sequence[str],
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., None]], Callable]:
    """Makes a command of `start(out, overwrite, *, more options, **options of a run)`.

    The command has the options of a run, then those of `start` after its `*`, then `--out`,
    `--overwrite` and `--resume`. An error of the user's is one line.

    Args:
        name: of the command, and of its run directories.
        options: the options of a run.
        go_on: where `--resume` is given, called with the run's options, its directory,
            `resume=True`, and those of the options after `start`'s `*` that are given too.
        saver: the option that saves memory.
        with_resume: the options that can be given with `--resume`, beside those that make no
            difference. One of a run is what it goes on with: its length.
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
                option(
                    "Go on with this run from its last checkpoint, options as they were; with "
                    f"--{with_resume[0]} to another end."
                ),
            ] = None,
            fall_back: Annotated[
                bool,
                option(
                    "With --resume: where the last checkpoint is damaged, delete it and take the "
                    "one before.",
                    name="--fall-back",
                ),
            ] = False,
            distributed: Distributed = False,
            coordinator: Coordinator = None,
            num_processes: NumProcesses = None,
            process_id: ProcessId = None,
            heartbeat_timeout: HeartbeatTimeout = 100,
            **given: Any,
        ) -> None:
            with ends_all(), one_line_errors(saver):
                from ..train.processes import from_first, join
                from ..train.run_directory import unused

                where = coordinator, num_processes, process_id, heartbeat_timeout
                if cluster := cluster_of(distributed, *where):
                    join(cluster)
                if resume is None:
                    if fall_back:
                        raise TrainError("--fall-back goes with --resume")
                    path = Path(from_first(lambda: str(unused(name)))) if out is None else out
                    return start(path, overwrite, **given)
                allowed = *with_resume, "fall_back", "checkpoint_every", "keep", "on_nan", "mesh"
                given |= {"fall_back": fall_back}
                added = {one: given[one] for one in _given_with_resume(command_line, allowed)}
                config = _options_of(resume, name, options)
                of_run = {one: added.pop(one) for one in list(added) if hasattr(config, one)}
                go_on(dataclasses.replace(config, **of_run), resume, resume=True, **added)

        command.__doc__ = start.__doc__
        of_start = inspect.signature(start).parameters.values()
        more = [one for one in of_start if one.kind is one.KEYWORD_ONLY]
        return take([*parameters_of(options, without, defaults), *more])(command)

    return decorate


def _given_with_resume(command_line: typer.Context, allowed: Sequence[str]) -> list[str]:
    """The options on the command line beside `--resume`, or `TrainError`."""
    given = [
        name
        for name in command_line.params
        if str(command_line.get_parameter_source(name)).endswith("COMMANDLINE")
        and name not in ("resume", *OPTIONS)
    ]
    for name in given:
        if name not in allowed:
            raise TrainError(
                f"--{name.replace('_', '-')} cannot be given with --resume; the run has its options"
            )
    return given


def _options_of(path: Path, command: str, options: type[RunOptions]) -> RunOptions:
    """Those of the run at `path`, which must be one of this command."""
    from ..train.run_directory import RunDirectory

    run = RunDirectory.find(path).config
    found = run.get("command", command)  # older runs have none
    if found == command:
        config = options.from_json(run.get("options"))
        found = config.command
        if found == command:
            return config
    raise TrainError(f"{path}: is a run of another command; use {_resume(found, path)}")


def _resume(command: str, path: Path) -> str:
    return f"effjax train {command} --resume {shlex.quote(str(path))}"


def train_images(
    config: Config,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
    fall_back: bool = False,
) -> "ImageResult":
    """Train a model of images in `out`: check everything, then write."""
    from ..train.images import report
    from ..train.images.task import prepare

    task, console = prepare(config), make_console()
    run, result = follow(config.command, console, task, report, out, overwrite, resume, fall_back)
    report.show_result(console, task, run, result)
    return result


def make_console() -> Console:
    """Where a run says how it goes; of several processes the first one does."""
    from ..train.processes import is_first

    return Console(quiet=not is_first())


def follow(
    command: str,
    console: Console,
    task: Any,
    report: Any,
    out: Path,
    overwrite: bool,
    resume: bool,
    fall_back: bool,
) -> tuple["RunDirectory", Any]:
    """Trains what is prepared, and shows how it goes; returns the directory and the result."""
    from ..train.loop import fit
    from ..train.processes import check_alike, from_first, is_first, joined, preempted
    from ..train.run_directory import RunDirectory

    def made() -> None:
        if resume:
            RunDirectory.open(out)
        else:
            RunDirectory.create(out, task.describe(), overwrite)

    described = task.describe()
    check_alike("option", described["options"] | {"data": None})  # may lie elsewhere
    check_alike("data:", described["data"])
    from_first(made)
    run = RunDirectory.find(out)
    run.writes = is_first()
    report.announce(console, task, run)
    progress = report.make_progress(console, task) if is_first() else None
    again = _resume(command, run.path)
    try:
        with preempted() if joined() else stop_signals() as stop, interrupts() as check:
            asked = lambda step: check() or stop(step)  # noqa: E731
            return run, fit(task, run, progress, resume, asked, fall_back)
    except RuntimeError as error:  # JAX's own error is one
        if "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfDeviceMemory(memory_command(task)) from error
        raise
    except KeyboardInterrupt:
        fail(f"interrupted; go on with {again}", 130)
    except Preempted as where:
        fail(
            f"stopped and saved {where}; go on with {_resume(command, run.path)}",
            PREEMPTED,
        )


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """Whether SIGTERM or SIGHUP has come, which are no more than noted; a second one ends the
    process as it always does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    came: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: Any) -> None:
        came.append(number)
        restore()

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, note)
    try:
        yield lambda step: bool(came)
    finally:
        restore()


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C is KeyboardInterrupt, wherever it comes. JAX calls Python where errors are only
    printed: what is yielded raises one that was lost there."""
    before, came = signal.getsignal(signal.SIGINT), []

    def note(number: int, _: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
