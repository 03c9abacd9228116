"""A bar on stderr for what takes seconds to minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None, show: bool) -> Iterator[Callable[..., None]]:
    """Gives a function that advances the bar by one step, and may change its text: `what=`.

    Args:
      what: the text in front of the bar.
      total: the number of steps, or None if that is not known.
      show: False draws nothing, and needs no rich.
    """
    if not show:
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance(what: str | None = None, steps: int = 1) -> None:
            bar.update(task, advance=steps, description=what)

        yield advance
