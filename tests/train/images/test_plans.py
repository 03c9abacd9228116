import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax.models import DenseNet
from effjax.train.images.config import DenseNetRunConfig, ResNetRunConfig
from effjax.train.images.plans import (
    backward_bytes,
    forms,
    memory_choices,
    training_step,
    with_flax_layers,
)
from effjax.train.images.steps import model_builder
from tests.tiers import vary

TINY = DenseNetRunConfig(depth=10, growth_rate=4, batch_size=6)


@vary("checkpoint", [True, False])
def test_the_forms_are_one_network(checkpoint):
    """Loss and gradients of Flax's layers, checkpointed or not, are those of effjax's."""
    options = dict(growth_rate=4, block_config=(2, 1), num_init_features=8, small_inputs=True)
    model = lambda **form: DenseNet(**options, num_classes=5, **form, rngs=nnx.Rngs(0))  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))

    def loss_and_norms(make):
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x))))(make())
        return loss, [jnp.linalg.norm(g) for g in jax.tree.leaves(grads)]

    def with_flax():
        return with_flax_layers(model(efficient=False), checkpoint)

    want, norms = jax.jit(lambda: loss_and_norms(lambda: model(efficient=True)))()
    got, found = jax.jit(lambda: loss_and_norms(with_flax))()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(sorted(found), sorted(norms), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "count"), [(TINY, 4), (ResNetRunConfig(depth=8, dcn="v2", batch_size=6), 3)]
)
def test_a_step_of_each_form(config, count):
    names = list(forms(config, ()))
    assert len(names) == count
    for name in names:
        step, state, batch, key = training_step(config, 2, (8, 8, 3), num_classes=5, form=name)
        assert batch.images.shape == (6, 8, 8, 3) and batch.images.dtype == np.uint8
        new_state, metrics = jax.eval_shape(step, state, batch, key)
        assert jax.tree.structure(new_state) == jax.tree.structure(state)
        assert metrics.loss.shape == ()


@vary(
    "config, shape",
    [
        (TINY, (6, 32, 32, 3)),
        (DenseNetRunConfig(model="densenet121", batch_size=1), (1, 224, 224, 3)),
        (DenseNetRunConfig(model="densenet121", batch_size=1, image_size=96), (1, 96, 96, 3)),
        (ResNetRunConfig(depth=8, batch_size=1), (1, 32, 32, 3)),
    ],
)
def test_default_images(config, shape):
    _, _, batch, _ = training_step(config)
    assert batch.images.shape == shape


def test_a_step_in_another_parallel_form():
    """A plan is that of `jit`, and `--on-nan skip` is part of it."""
    config = DenseNetRunConfig(depth=10, batch_size=6, parallel="shard_map", on_nan="skip")
    step, state, batch, key = training_step(config, 2)
    assert "is_finite" in str(step.trace(state, batch, key).jaxpr)


def test_memory_choices():
    choices = memory_choices(TINY, image_shape=(8, 8, 1), num_classes=5)
    values = itertools.product(*choices.options.values())
    configs = [choices.change(efficient=e, save=s) for e, s in values]
    chosen = [config for config in configs if config is not None]
    assert [(config.efficient, config.save) for config in chosen] == [
        (False, "conv"), (True, "conv"), (True, "features"),
    ]  # fmt: skip
    states = []
    for config in chosen[:2]:
        step, state, batch, key = choices.training_step(config)
        assert batch.images.shape == (6, 8, 8, 1)
        assert jax.eval_shape(step, state, batch, key)[1].loss.shape == ()
        states.append(state)
    assert jax.tree.structure(states[0].params) == jax.tree.structure(states[1].params)


@vary("dtype", ["bfloat16", "float32"])
def test_efficient_keeps_less_and_parameters_stay_float32(dtype):
    config = DenseNetRunConfig(dtype=dtype, depth=40)
    build = model_builder(config, (16, 16, 1), 5)
    plain, efficient = (
        backward_bytes(config, build, (16, 16, 16, 1), efficient=e) for e in (False, True)
    )
    assert efficient.argument_bytes > 0
    assert efficient.bytes < 0.4 * plain.bytes
    params = nnx.state(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))), nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
