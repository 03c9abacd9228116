"""The commands of `effjax`: options in, exit codes out.

Nothing heavy is imported before a command runs, so that the help comes at once.
"""

from typing import Annotated

import typer

from .. import __version__
from .convert import convert
from .memory import memory
from .options import Command, option
from .train_densenet import train_densenet
from .train_lm import train_lm
from .train_resnet import train_resnet

app = typer.Typer(
    help="Train networks that do not fit in device memory, in JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)
train_app = typer.Typer(help="Train a model on images or on text.", no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"effjax {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of `effjax` itself."""


@app.command()
def doctor(
    as_json: Annotated[bool, option("Print it as JSON.", name="--json")] = False,
) -> None:
    """Show versions, devices, memory kinds, native kernels, and how to install what is missing."""
    from .doctor import show  # it must do without typer

    show(as_json)


@train_app.callback()
def train() -> None:
    """Train a model on images or on text."""


app.command("convert", cls=Command)(convert)
app.command("memory", cls=Command)(memory)
app.add_typer(train_app, name="train")
train_app.command("lm", cls=Command)(train_lm)
train_app.command("densenet", cls=Command)(train_densenet)
train_app.command("resnet", cls=Command)(train_resnet)
