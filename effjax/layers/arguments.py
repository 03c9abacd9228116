"""What the modules check of their arguments, besides what the operators check."""

from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.arguments import as_array, describe
from ..ops.batch_norm.statistics import statistics_dtype


def as_input(name: str, x: Any) -> jax.Array:
    """An array of numbers; integers are promoted by the module, as Flax's do."""
    return as_array(name, x, jnp.number)


def as_real_input(name: str, x: Any) -> jax.Array:
    """The same without complex numbers, whose imaginary part would be lost."""
    x = as_input(name, x)
    if jnp.iscomplexobj(x):
        raise TypeError(f"`{name}` must be real, but its dtype is {x.dtype}; pass its real part.")
    return x


def check_rngs(rngs: Any) -> None:
    """An nnx.Rngs that has keys for parameters."""
    if not callable(getattr(rngs, "params", None)):
        wanted = "a flax.nnx.Rngs with a stream `params`, as nnx.Rngs(0) is"
        raise TypeError(f"`rngs` must be {wanted}, not {describe(rngs)}.")


def at_least_float32(a: jax.Array) -> jax.Array:
    """Half precision as float32."""
    return a.astype(statistics_dtype(a))
