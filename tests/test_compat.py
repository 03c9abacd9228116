"""Deformable convolution with PyTorch's signatures, against loops in float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import compat
from tests.ops.samplers.deform_conv import oracle

RNG = np.random.default_rng(0)
N, C, OUT, H, W, KH, KW, GROUPS, OFFSET_GROUPS = 2, 4, 6, 5, 6, 3, 2, 2, 2
K = KH * KW
GEOMETRY = STRIDE, PADDING, DILATION = (2, 1), (1, 0), (1, 2)
HO, WO = 3, 4


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X, WEIGHT, BIAS = normal(N, C, H, W), normal(OUT, C // GROUPS, KH, KW), normal(OUT)
OFFSET, MASK = normal(N, OFFSET_GROUPS * K * 2, HO, WO), normal(N, OFFSET_GROUPS * K, HO, WO)


def to_nhwc(a):
    return None if a is None else np.asarray(a).transpose(0, 2, 3, 1)


def to_nchw(a):
    return np.asarray(a).transpose(0, 3, 1, 2)


def run_oracle(x, offset, weight, mask=None, bias=None, dy=None, offset_groups=OFFSET_GROUPS):
    """Return y in PyTorch's layout; with dy also the gradients of the other arguments."""
    result = oracle.deform_conv(
        to_nhwc(x), to_nhwc(offset), weight.transpose(2, 3, 1, 0), to_nhwc(mask), bias,
        to_nhwc(dy), strides=STRIDE, padding=[(p, p) for p in PADDING], dilation=DILATION,
        groups=C // weight.shape[1], offset_groups=offset_groups,
    )  # fmt: skip
    if dy is None:
        return to_nchw(result)
    y, (dx, doffset, dkernel, dmask, dbias) = result
    dweight = dkernel.transpose(3, 2, 0, 1)
    return to_nchw(y), to_nchw(dx), to_nchw(doffset), dweight, to_nchw(dmask), dbias


def test_operators_in_pytorch_argument_order():
    y = compat.modulated_deform_conv(
        X, OFFSET, MASK, WEIGHT, BIAS, *GEOMETRY, GROUPS, OFFSET_GROUPS
    )
    want = run_oracle(X, OFFSET, WEIGHT, MASK, BIAS)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    y = compat.deform_conv(X, OFFSET, WEIGHT, *GEOMETRY, GROUPS, OFFSET_GROUPS, 64)
    np.testing.assert_allclose(y, run_oracle(X, OFFSET, WEIGHT), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="`offset` .* must have four axes"):
        compat.deform_conv(X, OFFSET[0], WEIGHT)


def test_signature_of_torchvision():
    parameters = inspect.signature(compat.deform_conv2d).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == dict(
        bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), mask=None
    )
    assert list(parameters) == [
        "input", "offset", "weight", "bias", "stride", "padding", "dilation", "mask"
    ]  # fmt: skip


def test_deform_conv2d_and_its_gradients():
    dy = normal(N, OUT, HO, WO)

    @jax.jit
    def run(x, offset, weight, mask, bias):
        operator = lambda x, offset, weight, mask, bias: compat.deform_conv2d(  # noqa: E731
            x, offset, weight, bias, *GEOMETRY, mask
        )
        y, backward = jax.vjp(operator, x, offset, weight, mask, bias)
        return y, *backward(dy)

    arguments = X, OFFSET, WEIGHT, MASK, BIAS
    for got, want in zip(run(*arguments), run_oracle(*arguments, dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    whole, one_group = normal(OUT, C, KH, KW), OFFSET[:, : 2 * K]
    y = compat.deform_conv2d(X, one_group, whole, None, *GEOMETRY)
    want = run_oracle(X, one_group, whole, offset_groups=1)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_forward_mode_empty_batch_and_non_finite_offsets():
    run = lambda x, offset: compat.deform_conv2d(x, offset, WEIGHT, None, *GEOMETRY)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"of effjax\.deform_conv2d\."):
        jax.jvp(lambda x: run(x, OFFSET), (X,), (X,))
    bad = np.stack([np.full_like(OFFSET[0], v) for v in (np.nan, 1e30)])

    @jax.jit
    def run_backward(x, offset):
        y, backward = jax.vjp(run, x, offset)
        return y, *backward(jnp.ones_like(y))

    for a in run_backward(X, bad):
        np.testing.assert_array_equal(a, np.zeros_like(a))
    assert run(X[:0], OFFSET[:0]).shape == (0, OUT, HO, WO)


def test_deform_groups_of_mmcv():
    groups = dict(zip(("stride", "padding", "dilation"), GEOMETRY, strict=True), groups=GROUPS)
    for run, arrays in (
        (compat.deform_conv, (X, OFFSET, WEIGHT)),
        (compat.modulated_deform_conv, (X, OFFSET, MASK, WEIGHT, BIAS)),
    ):
        for name in ("deform_groups", "deformable_groups"):
            y = jax.eval_shape(lambda run=run, a=arrays, n=name: run(*a, **groups, **{n: 2}))
            assert y.shape == (N, OUT, HO, WO)
        with pytest.raises(ValueError, match="two names of one number"):
            run(*arrays, **groups, deform_groups=2, deformable_groups=4)


def test_errors_name_the_transposed_arguments():
    for bad in (OFFSET.transpose(0, 2, 3, 1), OFFSET[:, 1:]):
        with pytest.raises(ValueError, match="`kernel` is `weight` in HWIO"):
            compat.deform_conv2d(X, bad, WEIGHT)
