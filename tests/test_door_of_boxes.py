"""The door of what pools boxes: what an argument cannot be is refused, by the argument's name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from effjax import compat
from effjax.ops._common import dispatch


def zeros(*shape):
    return np.zeros(shape, np.float32)


X, BOXES = dict(x=zeros(2, 5, 4, 8)), dict(boxes=zeros(2, 3, 4))
OFFSET = dict(offset=zeros(2, 3, 2, 2, 2))
GOOD = X | BOXES | dict(output_size=2)
ROIS, NCHW = zeros(3, 5), zeros(2, 8, 5, 4)

ARRAY = [None, [1.0], 1.0, "a", np.array("a"), np.array([None]), zeros(2, 3, 1)]
INTEGER = [None, 1.5, 1.0, "a", [1], 0, True, zeros(2)]
RATIO = [None, 1.5, "a", [1], -2, True, 2**20 + 1]
SCALE = [None, "a", [1.0], 0.0, -1.0, np.inf, np.nan, 1e300]
FACTOR = [None, "a", [1.0], np.inf, np.nan, -1e300]
PAIR = [None, 1.5, "a", (1, 1, 1), (1.0, 2), 0, -1, True, 2**40]
FLAG = [None, 1, "a"]
NAME = ["a", 1, ["xla"]]
DTYPE = ["int7", 3, "int32", jnp.complex64]
LEVELS = [[], [None], [zeros(2, 3, 3)], [zeros(2, 4, 4, 8), zeros(2, 2, 2, 7)]]
SCALES = ["a", (), (0.5, 0.5), (0.3,), (0.5, 0.25), (0.0,), ("a",)]


def wrong(a):
    return [*ARRAY, a.astype(int), a.astype(complex), a.astype(bool)]


def present(values):
    return [value for value in values if value is not None]


OPTIONS: dict[str, list[Any]] = dict(
    x=wrong(X["x"]), boxes=[*wrong(BOXES["boxes"]), zeros(1, 3, 4), zeros(6, 4)],
    output_size=PAIR, spatial_scale=SCALE, sampling_ratio=RATIO, implementation=NAME,
)  # fmt: skip
MOVED = present([*wrong(OFFSET["offset"]), zeros(2, 3, 2, 2, 3), zeros(2, 3, 3, 2, 2)])
LAYER = {k: OPTIONS[k] for k in ("output_size", "spatial_scale", "sampling_ratio")}
LAYER |= dict(implementation=NAME, gamma=FACTOR)
NUMBERED = [*ARRAY[:-1], zeros(3, 4), ROIS.astype(int)]


def in_nnx(name, inputs, **given):
    options = {k: v for k, v in given.items() if k not in inputs}
    if name.endswith("Pack"):
        options = {"rngs": nnx.Rngs(0)} | options
    return getattr(effjax.nnx, name)(**options)(*(given[k] for k in inputs))


def in_linen(name, inputs, **given):
    options = {k: v for k, v in given.items() if k not in inputs}
    layer = getattr(effjax.linen, name)(**options)
    return layer.init(jax.random.key(0), *(given[k] for k in inputs))


def layers():
    kinds = LAYER | dict(boxes=OPTIONS["boxes"])
    for name in ("DeformRoIPool", "DeformRoIPoolPack", "ModulatedDeformRoIPoolPack"):
        good = dict(output_channels=8, deform_fc_channels=4) if name.endswith("Pack") else {}
        inputs = ("x", "boxes")
        yield f"nnx.{name}", functools.partial(in_nnx, name, inputs), GOOD | good, kinds
        yield f"linen.{name}", functools.partial(in_linen, name, inputs), GOOD, kinds


FUNCTIONS = [
    ("roi_align", effjax.roi_align, GOOD, OPTIONS),
    (
        "deform_roi_pool", effjax.deform_roi_pool, GOOD | OFFSET,
        OPTIONS | dict(offset=MOVED, gamma=FACTOR),
    ),
    (
        "deform_psroi_pool", effjax.deform_psroi_pool, GOOD | OFFSET | dict(group_size=2),
        {k: v for k, v in OPTIONS.items() if k != "sampling_ratio"}
        | dict(
            offset=[*MOVED[:-1], zeros(2, 3, 2, 2, 6)], group_size=[*INTEGER, 3],
            part_size=INTEGER[1:], sample_per_part=[*INTEGER, 2**40], trans_std=FACTOR,
        ),
    ),
    (
        "multiscale_roi_align", effjax.multiscale_roi_align,
        BOXES | dict(features=[X["x"]], output_size=2, spatial_scales=[0.5]),
        {k: v for k, v in OPTIONS.items() if k not in ("x", "spatial_scale")}
        | dict(
            features=LEVELS, spatial_scales=SCALES, canonical_scale=SCALE,
            canonical_level=[None, 1.5, "a", True],
        ),
    ),
    (
        "compat.roi_align", compat.roi_align,
        dict(input=NCHW, boxes=ROIS, output_size=2),
        dict(
            input=wrong(NCHW), output_size=PAIR, spatial_scale=SCALE, sampling_ratio=RATIO,
            boxes=[*NUMBERED, [zeros(2, 4)], [zeros(2, 4), zeros(2, 5)], [1.0, 2.0]],
        ),
    ),
    (
        "compat.deform_roi_pool", compat.deform_roi_pool,
        dict(input=NCHW, rois=ROIS, offset=zeros(3, 2, 2, 2), output_size=2),
        dict(
            input=wrong(NCHW), rois=NUMBERED, output_size=PAIR, spatial_scale=SCALE,
            sampling_ratio=RATIO, gamma=FACTOR, offset=present([*ARRAY, zeros(2, 2, 2, 2)]),
        ),
    ),
    (
        "compat.deform_roi_pooling", compat.deform_roi_pooling,
        dict(
            data=NCHW, rois=ROIS, offset=zeros(3, 2, 2, 2), spatial_scale=0.5, out_size=2,
            out_channels=2, no_trans=False, group_size=2,
        ),
        dict(
            data=wrong(NCHW), rois=NUMBERED, out_size=INTEGER, out_channels=[3],
            group_size=INTEGER, part_size=INTEGER[1:], sample_per_part=INTEGER,
            trans_std=FACTOR, spatial_scale=SCALE, offset=present([*ARRAY, zeros(2, 2, 2, 2)]),
        ),
    ),
    *layers(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "good"), [pytest.param(call, good, id=name) for name, call, good, _ in FUNCTIONS]
)
def test_good_arguments(call, good):
    jax.eval_shape(lambda: call(**good))


BAD = [
    pytest.param(call, good, argument, values, id=f"{name}-{argument}")
    for name, call, good, kinds in FUNCTIONS
    for argument, values in kinds.items()
]


@pytest.mark.parametrize(("call", "good", "argument", "values"), BAD)
def test_bad_arguments(call, good, argument, values):
    for value in values:
        with pytest.raises((TypeError, ValueError), match=rf"`{argument}\b"):
            call(**good | {argument: value})
            pytest.fail(f"{argument}={value!r} was taken")


def test_where_there_is_no_native_code(monkeypatch):
    monkeypatch.setattr(dispatch, "available_platforms", lambda: ())
    with pytest.raises(RuntimeError, match="no native pooling of boxes .*`effjax doctor`"):
        effjax.roi_align(**GOOD, implementation="native")
    assert effjax.roi_align(**GOOD).shape == (2, 3, 2, 2, 8)


def test_what_has_a_gradient_only_says_so():
    def loss(x, **options):
        return jnp.sum(effjax.roi_align(**GOOD | dict(x=x), **options) ** 2)

    for options in ({}, dict(implementation="xla"), dict(sampling_ratio=2)):
        run = functools.partial(loss, **options)
        for derivative in (
            lambda x: jax.jvp(run, (x,), (x,)),  # noqa: B023
            jax.grad(lambda x: jnp.sum(jax.grad(run)(x))),  # noqa: B023
        ):
            with pytest.raises(NotImplementedError, match="`sampling_ratio` above 0"):
                derivative(X["x"])
    jax.jvp(functools.partial(loss, implementation="xla", sampling_ratio=2), (X["x"],), (X["x"],))
