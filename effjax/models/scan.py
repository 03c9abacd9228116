"""A loop over identical layers with stacked parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]
Layer = Callable[[Params, Any, jax.Array | None], Any]
ApplyLayers = Callable[[Layer, Params, Any, jax.Array | None], Any]


def scan_layers(
    layer: Layer, params: Params, x: Any, key: jax.Array | None, *, remat: bool = False
) -> Any:
    """Apply a stack of identical layers in one loop: ``x = layer(params[i], x, key_i)``.

    The key of layer i is ``fold_in(fold_in(key, i), 0)``, as in `effjax.offload_scan`, where the
    second number is the microbatch.

    Args:
        layer: ``layer(params, x, key) -> x`` of one layer.
        params: a pytree of arrays `[L, ...]`.
        x: input of the first layer, a pytree of arrays.
        key: a PRNG key, or None to pass None to the layers.
        remat: keep only the input of each layer for the backward pass and recompute the rest.

    Returns:
        The output of the last layer.
    """
    num_layers = len(jax.tree.leaves(params)[0])
    # prevent_cse=False: the loop already keeps XLA from undoing the recomputation.
    apply_layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def body(x: Any, layer_input: tuple) -> tuple[Any, None]:
        layer_params, i = layer_input
        k = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), 0)
        return apply_layer(layer_params, x, k), None

    x = jax.tree.map(jnp.asarray, x)
    return lax.scan(body, x, (params, jnp.arange(num_layers)))[0]
