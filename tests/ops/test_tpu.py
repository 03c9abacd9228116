"""Memory of the operators on a TPU v5e.

The compiler for TPUs runs on any CPU; nothing here runs on a TPU. Those of batch norm, dense blocks
and cross entropy are in the tests of these operators.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import plan
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

pytestmark = needs_tpu_compiler


def test_stack_is_in_host_memory():
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    params = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32, sharding=host)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)

    def loss(params, x):
        y = effjax.offload_scan(lambda w, x, key: jnp.tanh(x @ w), params, x)
        return jnp.sum(jnp.sin(y))

    p = plan(effjax.offload_jit(jax.grad(loss)), params, x, target="v5e")
    stack, layer = 16 * 4 * 256 * 256, 4 * 256 * 256
    assert p.host.arguments == p.host.outputs == stack
    assert p.device.temporaries < 8 * layer


def deform_conv(x, offset, mask, kernel):
    return effjax.deform_conv2d(x, offset, kernel, mask, padding=1)


def deform_attention(value, locations, weights):
    return effjax.ms_deform_attn(value, ((100, 134),), locations, weights)


def pool(x, boxes, ratio=2):
    return effjax.roi_align(x, boxes, output_size=7, sampling_ratio=ratio)


# Shapes of detectors, and awkward ones with few channels or many heads. By name: the operator, the
# shapes of its arguments, and the numbers of those that have a gradient.
DETECTOR = {
    "conv": (
        deform_conv,
        [(8, 56, 56, 64), (8, 56, 56, 18), (8, 56, 56, 9), (3, 3, 64, 64)],
        (0, 1, 2, 3),
    ),
    "conv, many groups": (
        deform_conv,
        [(2, 40, 80, 16), (2, 40, 80, 144), (2, 40, 80, 72), (3, 3, 16, 16)],
        (0, 1, 2, 3),
    ),
    "attention, many heads": (
        deform_attention,
        [(1, 13_400, 32, 4), (1, 5000, 32, 1, 4, 2), (1, 5000, 32, 1, 4)],
        (0, 1, 2),
    ),
    "roi, adaptive": (functools.partial(pool, ratio=0), [(2, 100, 136, 256), (2, 512, 4)], (0,)),
    "roi, few channels": (pool, [(1, 64, 64, 4), (1, 4000, 4)], (0,)),
}


@vary("name", DETECTOR)
def test_workspace(name):
    """The temporaries of both passes take no more than the default of `workspace_bytes`."""
    op, shapes, differentiable = DETECTOR[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def run(dy, *args):
        y, backward = jax.vjp(op, *args)
        gradients = backward(dy)
        return y, [gradients[i] for i in differentiable]

    p = plan(run, jax.eval_shape(op, *args), *args, target="v5e")
    assert p.device.temporaries <= 256 * 2**20
