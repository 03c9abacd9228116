"""Deformable convolution with PyTorch's signatures, against loops over PyTorch's layouts."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax.linen
import effjax.nnx
from effjax import compat

RNG = np.random.default_rng(0)
N, C, OUT, H, W, KH, KW, GROUPS, OFFSET_GROUPS = 2, 4, 6, 5, 6, 3, 2, 2, 2
K = KH * KW
STRIDE, PADDING, DILATION = (2, 1), (1, 0), (1, 2)
HO, WO = 3, 4


def normal(*shape, scale=1.0):
    return RNG.normal(0, scale, shape).astype(np.float32)


def torch_conv(x, weight, bias, stride, padding, dilation, groups=1, offset=None, mask=None):
    """Return a convolution in PyTorch's layouts, deformable if offset is passed."""
    n, c, h, w = x.shape
    o, cg, kh, kw = weight.shape
    ho = (h + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    wo = (w + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, o, ho, wo))
    for b, q, i, j, p, s in np.ndindex(n, o, ho, wo, kh, kw):
        for channel in range(cg):
            source = (q // (o // groups)) * cg + channel
            row, column, factor = (
                i * stride[0] - padding[0] + p * dilation[0],
                j * stride[1] - padding[1] + s * dilation[1],
                1.0,
            )
            if offset is not None:
                per_group = offset.shape[1] // (2 * kh * kw)
                tap = (source // (c // per_group)) * kh * kw + p * kw + s
                row, column = row + offset[b, 2 * tap, i, j], column + offset[b, 2 * tap + 1, i, j]
                factor = 1.0 if mask is None else mask[b, tap, i, j]
            y[b, q, i, j] += weight[q, channel, p, s] * factor * sample(x[b, source], row, column)
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)


def sample(image, row, column):
    top, left = math.floor(row), math.floor(column)
    value = 0.0
    for i, j in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= i < image.shape[0] and 0 <= j < image.shape[1]:
            value += (1 - abs(row - i)) * (1 - abs(column - j)) * image[i, j]
    return value


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_operators_in_pytorch_argument_order():
    x, weight, bias = normal(N, C, H, W), normal(OUT, C // GROUPS, KH, KW), normal(OUT)
    offset, mask = normal(N, OFFSET_GROUPS * K * 2, HO, WO), normal(N, OFFSET_GROUPS * K, HO, WO)
    geometry = (STRIDE, PADDING, DILATION)
    y = compat.modulated_deform_conv(
        x, offset, mask, weight, bias, *geometry, GROUPS, OFFSET_GROUPS
    )
    want = torch_conv(x, weight, bias, *geometry, GROUPS, offset, mask)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    y = compat.deform_conv(x, offset, weight, *geometry, GROUPS, OFFSET_GROUPS, 64)
    want = torch_conv(x, weight, None, *geometry, GROUPS, offset)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="`offset` .* must have four axes"):
        compat.deform_conv(x, offset[0], weight)


def torch_arguments():
    """Return arguments of torchvision's deform_conv2d, in its order."""
    x, weight, bias = normal(N, C, H, W), normal(OUT, C // GROUPS, KH, KW), normal(OUT)
    offset, mask = normal(N, OFFSET_GROUPS * K * 2, HO, WO), normal(N, OFFSET_GROUPS * K, HO, WO)
    return x, offset, weight, bias, STRIDE, PADDING, DILATION, mask


def test_signature_of_torchvision():
    parameters = inspect.signature(compat.deform_conv2d).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == dict(
        bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), mask=None
    )
    assert list(parameters) == [
        "input", "offset", "weight", "bias", "stride", "padding", "dilation", "mask"
    ]  # fmt: skip


def test_deform_conv2d():
    x, offset, weight, bias, *geometry, mask = torch_arguments()
    y = compat.deform_conv2d(x, offset, weight, bias, *geometry, mask)
    want = torch_conv(x, weight, bias, *geometry, GROUPS, offset, mask)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    whole, one_group = normal(OUT, C, KH, KW), offset[:, : 2 * K]
    y = compat.deform_conv2d(x, one_group, whole, None, *geometry)
    want = torch_conv(x, whole, None, *geometry, 1, one_group)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_gradients_of_deform_conv2d():
    x, offset, weight, bias, stride, padding, dilation, mask = torch_arguments()
    dy = normal(N, OUT, HO, WO)

    def theirs(x, offset, weight, bias, mask):
        return jnp.sum(
            dy * compat.deform_conv2d(x, offset, weight, bias, stride, padding, dilation, mask)
        )

    def ours(x, offset, weight, bias, mask):
        x, offset, mask = (a.transpose(0, 2, 3, 1) for a in (x, offset, mask))
        y = effjax.deform_conv2d(
            x, offset, weight.transpose(2, 3, 1, 0), mask, bias, strides=stride, padding=padding,
            kernel_dilation=dilation, feature_group_count=GROUPS, offset_groups=OFFSET_GROUPS,
            implementation="xla",
        )  # fmt: skip
        return jnp.sum(dy.transpose(0, 2, 3, 1) * y)

    got, want = (
        jax.jit(jax.grad(f, argnums=range(5)))(x, offset, weight, bias, mask)
        for f in (theirs, ours)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_forward_mode_empty_batch_and_non_finite_offsets():
    x, offset, weight, *_ = torch_arguments()
    run = lambda x, offset: compat.deform_conv2d(  # noqa: E731
        x, offset, weight, None, STRIDE, PADDING, DILATION
    )
    with pytest.raises(NotImplementedError, match=r"of effjax\.deform_conv2d\."):
        jax.jvp(lambda x: run(x, offset), (x,), (x,))
    bad = np.stack([np.full_like(offset[0], v) for v in (np.nan, 1e30)])
    y, backward = jax.vjp(run, x, bad)
    for a in (y, *backward(y + 1)):
        np.testing.assert_array_equal(a, np.zeros_like(a))
    assert run(x[:0], offset[:0]).shape == (0, OUT, HO, WO)


def test_deform_groups_of_mmcv():
    x, offset, weight, bias, *geometry, mask = torch_arguments()
    groups = dict(zip(("stride", "padding", "dilation"), geometry, strict=True), groups=GROUPS)
    for run, arrays in (
        (compat.deform_conv, (x, offset, weight)),
        (compat.modulated_deform_conv, (x, offset, mask, weight, bias)),
    ):
        shape = run(*arrays, **groups, deform_groups=2).shape
        assert shape == run(*arrays, **groups, deformable_groups=2).shape == (N, OUT, HO, WO)
        with pytest.raises(ValueError, match="two names of one number"):
            run(*arrays, **groups, deform_groups=2, deformable_groups=4)


def test_errors_name_the_transposed_arguments():
    x, offset, weight, *_ = torch_arguments()
    for bad in (offset.transpose(0, 2, 3, 1), offset[:, 1:]):
        with pytest.raises(ValueError, match="`kernel` is `weight` in HWIO"):
            compat.deform_conv2d(x, bad, weight)
