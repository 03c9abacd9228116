"""Host memory of OffloadModel, as planned by `effjax.memory.plan`."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import plan
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

pytestmark = needs_gpu_compiler
LAYERS, WIDTH, BATCH = 3, 1024, 512
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


def planned(flavour, overwrites):
    """Plan a gradient, or a step that overwrites the parameters."""
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
    params, apply = flavour(x)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host), params)
    grad = jax.grad(lambda params, x: jnp.sin(apply(params, x)).mean())

    def descend(p, dp):
        return effjax.to_host(effjax.to_device(p) - effjax.to_device(dp))

    def step(params, x):
        return jax.tree.map(descend, params, grad(params, x))

    program = step if overwrites else grad
    return plan(effjax.offload_jit(program, donate=overwrites), params, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("flavour", [of_linen, of_nnx])
def test_host_memory_of_gradients(flavour):
    """The host holds parameters, gradients, and inputs of the layers.

    XLA may place the inputs in the memory of gradients that are not computed yet.
    """
    memory = planned(flavour, overwrites=False)
    assert memory.host.arguments == memory.host.outputs == PARAMS and memory.host.aliased == 0
    assert memory.host.temporaries <= INPUTS <= memory.host.outputs + memory.host.temporaries
    assert memory.peak_host_bytes == 2 * PARAMS + memory.host.temporaries
    assert memory.device.arguments == 4 * BATCH * WIDTH and memory.device.outputs < 2**10


@vary("flavour", [of_nnx, of_linen])
def test_host_memory_of_step_that_overwrites_parameters(flavour):
    memory = planned(flavour, overwrites=True)
    assert memory.host.arguments == memory.host.outputs == memory.host.aliased == PARAMS
    assert memory.peak_host_bytes == PARAMS + memory.host.temporaries
    assert memory.host.temporaries <= PARAMS + INPUTS
