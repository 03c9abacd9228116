from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from effjax.train.errors import TrainError
from effjax.train.images.config import Config
from effjax.train.images.recipe import make_optimizer, make_schedule, model_builder


def test_schedules():
    cosine: Any = make_schedule(Config(epochs=10), 10)
    rates = [float(cosine(s)) for s in (0, 50, 100)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0], atol=1e-7)
    step: Any = make_schedule(Config(epochs=10, schedule="step"), 10)
    rates = [float(step(s)) for s in (0, 49, 51, 76)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001], rtol=1e-5)


def test_weight_decay_is_of_kernels_only():
    config = Config(learning_rate=1.0, momentum=0.0, weight_decay=0.5)
    optimizer = make_optimizer(config, lambda _: 1.0)
    params = {"kernel": np.ones((2, 2), np.float32), "scale": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates: Any
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], -0.5)
    np.testing.assert_array_equal(updates["scale"], 0)


def stem(size, **options):
    """The shape of the first kernel, for images of that size."""
    build: Any = model_builder(Config(**options), (size, size, 1), 5)
    model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    return model.stem_conv.kernel.shape


def test_small_inputs_by_image_size():
    assert stem(8, depth=10) == (3, 3, 1, 24)
    assert stem(96, depth=10) == (7, 7, 1, 24)
    assert stem(96, depth=10, small_inputs=True) == (3, 3, 1, 24)


def test_a_resnet():
    config = Config(model="resnet50", dcn="v1", efficient=False, save="features", parallel="pmap")
    build: Any = model_builder(config, (224, 224, 3), 5)
    options = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))).options
    assert options.stage_with_dcn == (False, True, True, True) and not options.modulated
    assert not options.efficient and options.save == "features" and not options.small_inputs
    assert options.axis_name == "data" and options.num_classes == 5
    with pytest.raises(TrainError, match=r"depth \(=50\) is for --model densenet-bc"):
        model_builder(Config(model="resnet50", depth=50), (32, 32, 3), 5)
    for options in ({"growth_rate": 3}, {"drop_rate": 0.5}, {"bn_size": 2}, {"compression": 0.3}):
        with pytest.raises(TrainError, match=f"{next(iter(options))} .* is of DenseNets"):
            model_builder(Config(model="resnet50", **options), (32, 32, 3), 5)
    with pytest.raises(TrainError, match=r"dcn \(='v1'\) is of ResNets; densenet121 has none"):
        model_builder(Config(model="densenet121", dcn="v1"), (32, 32, 3), 5)


@pytest.mark.exhaustive
def test_small_inputs_of_whole_networks():
    assert stem(8) == (3, 3, 1, 24)
    assert stem(96) == (7, 7, 1, 24)
    assert stem(96, small_inputs=True) == (3, 3, 1, 24)
    assert stem(32, model="densenet100_12") == (3, 3, 1, 24)
    assert stem(224, model="densenet121") == (7, 7, 1, 64)
