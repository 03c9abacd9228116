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


def dcn(x, offset, mask):
    return effjax.dcn_aggregate(x, offset, mask, padding=1)


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


def make_step(name, passes, dtype):
    """Return a function of arrays, and the shapes of those with and without images."""
    op, images, shared, differentiable = OPERATORS[name]
    run, count = op, len(images)
    images = [jax.ShapeDtypeStruct((IMAGES, *s), jnp.float32) for s in images]
    shared = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shared]
    images[0] = jax.ShapeDtypeStruct(images[0].shape, dtype)
    if passes == "gradients":
        argnums = (*range(differentiable), *range(count, count + len(shared)))

        def run(*args):
            return jax.grad(lambda *a: jnp.sum(jnp.sin(op(*a).astype(jnp.float32))), argnums)(*args)

    return run, images, shared


def plan_on_chips(name, passes, dtype="float32", axis_type=AxisType.Auto, vmap=None):
    """Plan an operator with images sharded over four chips; `vmap` is the sharded axis of two."""
    run, images, shared = make_step(name, passes, dtype)
    mesh = AbstractMesh((4,), ("data",), axis_types=(axis_type,))
    spec = P("data")
    if vmap is not None:
        run = jax.vmap(run, (*(0 for _ in images), *(None for _ in shared)))
        images = [jax.ShapeDtypeStruct((4, *a.shape), a.dtype) for a in images]
        spec = P("data") if vmap == "examples" else P(None, "data")

    def place(arrays, spec):
        sharding = NamedSharding(mesh, spec)
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arrays]

    return plan(run, *place(images, spec), *place(shared, P()), target="v5e")


def count_collectives(p):
    """Count by kind, without the maximum of two numbers of samples (adaptive RoI pooling)."""
    return [(c.kind, c.count) for c in p.collectives if c.bytes > 8]


def check_collectives(p, name, passes):
    """Each chip samples its own images: nothing is gathered, and no loop communicates."""
    assert p.num_devices == 4
    shared = OPERATORS[name][2] if passes == "gradients" else []
    assert count_collectives(p) == ([("all-reduce", 1)] if shared else [])


@vary("name", OPERATORS)
def test_chips_reduce_gradients_of_parameters_once(name):
    check_collectives(plan_on_chips(name, "gradients"), name, "gradients")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("passes", "dtype", "axis_type"),
    [("forward", "float32", AxisType.Auto), ("gradients", "bfloat16", AxisType.Explicit)],
)
def test_chips_keep_images_apart(passes, dtype, axis_type):
    check_collectives(plan_on_chips("conv", passes, dtype, axis_type), "conv", passes)


@pytest.mark.exhaustive
def test_chips_do_not_communicate_for_sharded_examples_of_vmap():
    assert count_collectives(plan_on_chips("conv", "gradients", vmap="examples")) == []


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


@pytest.mark.exhaustive
def test_chips_gather_sharded_images_inside_vmap():
    """A known limitation. XLA cannot shard the second axis of a reshape [D, N] -> [D * N]."""
    kinds = {c.kind for c in plan_on_chips("conv", "forward", vmap="images").collectives}
    assert kinds == {"all-gather"}


WORKSPACE = 256 * 2**20  # the default of `workspace_bytes`; RoI pooling has no such argument
DETECTOR_LEVELS = (100, 134), (50, 67), (25, 34), (13, 17)


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
    "attention": (
        functools.partial(deform_attention, levels=DETECTOR_LEVELS),
        [(1, 17_821, 8, 32), (1, 22_223, 8, 4, 4, 2), (1, 22_223, 8, 4, 4)],
        3,
    ),
    "attention, many heads": (
        functools.partial(deform_attention, levels=((100, 134),)),
        [(1, 13_400, 32, 4), (1, 5000, 32, 1, 4, 2), (1, 5000, 32, 1, 4)],
        3,
    ),
    "dcn": (dcn, [(8, 56, 56, 64), (8, 56, 56, 72), (8, 56, 56, 36)], 3),
    "roi": (pool, [(2, 100, 136, 256), (2, 512, 4)], 1),
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
