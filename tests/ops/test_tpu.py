"""Programs of the operators for a TPU v5e: memory, and communication between four chips.

The compiler for TPUs runs on any CPU; nothing here runs on a TPU. Those of batch norm, dense blocks
and cross entropy are in the tests of these operators.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import plan
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

pytestmark = needs_tpu_compiler
LEVELS = (8, 10), (4, 5)


def deform_conv(x, offset, mask, kernel):
    return effjax.deform_conv2d(x, offset, kernel, mask, padding=1)


def deform_attention(value, locations, weights, levels=LEVELS, **options):
    return effjax.ms_deform_attn(value, levels, locations, weights, **options)


def roi_align(x, boxes):
    return effjax.roi_align(x, boxes, output_size=3)


def multiscale_roi_align(x, y, boxes):
    return effjax.multiscale_roi_align([x, y], boxes, output_size=3, spatial_scales=[1 / 4, 1 / 8])


# For each operator: the shapes of its arguments of 8 images, and those without images, which come
# last; and the number of images' arguments that have a gradient.
IMAGES = 8
OPERATORS = {
    "conv": (deform_conv, [(8, 12, 16), (8, 12, 18), (8, 12, 9)], [(3, 3, 16, 24)], 3),
    "attention": (
        functools.partial(deform_attention, workspace_bytes=1_000_000),
        [(100, 2, 16), (300, 2, 2, 4, 2), (300, 2, 2, 4)],
        [],
        3,
    ),
    "roi": (roi_align, [(8, 12, 16), (5, 4)], [], 1),
    "multiscale": (multiscale_roi_align, [(8, 12, 16), (4, 6, 16), (5, 4)], [], 2),
}


def plan_on_chips(name, dtype="float32", axis_type=AxisType.Auto, vmap=False):
    """Plan gradients on four chips, over which the images, or examples of vmap, are sharded."""
    op, images, shared, differentiable = OPERATORS[name]
    count = len(images)
    argnums = (*range(differentiable), *range(count, count + len(shared)))
    run = jax.grad(lambda *args: jnp.sum(jnp.sin(op(*args).astype(jnp.float32))), argnums)
    if vmap:
        run = jax.vmap(run, (*(0 for _ in images), *(None for _ in shared)))
    mesh = AbstractMesh((4,), ("data",), axis_types=(axis_type,))
    batch = (4, IMAGES) if vmap else (IMAGES,)

    def place(shape, spec, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    first, *others = ((*batch, *shape) for shape in images)
    args = [place(first, P("data"), dtype), *(place(shape, P("data")) for shape in others)]
    return plan(run, *args, *(place(shape, P()) for shape in shared), target="v5e")


def count_collectives(p):
    """Count by kind, without the maximum of two numbers of samples (adaptive RoI pooling)."""
    return [(c.kind, c.count) for c in p.collectives if c.bytes > 8]


def check_collectives(p, name):
    """Each chip samples its own images: nothing is gathered, and no loop communicates."""
    assert p.num_devices == 4
    shared = OPERATORS[name][2]
    assert count_collectives(p) == ([("all-reduce", 1)] if shared else [])


@vary("name", OPERATORS)
def test_chips_reduce_gradients_of_parameters_once(name):
    check_collectives(plan_on_chips(name), name)


@pytest.mark.exhaustive
def test_chips_keep_images_apart_on_explicit_mesh():
    p = plan_on_chips("conv", dtype="bfloat16", axis_type=AxisType.Explicit)
    check_collectives(p, "conv")


@pytest.mark.exhaustive
def test_chips_do_not_communicate_for_sharded_examples_of_vmap():
    assert count_collectives(plan_on_chips("conv", vmap=True)) == []


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


WORKSPACE = 256 * 2**20  # the default of `workspace_bytes`; RoI pooling has no such argument


def convolve(x, offset, kernel, mask):
    return effjax.deform_conv2d(x, offset, kernel, mask, padding=1)


def pool(x, boxes, sampling_ratio=2):
    return effjax.roi_align(x, boxes, output_size=7, sampling_ratio=sampling_ratio)


# Shapes of detectors, and awkward ones with few channels or many heads. By name: the operator, the
# shapes of its arguments, and how many of them, the first ones, have a gradient.
DETECTOR = {
    "conv": (convolve, [(8, 56, 56, 64), (8, 56, 56, 18), (3, 3, 64, 64), (8, 56, 56, 9)], 4),
    "conv, many groups": (
        convolve,
        [(2, 40, 80, 16), (2, 40, 80, 144), (3, 3, 16, 16), (2, 40, 80, 72)],
        4,
    ),
    "attention, many heads": (
        functools.partial(deform_attention, levels=((100, 134),)),
        [(1, 13_400, 32, 4), (1, 5000, 32, 1, 4, 2), (1, 5000, 32, 1, 4)],
        3,
    ),
    "roi, adaptive": (
        functools.partial(pool, sampling_ratio=0),
        [(2, 100, 136, 256), (2, 512, 4)],
        1,
    ),
    "roi, few channels": (pool, [(1, 64, 64, 4), (1, 4000, 4)], 1),
}


@vary("name", DETECTOR)
def test_workspace(name):
    """The temporaries of both passes."""
    op, shapes, n = DETECTOR[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def run(dy, *args):
        y, backward = jax.vjp(lambda *a: op(*a, *args[n:]), *args[:n])
        return y, backward(dy)

    p = plan(run, jax.eval_shape(op, *args), *args, target="v5e")
    assert p.device.temporaries <= WORKSPACE
