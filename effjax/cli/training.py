"""The code that the commands which train share: starting, resuming and stopping a run."""

import contextlib
import dataclasses
import logging
import math
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.config import RunConfig, command_line
from ..train.errors import PreemptionError, TrainError
from ..train.host_memory import set_pinned_limit
from .errors import INTERRUPTED, PREEMPTED, CommandError
from .options import RunOptions, take

if TYPE_CHECKING:
    from rich.console import Console

    from ..train.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A run to start or to resume, as the command line describes it."""

    config: Any  # a RunConfig
    path: Path
    overwrite: bool
    resume: bool
    given: Mapping[str, Any]  # options of the configuration that were given
    stop_at: float = math.inf  # by time.monotonic


def request_run(config_type: type[RunConfig], given: Mapping[str, Any]) -> RunRequest:
    """Join the other processes, if any, and return the run that the options describe.

    Args:
        config_type: The configuration of the command.
        given: The options of `config_type` and of `RunOptions` that are given.
    """
    options, changes = RunOptions(**take(RunOptions, given)), take(config_type, given)
    if "init_from" in changes:  # config.json has the absolute path
        changes["init_from"] = os.path.realpath(changes["init_from"])
    config, stop_at = config_type(**changes), math.inf
    if options.stop_after is not None:
        stop_at = time.monotonic() + parse_time("--stop-after", options.stop_after)
    join_processes(options)
    from ..train.processes import check_same_everywhere, is_multiprocess, run_on_first
    from ..train.run_directory import default_path

    if stop_at < math.inf and is_multiprocess():
        raise TrainError("--stop-after works in a single process. Send SIGTERM to one instead.")
    resume, path = options.resume, options.out
    # Both decide what the processes communicate before they compare the configuration.
    check_same_everywhere("option", {"out": path and str(path), "resume": resume and str(resume)})
    check_same_everywhere("native kernels", describe_kernels())
    if resume is None:
        if path is None:
            path = Path(run_on_first(lambda: str(default_path(config.COMMAND))))
        return RunRequest(config, path, options.overwrite, False, changes, stop_at)

    for name in ("out", "overwrite", "fit"):
        if name in given:
            raise TrainError(f"--{name} cannot be combined with --resume. The run has its own.")
    config = resumed_config(config_type, resume, changes)
    return RunRequest(config, resume, False, True, changes, stop_at)


def join_processes(options: RunOptions) -> None:
    """Make this process one of several if the options say so."""
    address = options.coordinator, options.num_processes, options.process_id
    # Before JAX starts: XLA reads the limit once. Processes of one machine share its memory.
    host = (options.coordinator or "").rpartition(":")[0]
    is_local = host in ("localhost", "127.0.0.1", "[::1]")
    set_pinned_limit(options.num_processes if is_local else None)
    if options.distributed or None not in address:
        from ..train.processes import join

        join(*address, heartbeat_timeout=options.heartbeat_timeout)


def resumed_config(config_type: type[RunConfig], run: Path, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a run with the options that are given again."""
    from ..train.run_directory import RunDirectory

    stored = RunDirectory.find(run).read_config()
    command = stored.get("command")
    if command != config_type.COMMAND:
        remedy = f"Use {resume_command(command, run)}" if command else "Start a new run."
        raise TrainError(f"{run} is not a run of {command_line(config_type.COMMAND)}. {remedy}")
    config = dataclasses.replace(config_type.from_json(stored.get("options")), **changes)
    config.check_resumable(run, stored["options"])  # before data and parameters are read
    return config


def parse_time(option: str, text: str) -> float:
    """Return the seconds in a text such as `90m` or `7h30m`."""
    match = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip())
    hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0,) * 3
    if not (duration := 3600 * hours + 60 * minutes + seconds):
        raise TrainError(f"{option} {text!r:.120} must be a time, such as 90m or 7h30m.")
    return duration


def describe_kernels() -> dict[str, str | None]:
    """Return the choice of GPU kernels, and the digest of their library if they run."""
    from ..native import defaults

    try:
        choice, library = defaults.read_variable(), None
    except ValueError as error:
        raise TrainError(str(error)) from error
    if choice == "on":
        with contextlib.suppress(FileNotFoundError):  # an error where a GPU needs it
            library = defaults.library_digest("cuda")
    return {defaults.VARIABLE: choice, "library": library}


def resume_command(command: str, path: Path) -> str:
    """Return the command line that resumes a run."""
    return f"{command_line(command)} --resume {shlex.quote(str(path))}"


def make_console() -> "Console":
    """Return the console of a run, which is quiet in all processes but the first."""
    from rich.console import Console

    from ..train.processes import is_first

    return Console(quiet=not is_first())


def train(
    request: RunRequest,
    task: Any,
    description: Sequence[str],
    console: "Console",
    memory_options: str,
) -> tuple["RunDirectory", Any]:
    """Train a task and show its progress.

    Args:
        request: The run.
        task: From `prepare`.
        description: Lines that describe the task.
        console: Where to print.
        memory_options: The options that save memory, for the error if it does not suffice.

    Returns:
        The run directory and the result of the task.
    """
    import jax

    from ..train.loop import fit
    from ..train.processes import is_first, is_preempted
    from ..train.report import ConsoleProgress, print_line
    from ..train.run import open_run
    from ..train.trackers import track

    run = open_run(task, request.path, request.resume, request.overwrite)
    for line in (*description, f"run directory: {run.path}"):
        print_line(console, line)
    shown = ConsoleProgress(console, task) if is_first() else None
    progress = shown and track(shown, task.config, run.path)
    resume = f"Resume with {resume_command(task.config.COMMAND, request.path)}"
    has_joined = jax.distributed.is_initialized()
    quiet_background_errors()
    with stop_signals(has_joined) as received:

        def stop(step: int) -> bool:
            stopped = is_preempted() if has_joined else bool(received)
            return stopped or time.monotonic() > request.stop_at

        try:
            return run, fit(task, run, progress, request.resume, stop)
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise CommandError(
                f"out of device memory. Try a smaller --batch-size, or {memory_options}. To see "
                "what uses the memory, plan the model with effjax memory."
            ) from error
        except KeyboardInterrupt as error:
            kept = run.last_step
            end = f". {run.path} keeps step {kept}. {resume}"
            nothing = " before the first checkpoint. Nothing is kept."
            raise CommandError(f"interrupted{end if kept else nothing}", INTERRUPTED) from error
        except PreemptionError as error:
            verb, code = "stopped", PREEMPTED
            if signal.SIGINT in received:
                verb, code = "interrupted", INTERRUPTED
            raise CommandError(f"{verb} and saved {error}. {resume}", code) from error


@contextlib.contextmanager
def stop_signals(has_joined: bool) -> Iterator[list[int]]:
    """Yield a list of the signals SIGINT (Ctrl-C), SIGTERM and SIGHUP that have come.

    Each of them acts as before after the first one, so that a second one ends the process. The main
    thread handles them, which waits for a step or a compilation in JAX.

    Args:
        has_joined: Turn the first one into SIGTERM, which JAX receives: see `is_preempted`.
    """
    numbers = [signal.SIGINT, signal.SIGHUP] + ([] if has_joined else [signal.SIGTERM])
    # nohup ignores SIGHUP, and a shell SIGINT for what a script starts in the background.
    handlers = {n: h for n in numbers if (h := signal.getsignal(n)) != signal.SIG_IGN}
    received: list[int] = []

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def receive(number: int, _: Any) -> None:
        received.append(number)
        restore()
        if number == signal.SIGINT:
            # Not by `print`, which this may have interrupted: buffers raise an error then.
            os.write(2, b"\nstopping after this step; press Ctrl-C again to end now\n")
        if has_joined:
            signal.raise_signal(signal.SIGTERM)

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()


def exit_joined(error: BaseException, code: int | None) -> None:
    """End this process at once if it is one of several and has failed alone.

    Args:
        error: Its error.
        code: The exit code, or None for an error that has not been printed.
    """
    # Without the module, Ctrl-C came while JAX was imported.
    if "effjax.train.processes" not in sys.modules or isinstance(error.__cause__, PreemptionError):
        return
    import jax

    from ..train.processes import is_first

    if not jax.distributed.is_initialized():
        return
    if code is None:
        traceback.print_exception(error)
    # JAX's service runs in the first process, and aborts the others when it ends. They may have the
    # same error, and need a moment to print it.
    with contextlib.suppress(RuntimeError):  # no backend
        if is_first():
            time.sleep(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait five minutes for the others, which wait for this process.
    os._exit(1 if code is None else code)


def quiet_background_errors() -> None:
    """Hide the tracebacks of a save that fails in background threads; `fit` raises its error.

    This lasts to the end of the process: some tracebacks come at its exit.
    """

    def report_unraisable(unraisable: Any) -> None:
        # TensorStore's other writes end after Orbax has closed the event loop that waits for them.
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, report_unraisable
    for name in ("absl", "asyncio"):  # "absl" is the logger of Orbax
        logging.getLogger(name).setLevel(logging.CRITICAL)
