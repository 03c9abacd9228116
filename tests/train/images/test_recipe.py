from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetConfig, ResNetConfig
from effjax.train.images.recipe import make_optimizer, make_schedule, model_builder


def test_schedules():
    cosine: Any = make_schedule(DenseNetConfig(epochs=10), 10)
    rates = [float(cosine(s)) for s in (0, 50, 100)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0], atol=1e-7)
    step: Any = make_schedule(DenseNetConfig(epochs=10, schedule="step"), 10)
    rates = [float(step(s)) for s in (0, 49, 51, 76)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001], rtol=1e-5)


def test_weight_decay_is_of_kernels_only():
    config = DenseNetConfig(learning_rate=1.0, momentum=0.0, weight_decay=0.5)
    optimizer = make_optimizer(config, lambda _: 1.0)
    params = {"kernel": np.ones((2, 2), np.float32), "scale": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates: Any
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], -0.5)
    np.testing.assert_array_equal(updates["scale"], 0)


def stem(size, **options):
    """Return the shape of the first kernel for images of a size."""
    build: Any = model_builder(DenseNetConfig(**options), (size, size, 1), 5)
    model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    return model.stem_conv.kernel.shape


def test_small_inputs_by_image_size():
    assert stem(8, depth=10) == (3, 3, 1, 24)
    assert stem(96, depth=10) == (7, 7, 1, 24)
    assert stem(96, depth=10, small_inputs=True) == (3, 3, 1, 24)


def test_resnet_options():
    config = ResNetConfig(
        depth=50, dcn="v1", efficient=False, save="features", parallel="pmap", data="folder:x"
    )
    build: Any = model_builder(config, (224, 224, 3), 5)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    assert model.stage_with_dcn == (False, True, True, True) and not model.modulated
    assert not model.efficient and model.save == "features" and not model.small_inputs
    assert model.axis_name == "data" and model.num_classes == 5


def test_rejects_unknown_network():
    with pytest.raises(TrainError, match=r"depth \(=50\) is for --model densenet-bc"):
        model_builder(DenseNetConfig(model="densenet121", depth=50), (32, 32, 3), 5)
    with pytest.raises(TrainError, match=r"model \(='vgg'\) must be one of densenet-bc"):
        model_builder(DenseNetConfig(model="vgg"), (32, 32, 3), 5)


@pytest.mark.exhaustive
def test_small_inputs_of_whole_networks():
    assert stem(8) == (3, 3, 1, 24)
    assert stem(96) == (7, 7, 1, 24)
    assert stem(96, small_inputs=True) == (3, 3, 1, 24)
    assert stem(32, model="densenet100_12") == (3, 3, 1, 24)
    assert stem(224, model="densenet121") == (7, 7, 1, 64)
