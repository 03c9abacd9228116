"""Training steps from `MODULE:FUNCTION`, and errors in the user's code as one line."""

import contextlib
import functools
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..train.errors import TrainError, printable
from .errors import CommandError

_STDLIB = sysconfig.get_path("stdlib")


# Maps each name to a function from a batch size to a step, ``(fun, *args)``.
Steps = Mapping[str, Callable[[int], tuple[Any, ...]]]


def load_steps(name: str, batch_size: int) -> Steps:
    """Import `module:function` and return the steps that it returns.

    The user's function returns `(fun, *args)`, or a dictionary of such tuples. It is called with
    the batch size, to learn their names.
    """
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as in `python -m`
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise
        raise TrainError(
            f"{name!r:.120}: there is no module {error.name}. Give a name that `import` accepts "
            "in this folder, such as my_module:my_step."
        ) from error
    finally:
        del sys.path[0]
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise TrainError(f"{name!r:.120}: {module_name} has no function {function_name!r}.")

    @functools.lru_cache(maxsize=2)  # splitting a step compares two batch sizes
    def make_steps(size: int) -> dict[str, tuple[Any, ...]]:
        result: Any = factory(size)
        by_name = dict(result) if isinstance(result, Mapping) else {function_name: result}
        for step in by_name.values():
            if not (isinstance(step, Sequence) and step and callable(step[0])):
                raise TrainError(
                    f"{name!r:.120} must return (fun, *args) or a dictionary of such tuples, not "
                    f"{type(step).__name__}."
                )
        return {printable(str(key)): tuple(step) for key, step in by_name.items()}

    return {key: lambda size, key=key: make_steps(size)[key] for key in make_steps(batch_size)}


@contextlib.contextmanager
def errors_in_one_line(prefix: str = "", in_users_code: bool = False) -> Iterator[None]:
    """Turn the errors of the planner, and of a user's code, into errors of the command."""
    from ..memory import PlanError

    try:
        yield
    except (TrainError, CommandError):
        raise
    except PlanError as error:
        raise CommandError(f"{prefix}{error}") from error
    except (Exception, SystemExit) as error:  # a module may call sys.exit when it is imported
        if in_users_code:
            raise CommandError(describe_error(error)) from error
        if isinstance(error, (ValueError, TypeError)):
            raise TrainError(f"{prefix}{error}") from error
        raise


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the innermost line of the user's code."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if _is_user_file(frame.filename)]
    if not user:
        return str(error) or message
    last = user[-1]
    return f"{os.path.relpath(last.filename)}:{last.lineno}, {last.line}: {message}"


def _is_user_file(file: str) -> bool:
    from ..memory.read.source import is_in_library  # imports JAX

    return not (is_in_library(file) or file.startswith((_STDLIB, "<")))
