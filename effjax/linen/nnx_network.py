"""Flax linen module that runs an nnx network."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict


class NnxNetwork(nn.Module):
    """Linen module that owns the variables of an nnx network.

    Its fields are the options of the network. Variables have the paths of the network, with
    `blocks_0` for `blocks[0]`. Initialization evaluates the network, which updates no statistics
    and needs no mapped axis.
    """

    @nn.nowrap
    def call_network(
        self, network: Any, in_channels: Any, train: bool, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of a method of the network; update the statistics in training."""
        names = {field.name for field in dataclasses.fields(self)} - {"parent", "name"}
        options = {name: getattr(self, name) for name in names} | {"in_channels": in_channels}
        if self.is_initializing() and "params" not in self.variables:
            model = network(**options, rngs=nnx.Rngs(self.make_rng("params")))
            self._store(_by_path(nnx.state(model)))
        else:
            graphdef, shapes = _abstract_network(network, frozenset(options.items()))
            given = {kind: self.variables.get(kind, {}) for kind in ("params", "batch_stats")}
            arrays = flatten_dict(nn.meta.unbox(given))
            _check_arrays(arrays, _by_path(shapes))
            state = nnx.map_state(lambda path, v: v.replace(arrays[_path(path, v)]), shapes)
            model = nnx.merge(graphdef, state)
        (model.train if train and not self.is_initializing() else model.eval)()
        before = _by_path(nnx.state(model, nnx.BatchStat))
        y = getattr(model, method)(*args, **kwargs)
        after = _by_path(nnx.state(model, nnx.BatchStat))
        # Norms that use their running statistics keep the arrays, and need no `mutable`.
        if any(after[path] is not before[path] for path in after):
            self._store(after)
        return y

    @nn.nowrap
    def _store(self, arrays: dict[tuple[str, ...], jax.Array]) -> None:
        for kind, collection in unflatten_dict(arrays).items():
            for name, tree in collection.items():
                self.put_variable(kind, name, tree)


@functools.lru_cache(maxsize=64)
def _abstract_network(network: Any, options: frozenset[tuple[str, Any]]) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: network(**dict(options), rngs=nnx.Rngs(0))))


def _by_path(state: nnx.State) -> dict[tuple[str, ...], Any]:
    """Return values by linen's paths: ("params", "blocks_0", "layers_1", "norm1", "scale")."""
    return {_path(path, v): v.get_value() for path, v in nnx.to_flat_state(state)}


def _path(path: tuple[Any, ...], variable: nnx.Variable) -> tuple[str, ...]:
    kind = "params" if isinstance(variable, nnx.Param) else "batch_stats"
    return kind, *re.sub(r"/(?=\d)", "_", "/".join(map(str, path))).split("/")


def _check_arrays(given: dict[tuple[str, ...], Any], expected: dict[tuple[str, ...], Any]) -> None:
    """Raise an error unless there are exactly the expected variables with their shapes."""
    shapes, wanted = ({"/".join(p): np.shape(a) for p, a in d.items()} for d in (given, expected))
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"The variable {name} has shape {shapes.get(name)}, but the network needs "
                f"{wanted.get(name)}. None means that there is no such variable. Images are "
                "[N, H, W, C], features last."
            )
