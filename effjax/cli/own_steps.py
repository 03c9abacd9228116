"""Steps of the user's own, from `MODULE:FUNCTION`, and where in them an error is."""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..train.errors import TrainError

if TYPE_CHECKING:
    from .plans import Steps

_LONGEST = 1000  # characters of an error: less than a screen
_STDLIB = sysconfig.get_path("stdlib")


def own_steps(name: str) -> "Steps":
    """Steps from `module:function`, a function of the batch size that returns `(fun, *args)`, or
    several such by name."""
    factory, function_name = _factory(name)

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        made = factory(batch_size)
        found: dict[str, Any] = dict(made) if isinstance(made, Mapping) else {function_name: made}
        if not found:
            raise TrainError(f"{name!r} returned no steps")
        for step in found.values():
            if not (isinstance(step, Sequence) and step and callable(step[0])):
                raise TrainError(
                    f"{name!r} must return (fun, *args) or a dict of such by name, not "
                    f"{type(step).__name__}"
                )
        return {str(key): tuple(step) for key, step in found.items()}

    return steps


def _factory(name: str) -> tuple[Callable[[int], Any], str]:
    """The function, and its name."""
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        plain = os.path.splitext(os.path.basename(module_name))[0] or "my_module"
        raise TrainError(
            f"{name!r} must be MODULE:FUNCTION, such as {plain}:{function_name or 'my_step'}, "
            f"where import {plain} works"
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise
        raise TrainError(f"{name!r}: there is no module {error.name}") from error
    finally:
        del sys.path[0]
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise TrainError(f"{name!r}: {module_name} has no function {function_name!r}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of a builtin
        return factory, function_name
    try:
        signature.bind(1)
    except TypeError as error:
        raise TrainError(
            f"{name!r} must be a function of the batch size that returns (fun, *args); it is one "
            f"of {signature}"
        ) from error
    return factory, function_name


def said(error: BaseException) -> str:
    """An error in a line, with the innermost line of the user's that led to it."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return shortened(f"{error.filename}:{error.lineno}: {message}")
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if _is_users(frame.filename)]
    if not user:
        return shortened(str(error) or message)
    last = user[-1]
    return shortened(f"{os.path.relpath(last.filename)}:{last.lineno}, {last.line}: {message}")


def _is_users(file: str) -> bool:
    from ..memory._source import is_in_library  # not before a command runs: it imports JAX

    return not (is_in_library(file) or file.startswith((_STDLIB, "<")))


def shortened(message: str) -> str:
    """The beginning and the end of what is too long for a screen."""
    message = " ".join(message.split())
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST * 3 // 4]} … {message[-_LONGEST // 4 :]}"
