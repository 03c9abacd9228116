"""Layers of either flavor as functions of their parameters."""

import functools
import operator
import types

import jax
from flax import nnx


def from_nnx(layer):
    """Return ``params`` and ``apply(params, *args)`` of an nnx layer."""
    graph, state = nnx.split(layer, nnx.Param)

    def apply(params, *args):
        flat = {
            path: variable.replace(functools.reduce(operator.getitem, path, params))
            for path, variable in nnx.to_flat_state(state)
        }
        return nnx.merge(graph, nnx.from_flat_state(flat))(*args)

    return types.SimpleNamespace(params=nnx.to_pure_dict(state), apply=apply)


def from_linen(layer, *args):
    """Return ``params`` and ``apply(params, *args)`` of a linen layer, initialized with `args`."""
    params = jax.jit(layer.init)(jax.random.key(0), *args).get("params", {})
    return types.SimpleNamespace(
        params=params, apply=lambda params, *args: layer.apply({"params": params}, *args)
    )
