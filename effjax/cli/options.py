"""Options of commands, made from the fields of dataclasses, and the layout of their help."""

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer.core
from typer import Argument, Option

from ..train.config import (
    COUNT,
    DATA,
    INDEX,
    MAX_COUNT,
    MAX_SIZE,
    MODEL,
    OPTIMIZATION,
    PLAN,
    PROCESSES,
    RUN,
    SIZE,
    RunConfig,
    check_options,
    option,
)
from ..train.errors import DataError, TrainError, quoted
from ..train.files import read_text
from . import errors
from .other_names import suggest

GROUPS = "Options", DATA, MODEL, OPTIMIZATION, RUN, PLAN, PROCESSES  # in the order of the help
MAX_FILE = 1_000_000  # characters of a file for --config
NAME_WIDTH = 30  # of the first column of the help
OF_ONE_RUN = "out", "overwrite", "resume"  # options that a file for several runs does not have


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options from a file."""

    config: Path | None = option(
        None, help="A YAML file with options by name. The command line has precedence."
    )
    print_config: bool = option(False, help="Print the options that are given as YAML, and exit.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(FileOptions):
    """Options of a run that are not stored with it."""

    out: Path | None = option(None, help="Run directory. (default: runs/COMMAND-DATE-TIME)")
    overwrite: bool = option(False, help="Replace the run in --out.")
    resume: Path | None = option(
        None,
        help="Continue this run after its last intact checkpoint. Only its length, the places of "
        "its files, --checkpoint-every, --keep, --on-nan and --mesh can change.",
    )
    stop_after: str | None = option(
        None,
        help="Save a checkpoint and stop after this time, such as 90m or 7h30m; before the limit "
        "of a job.",
    )
    fit: str | None = option(
        None,
        help="Choose the options that trade time for memory: the fastest ones that fit in the "
        "memory of a GPU (h100), in a number of bytes (24GB), or both (h100:24GB). Options that "
        "are given do not change.",
    )
    distributed: bool = option(
        False,
        help="Join the processes that SLURM, Open MPI or Kubernetes started.",
        group=PROCESSES,
    )
    coordinator: str | None = option(None, help="HOST:PORT of process 0.", group=PROCESSES)
    num_processes: int | None = option(
        None, help="Number of processes.", group=PROCESSES, check=SIZE
    )
    process_id: int | None = option(
        None, help="Number of this process, from 0.", group=PROCESSES, check=INDEX
    )
    heartbeat_timeout: int = option(
        100,
        help="Seconds of silence after which a process counts as dead.",
        group=PROCESSES,
        check=COUNT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        address = self.coordinator, self.num_processes, self.process_id
        if not self.distributed and None in address and address != (None, None, None):
            raise TrainError(
                "--coordinator, --num-processes and --process-id must be given together. "
                "--distributed alone asks the cluster."
            )


def command(
    app: typer.Typer, name: str, *options: type
) -> Callable[[Callable[[dict[str, Any]], Any]], Callable]:
    """Add a function to an app as a command whose options are the fields of dataclasses.

    The function is called with the options that the command line or its `--config FILE` gives, by
    name. So an option that was not given differs from one that has its default.

    Args:
        app: The app.
        name: The name of the command.
        *options: The dataclasses. Their fields are made by `effjax.train.config.option`.
    """

    def add(function: Callable[[dict[str, Any]], Any]) -> Callable:
        fields = [(of, field) for of in options for field in dataclasses.fields(of)]
        fields.sort(key=lambda pair: GROUPS.index(_group(pair[1])))

        # Typer reads a command's options from its signature. It is made of the fields, so that an
        # option is declared once.
        def run(**values: Any) -> None:
            # Every default of the command line is None, so that what is left was given.
            given = {name: value for name, value in values.items() if value is not None}
            names = {field.name for _, field in fields if not field.metadata["positional"]}
            with errors.name_options(names):
                for of in options:
                    of(**take(of, given))  # checks each option
                given.pop("config", None)
                if given.pop("print_config", False):
                    print_options(given)
                else:
                    function(given)

        run.__signature__ = inspect.Signature([_parameter(*pair) for pair in fields])  # type: ignore[attr-defined]
        run.__doc__ = function.__doc__
        app.command(name, cls=Command)(run)
        return function

    return add


def print_options(given: Mapping[str, Any]) -> None:
    """Print options as a file for `--config`, without those that name the directory of a run."""
    import yaml

    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if name not in OF_ONE_RUN
    }
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")


def take(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(options)}
    return {name: value for name, value in given.items() if name in names}


def _group(field: dataclasses.Field) -> str:
    return "Options" if field.metadata["positional"] else field.metadata["group"]


def _parameter(options: type, field: dataclasses.Field) -> inspect.Parameter:
    """Return a parameter that is None if the option is not given, unless it must be."""
    annotation: Any = typing.get_type_hints(options)[field.name]
    text, default = field.metadata["help"], field.default
    names = []
    if default is True:
        text += " (default:\N{NO-BREAK SPACE}on)"
    # Options of a run have a --no- form, because --resume and --config may have turned them on.
    elif default is False and not issubclass(options, RunConfig):
        names = [f"--{field.name.replace('_', '-')}"]  # nothing to turn off
    elif not (default is None or default is False or default is dataclasses.MISSING):
        text += f" (default:\N{NO-BREAK SPACE}{default})"
    if field.metadata["positional"]:
        info: Any = Argument(help=text, show_default=False)
    else:
        # Eager: a file sets defaults before the other options are read.
        callback = _read_file if field.name == "config" else None
        info = Option(
            *names,
            help=text, show_default=False, rich_help_panel=field.metadata["group"],
            callback=callback, is_eager=callback is not None,
        )  # fmt: skip
    is_needed = field.default is dataclasses.MISSING
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_needed else None,
        annotation=Annotated[annotation | None, info],
    )  # fmt: skip


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a file the defaults of the command line."""
    if path is None:
        return None
    try:
        values = _load_yaml(path)
    except ValueError as error:
        raise TrainError(f"--config {path}: must be YAML ({quoted(error)}).") from error
    except DataError as error:
        raise TrainError(f"--config {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise TrainError(f"--config {path}: must have options by name, such as `epochs: 3`.")
    params = {param.name: param for param in context.command.params}
    for name in "config", "print_config", "help":
        params.pop(name, None)
    context.default_map = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in params:
            close = difflib.get_close_matches(name, [str(n) for n in params], 1)
            hint = suggest(name, params.values(), in_file=True)
            hint = hint or (f" Did you mean {close[0]}?" if close else "")
            raise TrainError(f"--config {path}: {key!r:.120} is not an option.{hint}")
        if name in context.default_map:
            raise TrainError(f"--config {path}: {key!r:.120} is given twice.")
        if value is not None:
            param = params[name]
            if getattr(param, "multiple", False) and isinstance(value, str):
                value = [value]
            _check_yaml(f"--config {path}: {key!r:.120} (={value!r:.120})", value, param)
            context.default_map[name] = value
    return path


def _load_yaml(path: Path) -> Any:
    """Return the content of a small file of YAML; raise ValueError or DataError."""
    import yaml

    text = read_text(path)
    if len(text) > MAX_FILE:
        raise ValueError(f"{len(text)} characters")
    try:
        # A few hundred bytes of aliases would make gigabytes of lists.
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            is_end = isinstance(event, yaml.CollectionEndEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - is_end
            if isinstance(event, yaml.AliasEvent) or depth > 2:
                raise ValueError(
                    f"line {event.start_mark.line + 1}: neither aliases nor deep lists"
                )
        root: Any = yaml.compose(text, yaml.SafeLoader)
        keys = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"{repeated[0]!r:.120} is given twice")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check_yaml(what: str, value: Any, param: Any) -> None:
    """Raise TrainError for a value that the command line would read as something else."""
    if getattr(param, "multiple", False):
        if not isinstance(value, list):
            raise TrainError(f"{what} must be a list.")
    elif isinstance(value, (list, dict)):
        raise TrainError(f"{what} must be a single value.")
    elif isinstance(value, bool) != bool(getattr(param, "is_flag", False)):
        kind = "a number or a text" if isinstance(value, bool) else "true or false"
        raise TrainError(f"{what} must be {kind}.")


class Command(typer.core.TyperCommand):
    """A command that refuses an option that is given twice, and with a wide help.

    Typer takes the last of several values. In the help it chooses the columns of each panel
    separately, and truncates long names.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        *_, order = self.make_parser(ctx).parse_args(args=[*args])
        for param in order:
            if order.count(param) > 1 and not param.multiple:
                raise TrainError(f"{param.opts[0]} is given {order.count(param)} times. Give one.")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Column, Table
        from rich.text import Text

        panels: dict[str, Table] = {}
        for param in self.get_params(ctx):
            names, text = param.get_help_record(ctx) or ("", "")
            title = getattr(param, "rich_help_panel", None) or "Options"
            if title not in panels:
                panels[title] = Table.grid(Column(width=NAME_WIDTH), Column(), padding=(0, 2, 0, 0))
            # The upper bounds only keep JAX from obscure errors.
            text = re.sub(f"1<=x<=({MAX_SIZE}|{MAX_COUNT})", "x>=1", text)
            panels[title].add_row(Text(names.replace(" range>", ">")), Text(text))
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        console = Console()
        with console.capture() as output:
            for title, table in panels.items():
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        formatter.write(f"\n{output.get()}")
