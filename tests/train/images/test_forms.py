import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.models import DenseNet
from effjax.train.images.config import Config
from effjax.train.images.forms import (
    DENSENET_FORMS,
    backward_bytes,
    training_steps,
    with_flax_layers,
)
from effjax.train.images.recipe import model_builder
from effjax.train.images.steps import initial_state

TINY = Config(depth=10, growth_rate=4)


def test_the_forms_are_one_network():
    """Loss and gradients of Flax's layers, checkpointed or not, are those of effjax's."""
    options = dict(growth_rate=4, block_config=(2, 1), num_init_features=8, small_inputs=True)
    model = lambda **form: DenseNet(**options, num_classes=5, **form, rngs=nnx.Rngs(0))  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))

    def loss_and_grads(model):
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x))))(model)
        return loss, jax.tree.leaves(grads)

    want, grads = nnx.jit(loss_and_grads)(model(efficient=True))
    for checkpoint in (False, True):
        got, found = nnx.jit(loss_and_grads)(with_flax_layers(model(efficient=False), checkpoint))
        np.testing.assert_allclose(got, want, rtol=1e-5)
        norms = lambda grads: sorted(float(jnp.linalg.norm(g)) for g in grads)  # noqa: E731
        np.testing.assert_allclose(norms(found), norms(grads), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "names"),
    [(TINY, DENSENET_FORMS), (Config(model="deform-resnet"), ("plain", "deformable"))],
)
def test_a_step_of_each_form(config, names):
    steps = training_steps(config, (8, 8, 3), num_classes=5, num_devices=2)(batch_size=6)
    assert tuple(steps) == names
    for step, state, batch, key in steps.values():
        assert batch.images.shape == (6, 8, 8, 3) and batch.images.dtype == np.uint8
        new_state, metrics = jax.eval_shape(step, state, batch, key)
        assert jax.tree.structure(new_state) == jax.tree.structure(state)
        assert metrics.loss.shape == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_efficient_keeps_less_and_parameters_stay_float32(dtype):
    build = model_builder(Config(dtype=dtype, depth=40), (16, 16, 1), 5)
    plain, efficient = (backward_bytes(build, (16, 16, 16, 1), efficient=e) for e in (False, True))
    assert efficient.argument_bytes > 0
    assert efficient.bytes < 0.4 * plain.bytes
    params = jax.eval_shape(lambda: initial_state(build, optax.identity(), seed=0)).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
