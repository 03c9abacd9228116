"""Bytes that reverse-mode differentiation keeps between the forward and the backward pass."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..ops._common.arguments import as_callable, as_flag
from . import plots, report
from ._modules import refuse_modules

_OF_ARRAYS = "Give a function of arrays, by nnx.split and nnx.merge."


class ResidualReport(NamedTuple):
    """What `residual_bytes` found.

    Attributes:
        bytes: all arrays kept for the backward pass, each counted once.
        argument_bytes: the part of `bytes` that is the function's own arguments (parameters, say),
            which are alive anyway.
        largest: `(shape, dtype, how many, their bytes together)`, largest first.
    """

    bytes: int
    argument_bytes: int
    largest: tuple[tuple[tuple[int, ...], str, int, int], ...]

    def __str__(self) -> str:
        return report.residuals_text(self)

    def __rich__(self) -> Any:
        return report.residuals_table(self)

    def plot(self, ax: Any = None, *, most: int = 12) -> Any:
        """Draws the largest arrays that are kept as bars (matplotlib); returns the axes."""
        return plots.plot_residuals(self, ax, most)


def residual_bytes(fun: Callable[..., Any], *args: Any, has_aux: bool = False) -> ResidualReport:
    """Counts the bytes that `jax.vjp(fun, *args)` keeps for the backward pass.

    Nothing is computed: `fun` is traced by `jax.eval_shape`, so `args` may be shapes
    (`jax.ShapeDtypeStruct`).

    Everything that the vjp function holds is counted, arguments that it needs again included (a
    convolution keeps its kernel); an array held twice is counted once. `argument_bytes` says how
    much of the total is arguments, so `report.bytes - report.argument_bytes` is what the forward
    pass itself produced and must keep. Arrays that `fun` closes over are counted but are not
    arguments.

    It is a count of JAX's residuals, before compilation: XLA may keep less by fusing or
    recomputing, and needs working memory besides.

    Args:
        fun: a function of arrays (or pytrees of arrays) that `jax.vjp` can differentiate.
        *args: its arguments, arrays or shapes; all of them are differentiated, so close over what
            is not.
        has_aux: `fun` returns `(output, aux)`, and `aux` is not differentiated.

    Returns:
        A `ResidualReport`. Print it.

    Raises:
        TypeError: if `fun` is no function, `has_aux` no boolean, or an argument an nnx module: JAX
            would differentiate a copy of it, its statistics and random streams included.
    """
    as_callable("fun", fun)
    as_flag("has_aux", has_aux)
    refuse_modules(args, _OF_ARRAYS)

    def held(*args: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        # Inside the trace an array is one tracer, so identity tells arguments and repetitions.
        argument_ids = {id(leaf) for leaf in jax.tree.leaves(args)}
        vjp_fn = jax.vjp(fun, *args, has_aux=has_aux)[1]
        leaves = list({id(leaf): leaf for leaf in jax.tree.leaves(vjp_fn)}.values())
        return (
            [leaf for leaf in leaves if id(leaf) in argument_ids],
            [leaf for leaf in leaves if id(leaf) not in argument_ids],
        )

    arguments, others = jax.eval_shape(held, *args)
    counts = Counter((leaf.shape, leaf.dtype.name) for leaf in [*arguments, *others])
    itemsize = {leaf.dtype.name: leaf.dtype.itemsize for leaf in [*arguments, *others]}
    rows = [
        (shape, dtype, count, count * math.prod(shape) * itemsize[dtype])
        for (shape, dtype), count in counts.items()
    ]
    rows.sort(key=lambda row: row[-1], reverse=True)
    return ResidualReport(
        bytes=sum(row[-1] for row in rows),
        argument_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in arguments),
        largest=tuple(rows),
    )
