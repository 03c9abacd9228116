"""Errors of commands: one line on stderr, and an exit code."""

import contextlib
import errno
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from .._extras import install_command
from ..train.errors import TrainError, printable, quoted
from .other_names import suggest

LONGEST = 1000  # characters of a message; a file may have a key of 100 MB
USAGE, INTERRUPTED, PREEMPTED = 2, 130, 75  # exit codes: a wrong option, Ctrl-C, SIGTERM
ctrl_c: list[int] = []  # the signals of Ctrl-C outside of a run


def note_interrupt(number: int, _: object) -> NoReturn:
    """Handle Ctrl-C as Python does, and remember it: imports and JAX lose some exceptions."""
    ctrl_c.append(number)
    raise KeyboardInterrupt


class CommandError(Exception):
    """An error that ends the command with a message and an exit code."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def report(error: BaseException) -> int | None:
    """Print a user error on one line of stderr and return its exit code.

    Return None for any other error, which is a bug.
    """
    message, code = str(error), USAGE
    if isinstance(error, CommandError):
        code = error.exit_code
    # An error after Ctrl-C is most likely its consequence, in another form.
    elif isinstance(error, KeyboardInterrupt) or ctrl_c:
        message, code = "interrupted", INTERRUPTED
    elif found := _describe_system_error(error):
        message, code = found
    elif isinstance(error, MemoryError):
        message = f"out of memory ({message or 'of this machine'}). Use smaller data."
        code = 1
    elif isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in message:  # of JAX
        message, code = "out of device memory. Try a smaller --batch-size.", 1
    elif isinstance(error, ModuleNotFoundError):
        message = f"{error.name} is missing. Run {install_command('train')}."
    elif hasattr(error, "format_message"):
        message = _describe_usage_error(error)
    elif not isinstance(error, TrainError):
        return None
    if message:
        # In one piece: threads of JAX write to stderr, too.
        sys.stderr.write(f"effjax: {printable(shorten(message))}\n")
    return code


def shorten(message: str) -> str:
    """Return a message on one line, without the middle of a long one."""
    # Also those of libraries: a line is what a log of many jobs shows. The remedy is at the end.
    message = " ".join(message.split())
    if len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST // 2]} […] {message[-LONGEST // 2 :]}"


def _describe_usage_error(error: Any) -> str:
    """Return the message of an error of typer, whose classes are private."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if context and hasattr(error, "possibilities"):  # an option that does not exist
        hint = suggest(error.option_name, context.command.params)
        message = f"No such option: {error.option_name}.{hint}".rstrip(".") if hint else message
    if message and context:  # without a message, the help has been printed
        message = f"{message}. See {context.command_path} --help."
    return message


def _describe_system_error(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code of an error of the system that any command may get."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{quoted(error.filename)}: the name is too long. Use a shorter one.", USAGE
    if isinstance(error.__context__, BrokenPipeError):  # typer replaces it by SystemExit
        return "standard output was closed, which ended the command.", 1
    return None


@contextlib.contextmanager
def name_options(names: Collection[str]) -> Iterator[None]:
    """Let a TrainError name options as the command line has them: `--batch-size`.

    Args:
        names: The options of the command, as fields of its dataclasses.
    """

    def as_typed(match: re.Match[str]) -> str:
        name = match[1]
        # Other names in backquotes are fields of data or files.
        return f"--{name.replace('_', '-')}" if name in names else match[0]

    try:
        yield
    except TrainError as error:
        raise TrainError(re.sub(r"`([a-z_0-9]+)`", as_typed, str(error))) from error
