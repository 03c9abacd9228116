"""Bytes that reverse-mode differentiation keeps for the backward pass, without a compiler."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from .compiler.lower import refuse_modules
from .results import ResidualReport


def residual_bytes(fun: Callable[..., Any], *args: Any, has_aux: bool = False) -> ResidualReport:
    """Count the bytes that `jax.vjp(fun, *args)` keeps for the backward pass.

    Nothing is computed: `fun` is traced by `jax.eval_shape`, so `args` may be shapes
    (`jax.ShapeDtypeStruct`).

    Every array held by the vjp function is counted once, including arguments that the backward
    pass needs (a convolution keeps its kernel). `report.bytes - report.argument_bytes` is the size
    of the arrays that the forward pass computes and keeps. Arrays that `fun` closes over are
    counted, but not as arguments.

    These are JAX's residuals before compilation: XLA may keep less by fusion or recomputation, and
    needs working memory in addition.

    Args:
        fun: a function of pytrees of arrays that `jax.vjp` can differentiate.
        *args: its arguments, arrays or shapes. All of them are differentiated; close over other
            values.
        has_aux: whether `fun` returns `(output, aux)`, where `aux` is not differentiated.

    Returns:
        A `ResidualReport`. It can be printed.

    Raises:
        TypeError: for an nnx module among the arguments. JAX would differentiate a copy of it,
            including its statistics and random streams.
    """
    refuse_modules(args, "Give a function of arrays (nnx.split and nnx.merge).")

    def residuals(*args: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        # Within a trace an array is one tracer, so its id identifies arguments and repetitions.
        argument_ids = {id(leaf) for leaf in jax.tree.leaves(args)}
        vjp_fn = jax.vjp(fun, *args, has_aux=has_aux)[1]
        leaves = list({id(leaf): leaf for leaf in jax.tree.leaves(vjp_fn)}.values())
        return (
            [leaf for leaf in leaves if id(leaf) in argument_ids],
            [leaf for leaf in leaves if id(leaf) not in argument_ids],
        )

    arguments, others = jax.eval_shape(residuals, *args)
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
        arrays=tuple(rows),
    )
