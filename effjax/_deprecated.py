"""Names that have changed, and still work for a while."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(module: str, **names: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for `module`: each name is found in the module that it moved to.

    Raises:
        AttributeError: for any other name, as a module does.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} has moved to {names[name]}.{name}, and goes in effjax 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(names[name]), name)

    return get


def renamed(function: str, old: str, new: str) -> None:
    """Warns the caller of `function` that an argument has another name."""
    warnings.warn(
        f"`{old}` of {function} is now `{new}`, and goes in effjax 0.3.",
        DeprecationWarning,
        stacklevel=3,
    )
