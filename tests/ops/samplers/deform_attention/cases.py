"""Cases of ms_deform_attn and dcn_aggregate."""

import functools

import numpy as np

from effjax import dcn_aggregate, ms_deform_attn
from effjax.ops._common.arguments import conv_output_size
from tests.ops.battery import Case, Operator
from tests.ops.samplers.deform_attention import oracle

# In a level of four pixels, a sample is zero unless it is between -1/8 and 9/8.
EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -1.0, -0.125, -0.124, 0.0, 1.0, 1.124, 1.125, 9.0]
CASES = {
    "levels": dict(shapes=((4, 5), (3, 2), (1, 1)), heads=2, depth=3, points=2),
    "one": dict(shapes=((3, 4),), heads=1, depth=1, points=1),
    # Channels in vectors and a rest, more points than are computed together.
    "wide": dict(shapes=((5, 3), (2, 2), (1, 3), (2, 1)), heads=2, depth=53, points=5),
    "edges": dict(shapes=((4, 4),), heads=1, depth=1, points=1, batch=2 * len(EDGES), queries=1),
}


def make_random(
    shapes, heads, depth, points, batch=2, queries=5, seed=0, spread=0.4, dtype=np.float64
):
    rng = np.random.default_rng(seed)
    at = batch, queries, heads, len(shapes), points
    args = (
        rng.normal(size=(batch, sum(h * w for h, w in shapes), heads, depth)),
        0.5 + spread * rng.normal(size=(*at, 2)),
        rng.normal(size=at),
    )

    def definition(value, locations, weights, dy):
        return oracle.attention(value, shapes, locations, weights, dy)

    def bind(implementation, **options):
        options["implementation"] = implementation
        return lambda value, *others: ms_deform_attn(value, shapes, *others, **options)

    dy = rng.normal(size=(batch, queries, heads * depth)).astype(dtype)
    return Case(bind, definition, [a.astype(dtype) for a in args], dy, differentiable=3)


def make(name, **options):
    c = make_random(**CASES[name], **options)
    if name == "edges":
        c.args[1] = np.random.default_rng(0).uniform(0.2, 0.8, size=c.args[1].shape)
        c.args[1][: len(EDGES), ..., 0].flat = c.args[1][len(EDGES) :, ..., 1].flat = EDGES
    return c


def between_pixels(name="levels"):
    """Return a case without samples near a kink of the interpolation."""
    c = make(name, batch=1, queries=3)
    rng = np.random.default_rng(1)
    for level, (h, w) in enumerate(CASES[name]["shapes"]):
        at = c.args[1][:, :, :, level]
        size = np.array([w, h])
        at[:] = (np.floor(at * size - 0.5) + rng.uniform(0.1, 0.9, at.shape) + 0.5) / size
    return c


ATTENTION = Operator(
    make=make,
    cases=tuple(CASES),
    plain_case="levels",
    context_case="levels",
    xla_context_case="levels",
    context_options={},
    sizes=(
        ("levels", dict(batch=0, queries=3)),
        ("levels", dict(batch=3, queries=0)),
        ("levels", dict(batch=3, queries=33)),
    ),
    mapped=((0, None, None), (None, 0, 0)),
    derivatives=between_pixels,
    options={"chunk_bytes": 3000},  # less than all queries
)


WINDOWS = {
    "plain": dict(padding=((1, 1), (1, 1))),
    "all": dict(
        kernel=(3, 5), strides=(2, 1), dilation=(1, 2), padding=((0, 1), (4, 2)), scale=1.5,
        remove_center=True,
    ),
    "non_finite": dict(padding=((1, 1), (1, 1))),
    "even": dict(kernel=(2, 4), padding=((1, 1), (2, 2)), dilation=(2, 1), scale=0.5),
}  # fmt: skip
NAMES = dict(kernel="kernel_size", dilation="kernel_dilation", scale="offset_scale")


def make_random_window(
    window, batch=2, size=(5, 6), groups=3, depth=2, seed=0, dtype=np.float64
):  # fmt: skip
    kernel = window.get("kernel", (3, 3))
    out = conv_output_size(
        size, kernel, window.get("strides", (1, 1)), window["padding"],
        window.get("dilation", (1, 1)),
    )  # fmt: skip
    points = groups * (kernel[0] * kernel[1] - window.get("remove_center", False))
    rng = np.random.default_rng(seed)
    shapes = (*size, groups * depth), (*out, points * 2), (*out, points), (*out, groups * depth)
    *args, dy = (rng.normal(size=(batch, *s)).astype(dtype) for s in shapes)
    renamed = {NAMES.get(k, k): v for k, v in window.items()}

    def bind(implementation, **options):
        return functools.partial(dcn_aggregate, **renamed, implementation=implementation, **options)

    return Case(bind, functools.partial(oracle.dcn, **window), args, dy, differentiable=3)


def make_window(name, **options):
    c = make_random_window(WINDOWS[name], **options)
    if name == "non_finite":  # such samples are zero
        c.args[1][:, 0], c.args[1][:, 1] = np.nan, np.inf
    return c


def window_between_pixels():
    c = make_window("all", batch=1, groups=1, size=(4, 4))
    # The scale is 1.5: 1.5 times a whole step is a half, and 0.15 more stays between pixels.
    c.args[1] = np.round(c.args[1]) + np.random.default_rng(1).uniform(-0.1, 0.1, c.args[1].shape)
    return c


DCN = Operator(
    make=make_window,
    cases=tuple(WINDOWS),
    plain_case="all",
    context_case="plain",
    xla_context_case="plain",
    context_options={},
    sizes=(("even", dict(batch=0)), ("plain", dict(batch=3, size=(1, 9), depth=17))),
    mapped=((0, None, None),),
    derivatives=window_between_pixels,
    options={"chunk_bytes": 3000},
)
