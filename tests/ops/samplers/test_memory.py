"""Memory of the sampling operators: chunks of the work, and residuals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from effjax import deform_conv2d, ms_deform_attn, roi_align
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from tests.ops.battery import IMPLEMENTATIONS, own_rules_or_xla
from tests.ops.samplers.deform_attention.cases import ATTENTION
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import make as make_roi
from tests.programs import needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary


def convolve(*args, **options):
    return deform_conv2d(*args, padding=1, **options)


def attend(value, *others, levels=((8, 8), (4, 4)), **options):
    return ms_deform_attn(value, levels, *others, **options)


def pool(x, boxes, ratio=2):
    return roi_align(x, boxes, output_size=7, sampling_ratio=ratio)


def conv_shapes(height, width=32, channels=32, batch=2):
    image = batch, height, width
    return (*image, channels), (*image, 18), (3, 3, channels, channels), (*image, 9)


def attention_shapes(queries):
    return (1, 80, 2, 32), (1, queries, 2, 2, 4, 2), (1, queries, 2, 2, 4)


def gradients(run, **options):
    """Return the gradients of all arguments."""

    def loss(args):
        return jnp.sum(run(*args, **options).astype(jnp.float32) ** 2)

    return lambda *args: jax.grad(loss)(args)


def arguments(run, dtype, shapes):
    """Return abstract arguments, and the bytes that a program may take beside the workspace.

    These are y, its gradient, and gradients in the dtype of accumulation; of attention, also chunks
    of the locations.
    """
    types = (dtype, "float32", dtype if run is convolve else "float32", "float32")
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=False)]
    y = jax.eval_shape(run, *args)
    if run is convolve:
        return args, sum(4 * a.size for a in args) + 2 * 4 * y.size
    return args, sum(3 * 4 * a.size for a in args) + 3 * 4 * y.size


@own_rules_or_xla
@vary("dtype, height", [("float32", 47), ("bfloat16", 23)])
def test_convolution_stays_under_the_workspace(implementation, dtype, height):
    """The last chunk is smaller."""
    args, others = arguments(convolve, dtype, conv_shapes(height))
    run = gradients(convolve, chunk_bytes=2**21, implementation=implementation)
    memory = jax.jit(run).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2**21 + others


def largest(hlo):
    """Return the number of elements of the largest array that a program names."""
    sizes = re.findall(r"(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", hlo)
    return max(np.prod([int(n) for n in size.split(",")]) for size in sizes)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [(name, "float32" if name == "xla" else "bfloat16") for name in IMPLEMENTATIONS],
    indirect=["implementation"],
)
def test_attention_has_no_array_of_all_samples(implementation, dtype):
    """No program has an array [queries, levels, points, channels]."""
    args, others = arguments(attend, dtype, attention_shapes(1000))
    samples = args[2].size * 32
    run = gradients(attend, chunk_bytes=2**19, implementation=implementation)
    program = jax.jit(run).lower(*args).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 2**19 + others < 4 * samples
    assert largest(program.as_text()) <= samples / 4


@own_rules_or_xla
def test_pooling_has_no_axis_of_samples(implementation):
    """Temporaries are a few times the result, not its 64 samples per bin."""
    x, boxes = (jax.ShapeDtypeStruct(s, "float32") for s in ((1, 32, 32, 64), (1, 64, 4)))
    options = dict(output_size=7, sampling_ratio=8, implementation=implementation)
    program = jax.jit(gradients(roi_align, **options)).lower(x, boxes).compile()
    result = 64 * 49 * 64 * 4
    assert program.memory_analysis().temp_size_in_bytes <= 10 * result


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("run", "shapes", "workspace"),
    [(convolve, conv_shapes(24), 2**20), (attend, attention_shapes(4000), 2**21)],
    ids=["conv", "attention"],
)
def test_memory_on_a_gpu(run, shapes, workspace):
    """A program that was traced for a CPU before has the chunks of a GPU."""
    args, others = arguments(run, "bfloat16", shapes)
    jitted = jax.jit(gradients(run, chunk_bytes=workspace, implementation="xla"))
    jitted.trace(*args)
    planned = plan(jitted, *args)
    assert planned.device.temporaries <= workspace + others
    if run is attend:
        assert largest(planned.hlo) <= args[2].size * 32 / 4


@needs_tpu_compiler
@vary(
    ("run", "shapes"),
    [
        (convolve, conv_shapes(56, 56, 64, 8)),
        (convolve, [(2, 40, 80, 16), (2, 40, 80, 144), (3, 3, 16, 16), (2, 40, 80, 72)]),
        (
            functools.partial(attend, levels=((100, 134),)),
            [(1, 13_400, 32, 4), (1, 5000, 32, 1, 4, 2), (1, 5000, 32, 1, 4)],
        ),
        (functools.partial(pool, ratio=0), [(2, 100, 136, 256), (2, 512, 4)]),
        (pool, [(1, 64, 64, 4), (1, 4000, 4)]),
    ],
    ids=[
        "conv",
        "conv, many groups",
        "attention, many heads",
        "roi, adaptive",
        "roi, few channels",
    ],
)
def test_default_workspace_on_a_tpu(run, shapes):
    """The temporaries of both passes take no more than the default of `chunk_bytes`.

    Shapes are those of detectors, and awkward ones with few channels or many heads.
    """
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def both(dy, *args):
        y, backward = jax.vjp(run, *args)
        return y, backward(dy)

    p = plan(both, jax.eval_shape(run, *args), *args, target="v5e")
    assert p.device.temporaries <= 256 * 2**20


@pytest.mark.parametrize(
    ("run", "shapes"),
    [(convolve, conv_shapes(64, 64, 64, 1)[:3]), (attend, attention_shapes(4000))],
    ids=["conv", "attention"],
)
@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu")], ids=str)
def test_each_platform_has_its_chunks(run, shapes, platforms):
    """Those of a CPU are smaller; the order of tracing must not matter."""
    args, _ = arguments(run, "float32", shapes)
    jitted = jax.jit(lambda *args: run(*args, implementation="xla"))
    for platform in platforms:
        with trace_for_platform(platform):
            text = jitted.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert ("while" in text) == (platform == "cpu")


@pytest.mark.parametrize("operator", [CONV, ATTENTION], ids=["conv", "attention"])
@own_rules_or_xla
def test_residuals_are_the_inputs(operator, implementation):
    """The backward pass keeps no copies, and a scan none of its stacked inputs."""
    c = operator.make_context(implementation, dtype=np.float32)
    x, *layer = (jnp.asarray(a, jnp.float32) for a in c.args if a is not None)
    layers = [jnp.stack([a] * 3) for a in layer]
    f = c.bind(implementation)

    def network(x, *layers):
        def body(total, layer):
            return total + jnp.mean(f(x + total, *layer)), None

        return lax.scan(body, 0.0, layers)[0]

    one, run = jax.jit(f), jax.jit(network)
    kept = jax.tree.leaves(jax.vjp(one, x, *layer)[1])
    pointers = {a.unsafe_buffer_pointer() for a in kept}
    # A bias is not needed for the gradients.
    needed = [x, *layer][: 4 if operator is CONV else None]
    assert pointers >= {a.unsafe_buffer_pointer() for a in needed}
    assert sum(a.size for a in kept) <= sum(a.size for a in (x, *layer))
    pointers = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(jax.vjp(run, x, *layers)[1])}
    needed = layers[: 3 if operator is CONV else None]
    assert pointers >= {a.unsafe_buffer_pointer() for a in needed}


@own_rules_or_xla
def test_residuals_of_pooling(implementation):
    c = make_roi("offset", dtype=np.float32)
    run = c.bind(implementation)
    residuals = jax.eval_shape(lambda x, o: jax.vjp(run, x, o, c.args[2])[1], *c.args[:2])
    assert sum(a.size for a in jax.tree.leaves(residuals)) <= c.args[0].size + 4 * c.args[1].size
