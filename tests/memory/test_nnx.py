"""Plans of functions that take nnx modules and optimizers."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from effjax.memory import compare, max_batch_size, plan, residual_bytes
from tests.memory.test_plan import on_host
from tests.programs import needs_gpu_compiler

pytestmark = needs_gpu_compiler

WIDTH = 256
X = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.second = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.tied = self.first  # shares its arrays

    def __call__(self, x):
        return self.second(jnp.tanh(self.tied(x)))


def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))


def shapes():
    """Return a module and its optimizer whose arrays are shapes."""
    model = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    return model, nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))


@functools.cache
def nnx_plan():
    return plan(nnx.jit(step, donate_argnums=(0, 1)), *shapes(), X)


def test_arguments_and_donation():
    p = nnx_plan()
    parameters = 4 * (2 * 4 * WIDTH**2 + 5 * WIDTH)
    state = 3 * parameters  # with Adam's moments
    assert state < p.device.arguments - 4 * X.size < 1.01 * state
    assert state < p.device.aliased < 1.01 * state
    # Live buffers account for the temporary bytes.
    live = sum(b.bytes for b in p.peak_buffers if b.kind == "temporary")
    assert 0.95 * p.device.temporaries <= live <= p.device.temporaries


@pytest.mark.exhaustive
def test_methods_and_modules_of_arrays():
    class Learner(Network):
        @nnx.jit(donate_argnums=(0, 1))
        def learn(self, optimizer, x):
            step(self, optimizer, x)

    model = Learner(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    assert plan(model.learn, optimizer, X).device == nnx_plan().device
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail("changed"), nnx.state(model), before)


@pytest.mark.exhaustive
def test_arrays_of_modules_keep_their_memory_kind():
    model = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda a: on_host(*a.shape), state)

    @nnx.jit
    def forward(model, x):
        return x @ jax.device_put(model.kernel[...], jax.memory.Space.Device)

    assert plan(forward, nnx.merge(graph, state), X).host.arguments == 4 * WIDTH**2


REFUSED = pytest.raises(TypeError, match=r"`args\[0\]` is a Network.*nnx.jit")


def test_rejects_functions_without_nnx_jit():
    model, optimizer = shapes()
    for fn in (step, jax.jit(step), nnx.jit(step).__wrapped__, nnx.value_and_grad(step)):
        with REFUSED:
            plan(fn, model, optimizer, X)
    with REFUSED:
        compare({"step": step}, model, optimizer, X)
    with REFUSED:
        max_batch_size(lambda batch: (step, model, optimizer, X))
    with pytest.raises(TypeError, match=r"`args\[1\]\['rngs'\]` is a Rngs"):
        plan(step, X, {"rngs": nnx.Rngs(0)})
    with pytest.raises(TypeError, match=r"`args\[0\]` is a Network.*nnx.split"):
        residual_bytes(lambda model, x: model(x), model, X)
