"""The door of all that attends: what an argument cannot be is refused, by the argument's name."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from tests.test_door_of_deform_conv import (
    ARRAY,
    INTEGER,
    NAME,
    PAIR,
    arrays_of,
    zeros,
)

SHAPES = ((2, 3), (1, 1))
ATTENTION = dict(
    value=zeros(2, 7, 3, 4), spatial_shapes=SHAPES, sampling_locations=zeros(2, 5, 3, 2, 4, 2),
    attention_weights=zeros(2, 5, 3, 2, 4),
)  # fmt: skip
WINDOW = dict(x=zeros(2, 5, 4, 6), offset=zeros(2, 3, 2, 36), mask=zeros(2, 3, 2, 18))
SEQUENCES = dict(
    query=zeros(2, 5, 12), reference_points=zeros(2, 5, 2, 2), value=zeros(2, 7, 12),
    spatial_shapes=SHAPES, padding_mask=np.zeros((2, 7), bool),
)  # fmt: skip
LEVELS = [None, 1, "a", (), (7,), ((2, 3),), ((2, 3.0), (1, 1)), ((7, 0), (7, 1)), ("ab", "cd")]
NUMBER = [None, "a", [1.0], np.nan, np.inf]
MASK = [1.0, "a", zeros(2, 7), np.zeros((2, 3), bool), [True]]


def in_nnx(name, inputs, **given):
    """A layer, and its call with those of the arguments that are its inputs."""
    options = {"rngs": nnx.Rngs(0)} | {k: v for k, v in given.items() if k not in inputs}
    return getattr(effjax.nnx, name)(**options)(*(given[k] for k in inputs))


def in_linen(name, inputs, **given):
    options = {k: v for k, v in given.items() if k not in inputs}
    layer = getattr(effjax.linen, name)(**options)
    return layer.init(jax.random.key(0), *(given[k] for k in inputs))


SIZES = dict(features=12, num_levels=2, num_heads=3, num_points=4)
OF_ATTENTION = dict(
    query=[zeros(2, 5, 11)], value=[zeros(2, 6, 12)], spatial_shapes=LEVELS,
    reference_points=[*ARRAY, zeros(2, 5, 2, 3)], padding_mask=MASK,
)  # fmt: skip
OF_DCNV3 = dict(implementation=NAME, offset_scale=NUMBER)
DCNV3 = dict(x=zeros(1, 5, 5, 4), features=4)


def operator(name, **given):
    return getattr(effjax, name)(**given)


def layers():
    for name, good, kinds in (
        ("MSDeformAttn", SIZES | SEQUENCES, OF_ATTENTION), ("DCNv3", DCNV3, OF_DCNV3)
    ):  # fmt: skip
        inputs = tuple(SEQUENCES) if name == "MSDeformAttn" else ("x",)
        of_nnx = functools.partial(in_nnx, name, inputs)
        yield f"nnx.{name}", of_nnx, good, kinds
        yield f"linen.{name}", functools.partial(in_linen, name, inputs), good, kinds


FUNCTIONS = [
    (
        "ms_deform_attn", functools.partial(operator, "ms_deform_attn"), ATTENTION,
        arrays_of(ATTENTION, "value", "sampling_locations", "attention_weights")
        | dict(spatial_shapes=LEVELS, implementation=NAME, workspace_bytes=INTEGER),
    ),
    (
        "dcn_aggregate", functools.partial(operator, "dcn_aggregate"), WINDOW,
        arrays_of(WINDOW, "x", "offset", "mask")
        | dict(
            kernel_size=PAIR, strides=PAIR, padding=PAIR, kernel_dilation=PAIR,
            offset_scale=NUMBER, offset_groups=INTEGER[1:],
            implementation=NAME, workspace_bytes=INTEGER,
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
            jax.eval_shape(lambda value=value: call(**good | {argument: value}))
            pytest.fail(f"{argument}={value!r} was taken")
