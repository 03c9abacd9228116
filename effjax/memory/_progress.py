"""What is compiled, said on stderr while it takes seconds to minutes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None, show: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is done now: a line each, over a bar on a terminal.

    Args:
        what: what goes on.
        total: the number of steps, or None if that is not known.
        show: False says nothing.
    """
    if not show:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(what, total) as advance:
            yield advance
    else:
        said = f"{what}, {total} in all" if total else what
        print(f"{said} …", file=sys.stderr, flush=True)
        yield lambda done: print(done, file=sys.stderr, flush=True)


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: str) -> None:
            bar.console.print(Text(done))
            bar.advance(task)

        yield advance
