"""Forward and backward pass, each device with its own images."""

import functools
from collections.abc import Callable

import jax

from .._common.partitioning import partition_over_images
from . import chunks
from .chunks import Static

# Axes of examples (d) and images (n) by operand; the others are worked through whole.
_X, _OFFSET, _MASK, _OUT = "d n h w c", "d n p q s", "d n p q m", "d n p q o"
_KERNEL = 3  # its position


def forward(static: Static, x, offset, mask, kernel) -> jax.Array:
    """As in `chunks`: arrays [D, N, ...] and kernels [1 or D, ...]."""
    return _forward_of(static)(x, offset, mask, kernel)[0]


def backward(static: Static, x, offset, mask, kernel, dy) -> tuple:
    return _backward_of(static)(x, offset, mask, kernel, dy)


@functools.cache
def _forward_of(static: Static) -> Callable:
    def run(*args):
        return (chunks.forward(static, *args),)

    def rule(*args):
        return f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(*args)} -> {_OUT}"

    return partition_over_images(run, rule, "deform_conv2d", {_KERNEL})


@functools.cache
def _backward_of(static: Static) -> Callable:
    def rule(*args):
        inputs = f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(*args)}, {_OUT}"
        return f"{inputs} -> {_X}, {_OFFSET}, {_MASK}, d i j f o"

    return partition_over_images(
        functools.partial(chunks.backward, static), rule, "deform_conv2d", {_KERNEL}
    )


def _kernel_rule(*args) -> str:
    x, kernel = args[0], args[_KERNEL]
    return "d i j f o" if kernel.shape[0] == x.shape[0] else "e i j f o"
