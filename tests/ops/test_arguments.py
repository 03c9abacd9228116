"""Argument validation: accepted values and the text of each error."""

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
    check_divides,
    check_shape,
    check_size,
    conv_output_size,
    describe,
    resolve_padding,
)

X = np.ones((2, 3), np.float32)


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
    check = lambda key: as_key("key", key)  # noqa: E731
    key = jax.jit(check)(make(0)) if traced else check(make(0))
    assert key.dtype == make(0).dtype


def test_raw_key_of_numpy():
    assert isinstance(as_key("key", np.array([0, 1], np.uint32)), jax.Array)


def test_choices():
    assert check_choice("activation", "relu", None, "relu") == "relu"
    assert check_choice("activation", None, None, "relu") is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: as_array("x", [1.0]),
            TypeError, "`x` must be an array, not a list of 1; see jnp.asarray.",
        ),
        (
            lambda: as_array("x", np.arange(3, dtype=np.int32)),
            TypeError, "`x` must be floating point, but its dtype is int32; cast it.",
        ),
        (
            lambda: as_real_array("x", np.ones(3, np.complex64)),
            TypeError, "`x` must be integer or floating point, but its dtype is complex64",
        ),
        (
            lambda: as_float_array("x", np.arange(3, dtype=np.int32)),
            TypeError, "`x` must be float32 or float64 or bfloat16 or float16, but its dtype",
        ),
        (
            lambda: as_mask("mask", X, "x", (2, 3)),
            TypeError,
            "`mask` must be boolean, but its dtype is float32; cast it.",
        ),
        (
            lambda: as_mask("mask", X[:, :2] > 0, "x", (2, 3)),
            ValueError, "`mask` of shape (2, 2) must broadcast to `x` of shape (2, 3).",
        ),
        (
            lambda: as_key("key", 0),
            TypeError, "`key` must be a single PRNG key such as jax.random.key(0), not 0.",
        ),
        (
            lambda: as_key("key", X),
            TypeError, "`key` must be a single PRNG key such as jax.random.key(0), not an array",
        ),
        (
            lambda: as_key("key", jax.random.split(jax.random.key(0), 2)),
            TypeError,
            "`key` must be a single PRNG key such as jax.random.key(0), not an array key<fry>[2].",
        ),
        (lambda: as_integer("n", 1.0, 1), TypeError, "`n` must be an integer, not 1.0."),
        (
            lambda: jax.jit(lambda n: as_integer("n", n, 1))(3),
            TypeError, "`n` must be an integer, not a traced array int32[].",
        ),
        (
            lambda: as_integer("n", 0, 1),
            ValueError, "`n` (=0) must be an integer of at least 1.",
        ),
        (
            lambda: positive("rate", X),
            TypeError, "`rate` must be a number, not an array float32[2, 3].",
        ),
        (lambda: positive("rate", "0.5"), TypeError, "`rate` must be a number, not '0.5'."),
        (lambda: positive("rate", -1), ValueError, "`rate` (=-1) must be positive."),
        (
            lambda: check_choice("activation", "gelu", None, "relu", hint="; apply others later"),
            ValueError, "`activation` (='gelu') must be None or \"relu\"; apply others later.",
        ),
        (
            lambda: as_dtype("dtype", None),
            ValueError, "`dtype` (=None) must be a floating-point dtype.",
        ),
        (
            lambda: as_dtype("dtype", "int8"),
            ValueError, "`dtype` (='int8') must be a floating-point dtype.",
        ),
        (
            lambda: as_pair("strides", (1, 2, 3), 1), ValueError,
            "`strides` (=(1, 2, 3)) must be one or two integers of at least 1 and below 2**31.",
        ),
        (
            lambda: as_pair("strides", 0, 1), ValueError,
            "`strides` (=0) must be one or two integers of at least 1 and below 2**31.",
        ),
        (
            lambda: as_padding("full"), ValueError,
            '`padding` (=\'FULL\') must be "SAME" or "SAME_LOWER" or "VALID" or numbers.',
        ),
        (
            lambda: as_padding((1, 2, 3)), ValueError,
            "`padding` (=(1, 2, 3)) must be one number, or an entry for each of the two spatial",
        ),
        (
            lambda: conv_output_size((5, 4), (3, 3), (1, 1), ((0, 0), (0, 0)), (2, 2)), ValueError,
            "The output would be empty, (1, 0): `x` of size (5, 4)",
        ),
        (
            lambda: check_shape("x", X, ("N", 4), "[N, C]"),
            ValueError, "`x` of shape (2, 3) must be (N, 4), [N, C].",
        ),
        (
            lambda: check_shape("x", X, "NHWC"),
            ValueError, "`x` of shape (2, 3) must be (N, H, W, C).",
        ),
        (
            lambda: check_size("x", 2**31, "pixels per image"),
            ValueError, "`x` must have 1 to 2**31 - 1 pixels per image, not 2147483648.",
        ),
        (
            lambda: check_divides("offset_groups", 4, 6, "channels of `x`"),
            ValueError, "`offset_groups` (=4) must divide the 6 channels of `x`.",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()


def test_long_values_are_shortened():
    with pytest.raises(ValueError, match=r"^`stats` \(=array") as error:
        check_choice("stats", np.ones(900), "auto")
    assert len(str(error.value)) < 200
    assert len(describe("x" * 900)) == 80
