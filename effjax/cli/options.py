"""What the commands of `effjax` share: options with help, and errors that are one line."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from ..train.errors import OutOfDeviceMemory, TrainError
from ..train.options import declared

NAMES_WIDTH = 30  # of the column of names in the help


def option(help: str, panel: str | None = None, name: str | None = None) -> Any:
    """An option with its help; `name` where it is not the parameter's."""
    names = [name] if name else []
    return typer.Option(*names, help=help, rich_help_panel=panel)


def parameters_of(
    options: type, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> list[inspect.Parameter]:
    """The options that a dataclass declares, as keyword-only parameters that typer understands.

    Args:
        options: a dataclass whose fields have an `Option`.
        without: the names of those that the command does not have.
        defaults: by name, where the command's are not those of the dataclass.
    """
    found = []
    for name, kind, said, default in declared(options):
        default = (defaults or {}).get(name, default)
        unset = f" (default: {said.unset})" if said.unset and default is None else ""
        annotation = Annotated[kind, option(said.help + unset, said.panel)]
        if name not in without:
            found.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )
    return found


def take(parameters: Sequence[inspect.Parameter]) -> Callable[[Callable], Callable]:
    """Gives a command these in the place of its `**` parameter; typer reads the signature.

    The command's own keyword-only parameters come after them in the help.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command)
        own = list(signature.parameters.values())
        first = [one for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
        last = [one for one in own if one.kind is one.KEYWORD_ONLY]
        taken = signature.replace(parameters=[*first, *parameters, *last])
        setattr(command, "__signature__", taken)  # noqa: B010, as no type says that it has one
        return command

    return decorate


class Command(typer.core.TyperCommand):
    """A command whose help has the same two columns in all groups of options; typer's differ from
    group to group, and cut long names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, Table] = {}
        for param in self.get_params(ctx):
            names, said = param.get_help_record(ctx) or ("", "")
            title = getattr(param, "rich_help_panel", None) or "Options"
            if title not in groups:
                groups[title] = Table.grid(
                    Column(width=NAMES_WIDTH), Column(), padding=(0, 2, 0, 0)
                )
            said = said.replace("[default: ", "[default:\N{NO-BREAK SPACE}")
            groups[title].add_row(Text(names), Text(said))
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        console = Console()
        with console.capture() as shown:
            for title, table in groups.items():
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        formatter.write(f"\n{shown.get()}")


@contextmanager
def one_line_errors(saver: str = "a smaller model") -> Iterator[None]:
    """An error of the user's becomes one line and an exit code, not a traceback.

    `saver` is what saves memory besides.
    """
    try:
        yield
    except TrainError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except MemoryError as error:
        fail(f"out of memory ({error or 'of this machine'}); use smaller data", 1)
    except OutOfDeviceMemory as error:
        fail(
            f"out of device memory; try a smaller --batch-size, or {saver}; see where it goes with "
            f"{error}",
            1,
        )
    except RuntimeError as error:  # JAX's own error is one
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(f"out of device memory; try a smaller --batch-size, or {saver}", 1)


def fail(message: str, code: int) -> NoReturn:
    """Says it on one line of stderr and exits."""
    typer.echo(f"effjax: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)
