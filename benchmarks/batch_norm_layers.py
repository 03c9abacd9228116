"""Planned memory of layers with batch norm, where XLA can and cannot recompute their residuals.

Within one program XLA fuses a norm and a ReLU into their readers, so that what autodiff keeps need
not exist. It cannot do so between the loops of both passes, across the boundary of a checkpoint, or
between two programs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effjax.memory import residual_bytes

from .batch_norm import REFERENCE, Norm, effjax_norm, linen_norm
from .measure import TARGET, need_compiler, plan_training
from .results import Result, Size

NORMS: dict[str, Norm] = {
    REFERENCE: linen_norm(use_fast_variance=True),
    "effjax.sync_batch_norm": effjax_norm,
}
Loss = Callable[[Any, jax.Array], jax.Array]  # of the parameters [layers, ...] and x


def make_layer(norm: Norm) -> Callable:
    """Return convolution, norm and ReLU as one function of x and the layer's parameters."""

    def layer(x, params):
        kernel = params["kernel"].astype(x.dtype)
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return norm(x, params["scale"], params["bias"])

    return layer


def unrolled(layer: Callable) -> Loss:
    def loss(stack, x):
        for i in range(len(stack["scale"])):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], stack))
        return x.astype(jnp.float32).sum()

    return loss


def scanned(layer: Callable) -> Loss:
    def loss(stack, x):
        x, _ = lax.scan(lambda x, params: (layer(x, params), None), x, stack)
        return x.astype(jnp.float32).sum()

    return loss


FORMS: dict[str, Callable[[Callable], Loss]] = {
    "one after the other": unrolled,
    "in lax.scan": scanned,
    "in jax.checkpoint": lambda layer: unrolled(jax.checkpoint(layer)),
    "in jax.checkpoint, all saved": lambda layer: unrolled(
        jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)
    ),
}


def plan_layers(
    layers: int,
    shape: tuple[int, ...],
    dtype: str,
    target: str,
    forms: Sequence[str] = tuple(FORMS),
) -> Result:
    """Plan gradients of some forms; "x input" is the peak in multiples of the input's bytes."""
    features = shape[-1]
    shapes = {"kernel": (3, 3, features, features), "scale": (features,), "bias": (features,)}
    stack = {k: jax.ShapeDtypeStruct((layers, *s), "float32") for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct(shape, dtype)
    losses = {
        f"{name}, {form}": FORMS[form](make_layer(norm))
        for form in forms
        for name, norm in NORMS.items()
    }
    result = plan_training(
        f"batch_norm_layers_{dtype}",
        f"{layers} layers of convolution, batch norm and ReLU, {shape}, {dtype}",
        {"layers": layers, "shape": shape, "dtype": dtype},
        {name: (jax.grad(loss), stack, x) for name, loss in losses.items()},
        target,
    )
    input_bytes = x.size * x.dtype.itemsize
    for row in result.rows:
        row["peak"] = round(row["peak_bytes"] / input_bytes, 1)
        row["kept"] = round(residual_bytes(losses[row["name"]], stack, x).bytes / input_bytes, 1)
    return result


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        yield plan_layers(8, (64, 56, 56, 64), "float32", TARGET)
    else:
        yield plan_layers(2, (8, 8, 8, 16), "float32", TARGET)
