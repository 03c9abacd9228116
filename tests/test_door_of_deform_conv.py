"""The door of all that deforms: what an argument cannot be is refused, by the argument's name."""

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


def zeros(*shape):
    return np.zeros(shape, np.float32)


ARRAYS = dict(
    x=zeros(2, 5, 4, 4), offset=zeros(2, 5, 4, 36), kernel=zeros(3, 3, 2, 6),
    mask=zeros(2, 5, 4, 18), bias=zeros(6),
)  # fmt: skip
NCHW = dict(
    input=zeros(2, 4, 5, 4), offset=zeros(2, 36, 5, 4), mask=zeros(2, 18, 5, 4),
    weight=zeros(6, 2, 3, 3), bias=zeros(6),
)  # fmt: skip
WEIGHTS = {"weight": zeros(6, 2, 3, 3), "moves.weight": zeros(36, 4, 3, 3)}

OPERATOR = ARRAYS | dict(feature_group_count=2, padding=1)
LAYER = dict(kernel_size=3, padding=1, feature_group_count=2, offset_groups=2)


def operator(**given):
    return effjax.deform_conv2d(**given)


def in_pytorch(name, **given):
    known = getattr(compat, name)
    return known(**given)


def in_nnx(name, inputs, **given):
    """A layer, and its call with those of the arguments that are its inputs."""
    options = {"rngs": nnx.Rngs(0)} | {k: v for k, v in given.items() if k not in inputs}
    return getattr(effjax.nnx, name)(**options)(*(given[k] for k in inputs))


def in_linen(name, inputs, **given):
    options = {k: v for k, v in given.items() if k not in inputs}
    layer = getattr(effjax.linen, name)(**options)
    return layer.init(jax.random.key(0), *(given[k] for k in inputs))


# What each kind of argument cannot be. An array's own values of the wrong dtype come on top.
ARRAY = [None, [1.0], 1.0, "a", np.array("a"), np.array([None]), zeros(2, 3, 1)]
INTEGER = [None, 1.5, 1.0, "a", [1], 0, True, zeros(2)]
NUMBER = ["a", [1.0], -1.0]
PAIR = [None, 1.5, "a", (1, 1, 1), (1.0, 2), -1, True, 2**40]
FLAG = [None, 1, "a"]
NAME = ["a", 1, ["xla"]]
PRECISION = ["a", 1.5, {}, [1, 2, 3]]
DTYPE = ["int7", 3, "int32", jnp.complex64, [jnp.float32]]
FUNCTION = [None, 1, "zeros"]
INTEGERS = [None, 1, "a", (1.5,), ("a",), [None]]

OPTIONS: dict[str, list[Any]] = dict(
    strides=PAIR, padding=PAIR, kernel_dilation=PAIR, feature_group_count=INTEGER,
    precision=PRECISION, implementation=NAME,
)  # fmt: skip
GEOMETRY = dict(stride=PAIR, padding=PAIR, dilation=PAIR)


def arrays_of(good, *names):
    wrong = {name: [good[name].astype(t) for t in (int, complex, bool)] for name in names}
    return {name: ARRAY + wrong[name] for name in names}


def optional(kinds):
    return {
        name: [value for value in values if value is not None] for name, values in kinds.items()
    }


X = [*ARRAY, ARRAYS["x"].astype(complex), ARRAYS["x"].astype(bool)]  # integers are promoted


def layers():
    """Yield every layer of both flavors: (name, call, good arguments, kinds of bad ones)."""
    inputs = ("x", "offset", "mask")
    good = {k: ARRAYS[k] for k in inputs} | LAYER | dict(modulated=True)
    kinds = dict(kernel_size=PAIR, strides=PAIR, padding=PAIR, kernel_dilation=PAIR)
    kinds |= arrays_of(ARRAYS, "offset", "mask")
    of_nnx = dict(in_features=4, out_features=6)
    in_nnx_ = functools.partial(in_nnx, "DeformConv", inputs)
    yield "nnx.DeformConv", in_nnx_, good | of_nnx, kinds
    in_linen_ = functools.partial(in_linen, "DeformConv", inputs)
    yield "linen.DeformConv", in_linen_, good | dict(features=6), kinds


FUNCTIONS = [
    (
        "deform_conv2d", operator, OPERATOR,
        OPTIONS | arrays_of(ARRAYS, "x", "offset", "kernel")
        | optional(arrays_of(ARRAYS, "mask", "bias"))
        | dict(
            feature_group_count=INTEGER, offset_groups=INTEGER[1:], workspace_bytes=INTEGER,
        ),
    ),
    (
        "compat.deform_conv2d", functools.partial(in_pytorch, "deform_conv2d"),
        NCHW | dict(padding=1),
        GEOMETRY | arrays_of(NCHW, "input", "offset", "weight")
        | optional(arrays_of(NCHW, "bias", "mask")),
    ),
    (
        "compat.deform_conv", functools.partial(in_pytorch, "deform_conv"),
        {k: NCHW[k] for k in ("input", "offset", "weight")}
        | dict(padding=1, groups=2, deformable_groups=2),
        GEOMETRY | arrays_of(NCHW, "input", "offset", "weight")
        ,
    ),
    (
        "compat.modulated_deform_conv", functools.partial(in_pytorch, "modulated_deform_conv"),
        NCHW | dict(padding=1, groups=2, deformable_groups=2),
        GEOMETRY | arrays_of(NCHW, "input", "offset", "weight")
        | optional(arrays_of(NCHW, "bias", "mask")),
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
