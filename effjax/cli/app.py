"""The command line `effjax`: its commands and its entry point.

Commands import JAX and the training code when they run, so that `--help` does not wait for them.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .._version import __version__
from ..train.text.config import FinetuneConfig
from . import errors
from .chat import ChatOptions, chat
from .convert import convert
from .generate import GenerateOptions, generate
from .memory import memory_app
from .merge import merge
from .options import Command, command
from .train import FinetuneRunOptions, finetune, train_app
from .training import exit_joined

app = typer.Typer(
    help="Train networks that do not fit in device memory, in JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


def run(argv: Sequence[str]) -> int:
    """Run the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The exit code: 0 on success, otherwise the code of the error (see `errors`).

    Raises:
        BaseException: Errors that are not the user's, which are bugs in effjax.
    """
    main: Any = typer.main.get_command(app)
    try:
        # In this mode, typer returns the exit code and raises errors instead of printing them.
        code = main.main(args=[*argv], prog_name="effjax", standalone_mode=False) or 0
        if code == errors.INTERRUPTED:
            # Typer has replaced KeyboardInterrupt by an exit code. Raise it again for the report.
            raise KeyboardInterrupt
        return code
    except BaseException as error:
        code = errors.report(error)
        exit_joined(error, code)
        if code is None:
            raise
        return code


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"effjax {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Declare the global options; their callbacks do the work."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Test the CUDA kernels on this machine's GPUs. Operators use those that are "
            "correct and faster than XLA from then on. Then plan and measure three training steps. "
            "The exit code is 1 if a kernel or a planned peak is wrong, or if a kernel cannot be "
            "tested.",
        ),
    ] = False,
) -> None:
    """Show versions, devices, memory kinds, native kernels, and how to install what is missing."""
    from .doctor import show, validate_kernels

    if gpu:
        raise typer.Exit(validate_kernels(as_json))
    show(as_json)


app.command("convert", cls=Command)(convert)
app.command("merge", cls=Command)(merge)
command(app, "generate", GenerateOptions)(generate)
command(app, "chat", ChatOptions)(chat)
command(app, "finetune", FinetuneConfig, FinetuneRunOptions)(finetune)
app.add_typer(memory_app, name="memory")
app.add_typer(train_app, name="train")
