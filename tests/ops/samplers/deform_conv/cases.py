"""Cases of deform_conv2d."""

import functools

import numpy as np

from effjax import deform_conv2d
from tests.ops.battery import Case, Operator
from tests.ops.samplers.deform_conv import oracle

# Positions at and beyond the borders of five pixels, where a sample is zero unless it is between
# -1 and 5.
EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -2.0, -1.0, -1 + 1e-6, 0.0, 4.0, 4.5, 5 - 1e-6, 5.0]
CASES = {
    "plain": dict(c=3, o=2),
    # The grid of torchvision's tests.
    "all": dict(
        c=6, o=2, size=(5, 4), kernel=(3, 2), groups=2, offset_groups=3, strides=(2, 1),
        padding=((1, 1), (0, 0)), dilation=(2, 1),
    ),
    "one_sided": dict(
        c=4, o=4, size=(6, 3), kernel=(1, 3), padding=((0, 2), (2, 1)), strides=(2, 2)
    ),
    "pointwise": dict(c=4, o=3, kernel=(1, 1), groups=1, offset_groups=4),
    # An image, with one sample, for each of the positions.
    "edges": dict(
        c=2, o=3, batch=2 * len(EDGES), size=(5, 5), kernel=(1, 1), strides=(5, 5),
        padding=((0, 0), (0, 0)),
    ),
}  # fmt: skip


def make_random(
    c, o, batch=2, optional=True, seed=0, spread=1.5, size=(5, 4), kernel=(3, 3), groups=1,
    offset_groups=1, strides=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), dtype=np.float64,
):  # fmt: skip
    out = [
        (s + sum(p) - (k - 1) * d - 1) // t + 1
        for s, p, k, d, t in zip(size, padding, kernel, dilation, strides, strict=True)
    ]
    rng = np.random.default_rng(seed)
    taps = kernel[0] * kernel[1] * offset_groups
    args = [
        rng.normal(size=(batch, *size, c)),
        spread * rng.normal(size=(batch, *out, taps * 2)),
        rng.normal(size=(*kernel, c // groups, o)),
        rng.normal(size=(batch, *out, taps)) if optional else None,
        rng.normal(size=o) if optional else None,
    ]
    definition = functools.partial(
        oracle.deform_conv, strides=strides, padding=padding, dilation=dilation, groups=groups,
        offset_groups=offset_groups,
    )  # fmt: skip

    def bind(implementation, **options):
        return functools.partial(
            deform_conv2d, strides=strides, padding=padding, kernel_dilation=dilation,
            feature_group_count=groups, implementation=implementation, **options,
        )  # fmt: skip

    args = [a if a is None else a.astype(dtype) for a in args]
    dy = rng.normal(size=(batch, *out, o))
    return Case(bind, definition, args, dy, differentiable=5, shared=(2, 4))


def make(name, **options):
    c = make_random(**CASES[name], **options)
    if name == "edges":
        c.args[1] = np.random.default_rng(0).uniform(0, 3, size=c.args[1].shape)
        c.args[1][: len(EDGES), 0, 0, 0] = c.args[1][len(EDGES) :, 0, 0, 1] = EDGES
    return c


def between_pixels(name="all"):
    """Return a case without samples near a kink of the interpolation."""
    c = make(name, batch=1)
    c.args[1] = np.floor(c.args[1]) + np.random.default_rng(1).uniform(0.1, 0.9, c.args[1].shape)
    return c


OPERATOR = Operator(
    make=make,
    cases=tuple(CASES),
    plain_case="all",
    context_case="plain",
    xla_context_case="plain",
    context_options={},
    sizes=(
        ("all", dict(batch=0)),
        ("one_sided", dict(batch=3, optional=False)),
        ("all", dict(batch=33)),
    ),
    mapped=((None, None, 0, None, 0), (0, 0, None, 0, None), (None, 0, None, None, None)),
    derivatives=between_pixels,
    options={"chunk_bytes": 3000},  # less than two rows
)
