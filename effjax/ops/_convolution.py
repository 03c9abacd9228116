"""The arguments that every convolution has, in one form."""

import operator
from collections.abc import Sequence
from typing import Any


def pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """Two integers for the spatial axes, from two or from one that stands for both."""
    try:
        both = tuple(map(operator.index, value if isinstance(value, Sequence) else (value, value)))
    except TypeError:
        both = ()
    if len(both) != 2 or min(both) < least or max(both) >= 2**31:
        raise ValueError(f"`{name}` (={value!r}) must be one or two integers of at least {least}.")
    return both


def padding_of(padding: Any) -> Any:
    """A name in capitals, or ((top, bottom), (left, right))."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(f'`padding` (={padding!r}) must be "SAME", "VALID" or numbers.')
        return padding.upper()
    if not isinstance(padding, Sequence):
        padding = (padding, padding)
    return tuple(pair("padding", side, 0) for side in padding)
