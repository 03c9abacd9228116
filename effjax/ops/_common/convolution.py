"""The arguments that every convolution has, in one form."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .arguments import as_integer


def as_pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """Two integers for the spatial axes, from two or from one that stands for both."""
    try:
        many = isinstance(value, Sequence) or isinstance(value, np.ndarray) and value.ndim == 1
        sides = value if many else (value, value)
        both = tuple(as_integer(name, side, least) for side in sides)
    except (TypeError, ValueError):
        both = ()
    if len(both) != 2:
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be one or two integers of at least {least}."
        )
    if max(both) >= 2**31:
        raise ValueError(f"`{name}` (={value!r:.80}) must be below 2**31.")
    return both


def as_padding(padding: Any) -> Any:
    """A name in capitals, or ((top, bottom), (left, right))."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(f'`padding` (={padding!r:.80}) must be "SAME", "VALID" or numbers.')
        return padding.upper()
    if not isinstance(padding, Sequence):
        padding = (padding, padding)
    if len(padding) != 2:
        raise ValueError(f"`padding` (={padding!r:.80}) must be given for the two spatial axes.")
    return tuple(as_pair("padding", side, 0) for side in padding)


def resolve_padding(padding: Any, size: Any, kernel_size: Any, strides: Any, dilation: Any) -> Any:
    """What `padding_of` returns as ((top, bottom), (left, right)), for images of this size."""
    if not isinstance(padding, str):
        return padding
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    return tuple(map(tuple, lax.padtype_to_pads(size, reach, strides, padding)))
