"""Argument validation: accepted values and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.ops._common.arguments import (
    as_array,
    as_dtype,
    as_float_array,
    as_integer,
    as_key,
    as_mask,
    as_number,
    as_padding,
    as_pair,
    as_precision,
    as_real_array,
    check_choice,
    check_size,
    conv_output_size,
    describe,
    resolve_padding,
)

X, KEY = np.ones((2, 3), np.float32), jax.random.key(0)


def positive(name, value):
    return as_number(name, value, lambda v: v > 0, "positive")


@pytest.mark.parametrize("value", [X, jnp.asarray(X), X[0, 0], jnp.float32(1)])
@pytest.mark.parametrize("function", [as_array, as_real_array, as_float_array])
def test_arrays(function, value):
    a = function("x", value)
    assert isinstance(a, jax.Array)
    assert (a.shape, a.dtype) == (value.shape, value.dtype)


def test_array_kind():
    assert as_array("x", np.arange(3), jnp.integer).dtype == jnp.int32
    assert as_real_array("x", np.arange(3)).dtype == jnp.int32
    assert as_float_array("x", jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_object_with_jax_array_method():
    class Parameter:
        def __jax_array__(self):
            return jnp.ones(3)

    assert as_array("x", Parameter()).shape == (3,)


def test_mask_broadcasts():
    mask = as_mask("mask", np.array([True, False, True]), "x", (2, 3))
    assert mask.shape == (1, 3)
    assert as_mask("mask", np.bool_(True), "x", (2, 3)).shape == (1, 1)


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)], ids=lambda v: describe(v)
)
def test_integers(value):
    number = as_integer("n", value, 3)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), jnp.int32(2)])
def test_numbers(value):
    number = positive("rate", value)
    assert type(number) is float
    assert number == 2.0


@pytest.mark.parametrize("value", [2, np.int32(2), (2, 2), [2, np.int64(2)], np.array([2, 2])])
def test_pairs(value):
    assert as_pair("strides", value, 1) == (2, 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("same", "SAME"),
        ("VALID", "VALID"),
        (1, ((1, 1), (1, 1))),
        (np.int64(1), ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        ([(1, 2), [3, 4]], ((1, 2), (3, 4))),
        (np.array([[1, 2], [3, 4]]), ((1, 2), (3, 4))),
    ],
)
def test_padding(value, expected):
    assert as_padding(value) == expected


def test_resolve_padding():
    assert resolve_padding("VALID", (8, 8), (3, 3), (1, 1), (1, 1)) == ((0, 0), (0, 0))
    assert resolve_padding("SAME", (8, 8), (3, 5), (1, 2), (2, 1)) == ((2, 2), (1, 2))
    assert resolve_padding(((1, 2), (3, 4)), (8, 8), (3, 3), (1, 1), (1, 1)) == ((1, 2), (3, 4))


@pytest.mark.parametrize("value", ["bfloat16", np.float32, jnp.float16, np.dtype("float32"), float])
def test_dtypes(value):
    assert as_dtype("dtype", value) == jnp.dtype(value)


def test_precision():
    assert as_precision("highest") == "highest"
    assert as_precision(["high", "default"]) == ("high", "default")


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("traced", [False, True])
def test_keys(make, traced):
    key = jax.jit(check_key)(make(0)) if traced else check_key(make(0))
    assert key.dtype == make(0).dtype


def test_raw_key_of_numpy():
    assert isinstance(as_key("key", np.array([0, 1], np.uint32)), jax.Array)


def test_choices():
    assert check_choice("activation", "relu", None, "relu") == "relu"
    assert check_choice("activation", None, None, "relu") is None


def check_key(value):
    return as_key("key", value)


# The operators' tests show the errors of arrays' shapes and dtypes.
ERRORS = {
    "`x` must be an array, not a list of 1": lambda: as_array("x", [1.0]),
    "`x` must be integer or floating point": lambda: as_real_array("x", np.ones(3, "c8")),
    "`mask` must be boolean": lambda: as_mask("mask", X, "x", (2, 3)),
    "random.key(0), not 0.": lambda: check_key(0),
    "random.key(0), not an array float32[2, 3].": lambda: check_key(X),
    "random.key(0), not an array key<fry>[2].": lambda: check_key(jax.random.split(KEY, 2)),
    "`n` must be an integer, not 1.0.": lambda: as_integer("n", 1.0, 1),
    "`n` must be an integer, not a traced array int32[].": lambda: jax.jit(
        lambda n: as_integer("n", n, 1)
    )(3),
    "`n` (=0) must be an integer of at least 1.": lambda: as_integer("n", 0, 1),
    "`rate` must be a number, not an array float32[2, 3].": lambda: positive("rate", X),
    "`rate` (=-1) must be positive.": lambda: positive("rate", -1),
    "`a` (='b') must be None or \"c\"; hint.": lambda: check_choice(
        "a", "b", None, "c", hint="; hint"
    ),
    "`dtype` (='int8') must be a floating-point dtype.": lambda: as_dtype("dtype", "int8"),
    "`dtype` (='auto') must be a floating-point dtype.": lambda: as_dtype("dtype", "auto"),
    "`strides` (=(1, 2, 3)) must be one or two integers": lambda: as_pair("strides", (1, 2, 3), 1),
    "`padding` (='FULL') must be": lambda: as_padding("full"),
    "`padding` (=(1, 2, 3)) must be one number": lambda: as_padding((1, 2, 3)),
    "The output would be empty, (1, 0)": lambda: conv_output_size(
        (5, 4), (3, 3), (1, 1), ((0, 0), (0, 0)), (2, 2)
    ),
    "`x` must have 1 to 2**31 - 1 pixels per image": lambda: check_size(
        "x", 2**31, "pixels per image"
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        ERRORS[text]()


def test_long_values_are_shortened():
    with pytest.raises(ValueError, match="stats") as error:
        check_choice("stats", np.ones(900), "auto")
    assert len(str(error.value)) < 200
    assert len(describe("x" * 900)) == 80
