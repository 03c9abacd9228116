"""What `effjax.memory.plan` counts on the host for OffloadModel, and for the operator below it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import plan
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive

pytestmark = needs_gpu_compiler
LAYERS, WIDTH, BATCH = 4, 1024, 512
PARAMS = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
INPUTS = LAYERS * 4 * BATCH * WIDTH


def of_linen(x):
    model = effjax.linen.OffloadModel([linen.Dense(WIDTH) for _ in range(LAYERS)])
    return jax.eval_shape(model.init, jax.random.key(0), x), model.apply


def of_nnx(x):
    def make():
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(LAYERS)]
        return effjax.nnx.OffloadModel(layers)

    graphdef, params = nnx.split(nnx.eval_shape(make))
    return params, lambda params, x: nnx.merge(graphdef, params)(x)


def of_operator(x):
    one = {"w": jnp.zeros((WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}
    layer = lambda w, x, key: x @ w["w"] + w["b"]  # noqa: E731
    return [one] * LAYERS, lambda w, x: effjax.offload_sequential([layer] * LAYERS, list(w), x)


@functools.cache
def planned(flavour, overwrites, num_devices=1):
    """A gradient, or a step that overwrites the parameters."""
    mesh = AbstractMesh((num_devices,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((num_devices * BATCH, WIDTH), jnp.float32, sharding=rows)
    params, apply = flavour(x)
    params: Any = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host), params
    )
    grad = jax.grad(lambda params, x: jnp.sin(apply(params, x)).mean())

    def descend(p, dp):
        return effjax.to_host(effjax.to_device(p) - effjax.to_device(dp))

    def step(params, x):
        return jax.tree.map(descend, params, grad(params, x))

    program = step if overwrites else grad
    return plan(effjax.offload_jit(program, donate=overwrites), params, x)


@pytest.mark.parametrize(
    "flavour", [of_operator, exhaustive(of_linen), exhaustive(of_nnx)], ids=lambda f: f.__name__
)
def test_gradients(flavour):
    """Parameters, as many gradients, and inputs of the layers, for which XLA may take the place of
    gradients that are not there yet."""
    found = planned(flavour, overwrites=False)
    assert found.host.arguments == found.host.outputs == PARAMS and found.host.aliased == 0
    assert found.host.temporaries <= INPUTS <= found.host.outputs + found.host.temporaries
    assert found.peak_host_bytes == 2 * PARAMS + found.host.temporaries
    assert found.device.arguments == 4 * BATCH * WIDTH and found.device.outputs < 2**10
    for limit in (-1, 0):
        limited = dataclasses.replace(found, host_memory_bytes=found.peak_host_bytes + limit)
        assert limited.fits == (limit == 0)


@pytest.mark.parametrize(
    "flavour", [of_nnx, exhaustive(of_linen), exhaustive(of_operator)], ids=lambda f: f.__name__
)
def test_a_step_that_overwrites(flavour):
    found = planned(flavour, overwrites=True)
    assert found.host.arguments == found.host.outputs == found.host.aliased == PARAMS
    assert found.peak_host_bytes == PARAMS + found.host.temporaries
    assert found.host.temporaries <= PARAMS + INPUTS


@pytest.mark.exhaustive
def test_on_several_devices():
    """Each has parameters of its own."""
    found = planned(of_linen, overwrites=False, num_devices=2)
    assert found.host.arguments == found.host.outputs == PARAMS
    assert found.peak_host_bytes == 2 * found.host.total >= 4 * PARAMS
