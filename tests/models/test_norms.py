"""Batch norms of the networks of both flavors."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx

import effjax
from effjax import models
from effjax.models import linen as linen_models

# Options, and the number of norms: those of stem, layers, transition and head, or of stem and
# blocks with their shortcuts.
NETWORKS: dict[str, Any] = {
    "DenseNet": (dict(block_config=(2, 1), growth_rate=2, num_init_features=4), 1 + 3 * 2 + 1 + 1),
    "ResNet": (dict(stage_sizes=(1, 2), width=2), 1 + 4 + 4 + 3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_norm_is_synchronized(name):
    options, count = NETWORKS[name]
    options |= dict(axis_name="data", axis_index_groups=4)
    model = nnx.eval_shape(lambda: getattr(models, name)(**options, rngs=nnx.Rngs(0)))
    nodes = [node for _, node in nnx.iter_modules(model)]
    norms = {"nnx": [node for node in nodes if isinstance(node, nnx.BatchNorm)], "linen": []}

    def record(call, args, kwargs, context):
        if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
            norms["linen"].append(context.module)
        return call(*args, **kwargs)

    network = getattr(linen_models, name)(**options)
    with linen.intercept_methods(record):
        jax.eval_shape(network.init, jax.random.key(0), np.zeros((2, 16, 16, 3), np.float32))
    for flavor, layers in norms.items():
        assert len(layers) == count, flavor
        for norm in layers:
            assert type(norm) in (effjax.nnx.BatchNorm, effjax.linen.BatchNorm)
            assert norm.axis_name == "data" and norm.axis_index_groups == 4
