"""Networks of either flavor as functions of {name: array}, with nnx's names for both."""

import functools
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from effjax import models
from effjax.convert.tables import nnx_path
from effjax.models import linen as linen_models


class Nnx:
    def __init__(self, network, **options):
        make = functools.partial(network, **options, param_dtype=jnp.float64)
        self.model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        self.graphdef, params, stats = nnx.split(self.model, nnx.Param, nnx.BatchStat)
        self.paths = [dict(nnx.to_flat_state(state)) for state in (params, stats)]

    def names(self, x):
        return [{_dotted(p): v for p, v in paths.items()} for paths in self.paths]

    def __call__(self, params, stats, x, train=True, method="__call__", key=None, **options):
        states = [
            nnx.from_flat_state({p: v.replace(values[_dotted(p)]) for p, v in paths.items()})
            for paths, values in zip(self.paths, (params, stats), strict=True)
        ]
        model = nnx.merge(self.graphdef, *states)
        model.train() if train else model.eval()
        if key is not None:
            options["rngs"] = key
        y = getattr(model, method)(x, **options)
        new_stats = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
        return y, {_dotted(p): v[...] for p, v in new_stats}


class Linen:
    mode = staticmethod(lambda train: {"train": train})  # options of a call
    init_options = MappingProxyType({})

    def __init__(self, network, **options):
        self.model = network(**options, param_dtype=jnp.float64)
        self.linen_names = {}

    def names(self, x):
        init = functools.partial(self.model.init, **self.init_options)
        variables = jax.eval_shape(init, jax.random.key(0), x)
        names = []
        for kind in ("params", "batch_stats"):
            flat = traverse_util.flatten_dict(variables.get(kind, {}), sep=".")
            self.linen_names |= {(kind, nnx_path(name)): name for name in flat}
            names.append({nnx_path(name): v for name, v in flat.items()})
        return names

    def __call__(self, params, stats, x, train=True, method="__call__", key=None, **options):
        unflatten = functools.partial(traverse_util.unflatten_dict, sep=".")
        variables = {
            kind: unflatten({self.linen_names[kind, n]: v for n, v in values.items()})
            for kind, values in (("params", params), ("batch_stats", stats))
        }
        if stats:  # a pyramid has no norms and no `train`
            options |= self.mode(train)
        rngs = {} if key is None else {"dropout": key}
        y, new = self.model.apply(
            variables, x, mutable=["batch_stats"], method=method, rngs=rngs, **options
        )
        flat = traverse_util.flatten_dict(new.get("batch_stats", {}), sep=".")
        return y, {nnx_path(name): v for name, v in flat.items()}


FLAVORS = {"nnx": (Nnx, models), "linen": (Linen, linen_models)}


def make_form(flavor, network, **options):
    """Return a network of `effjax.models`, by name, as a function."""
    form, module = FLAVORS[flavor]
    return form(getattr(module, network), **options)


def _dotted(path):
    return ".".join(map(str, path))


def draw(variables):
    """Draw values for {name: array}, positive for scales and variances, without compilation."""
    rng = np.random.default_rng(0)
    positive = {"scale", "var"}
    return {
        name: rng.normal(0, 0.3, v.shape) ** 2 + 1
        if name.split(".")[-1] in positive
        else rng.normal(0, 0.3, v.shape)
        for name, v in sorted(variables.items())
    }


def assert_same_shapes(names, values):
    """Assert that the parameters and statistics of two networks are interchangeable."""
    for ours, theirs in zip(names, values, strict=True):
        assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}


def train_step(form, values, x, **options):
    """Return outputs, running statistics and all gradients of a sum of weighted outputs."""

    def loss(params, x):
        y, stats = form(params, values[1], x, **options)
        rng = np.random.default_rng(2)
        return sum((a * rng.normal(size=a.shape)).sum() for a in jax.tree.leaves(y)), (y, stats)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y, stats)), (dparams, dx) = run(values[0], x)
    return dict(y=y, stats=stats, dparams=dparams, dx=dx)
