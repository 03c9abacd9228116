"""What the commands of `effjax` share: options with help, and errors that are one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from ..train.errors import TrainError

DATA, MODEL, OPTIMIZATION = "Data", "Model", "Optimization"


def option(help: str, panel: str | None = None, name: str | None = None) -> Any:
    """An option with its help; `name` where it is not the parameter's."""
    names = [name] if name else []
    return typer.Option(*names, help=help, rich_help_panel=panel)


def no_other_option(context: typer.Context) -> None:
    """Raises `TrainError` if an option was given beside `--resume`."""
    sources = {name: str(context.get_parameter_source(name)) for name in context.params}
    explicit = [name for name, source in sources.items() if source.endswith("COMMANDLINE")]
    if explicit != ["resume"]:
        other = next(name for name in explicit if name != "resume").replace("_", "-")
        raise TrainError(f"--{other} cannot be given with --resume; the run has its options")


@contextmanager
def one_line_errors(saver: str = "--save features") -> Iterator[None]:
    """An error of the user's becomes one line and an exit code, not a traceback.

    `saver` is the option that saves memory.
    """
    try:
        yield
    except TrainError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except RuntimeError as error:  # JAX's own error is one
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(f"out of device memory; try a smaller --batch-size, or {saver}", 1)


def fail(message: str, code: int) -> NoReturn:
    """Says it on one line of stderr and exits."""
    typer.echo(f"effjax: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)
