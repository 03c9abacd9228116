"""A network of either flavor as a function of {name: array}, with nnx's names for both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from effjax.convert.tables import nnx_path


class Nnx:
    def __init__(self, cls, **options):
        make = functools.partial(cls, **options, param_dtype=jnp.float64)
        self.model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        self.graphdef, params, stats = nnx.split(self.model, nnx.Param, nnx.BatchStat)
        self.paths = [dict(nnx.to_flat_state(state)) for state in (params, stats)]

    def names(self, x):
        return [{_dotted(p): v for p, v in paths.items()} for paths in self.paths]

    def __call__(self, params, stats, x, train=True, method="__call__", **given):
        states = [
            nnx.from_flat_state({p: v.replace(values[_dotted(p)]) for p, v in paths.items()})
            for paths, values in zip(self.paths, (params, stats), strict=True)
        ]
        model = nnx.merge(self.graphdef, *states)
        model.train() if train else model.eval()
        y = getattr(model, method)(x, **given)
        new = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
        return y, {_dotted(p): v[...] for p, v in new}


class Linen:
    def __init__(self, cls, **options):
        self.model = cls(**options, param_dtype=jnp.float64)
        self.linen_names = {}

    def names(self, x):
        variables = jax.eval_shape(self.model.init, jax.random.key(0), x)
        found = []
        for kind in ("params", "batch_stats"):
            flat = traverse_util.flatten_dict(variables.get(kind, {}), sep=".")
            self.linen_names |= {(kind, nnx_path(name)): name for name in flat}
            found.append({nnx_path(name): v for name, v in flat.items()})
        return found

    def __call__(self, params, stats, x, train=True, method="__call__", **given):
        unflatten = functools.partial(traverse_util.unflatten_dict, sep=".")
        variables = {
            kind: unflatten({self.linen_names[kind, n]: v for n, v in values.items()})
            for kind, values in (("params", params), ("batch_stats", stats))
        }
        options = dict(mutable=["batch_stats"], method=method, **given)
        trains = {} if method == "__call__" and not stats else {"train": train}
        y, new = self.model.apply(variables, x, **trains, **options)
        flat = traverse_util.flatten_dict(new.get("batch_stats", {}), sep=".")
        return y, {nnx_path(name): v for name, v in flat.items()}


def _dotted(path):
    return ".".join(map(str, path))


def draw(variables):
    """Values for {name: array}, positive ones for scales and variances; no compilation."""
    rng = np.random.default_rng(0)
    positive = {"scale", "var"}
    return {
        name: rng.normal(0, 0.3, v.shape) ** 2 + 1
        if name.split(".")[-1] in positive
        else rng.normal(0, 0.3, v.shape)
        for name, v in sorted(variables.items())
    }


def train_step(form, values, x, weigh, **given):
    """Outputs, running statistics and all gradients; `weigh` makes a loss of the outputs."""

    def loss(params, x):
        y, stats = form(params, values[1], x, **given)
        return weigh(y), (y, stats)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y, stats)), (dparams, dx) = run(values[0], x)
    return dict(y=y, stats=stats, dparams=dparams, dx=dx)
