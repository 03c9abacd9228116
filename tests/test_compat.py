"""PyTorch's layouts, against loops over PyTorch's layouts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax.linen
import effjax.nnx
from effjax import compat, convert

RNG = np.random.default_rng(0)
N, C, OUT, H, W, KH, KW, GROUPS, OFFSET_GROUPS = 2, 4, 6, 5, 6, 3, 2, 2, 2
K = KH * KW
STRIDE, PADDING, DILATION = (2, 1), (1, 0), (1, 2)
HO, WO = 3, 4


def normal(*shape, scale=1.0):
    return RNG.normal(0, scale, shape).astype(np.float32)


def torch_conv(x, weight, bias, stride, padding, dilation, groups=1, offset=None, mask=None):
    """Convolution in PyTorch's layouts by loops; deformable if there are offsets."""
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
    with pytest.raises(ValueError, match="`offset` must have four axes"):
        compat.deform_conv(x, offset[0], weight)


def pack_weights(offset_name, modulated, prefix="", bias=True):
    predicted = OFFSET_GROUPS * K * (3 if modulated else 2)
    weights = {
        f"{prefix}weight": normal(OUT, C // GROUPS, KH, KW),
        f"{offset_name}.weight": normal(predicted, C, KH, KW, scale=0.1),
        f"{offset_name}.bias": normal(predicted),
    }
    return weights | ({f"{prefix}bias": normal(OUT)} if bias else {})


def pack_output(x, weights, offset_name, modulated, prefix=""):
    """What the PyTorch layer computes."""
    kernel, bias = weights[f"{offset_name}.weight"], weights[f"{offset_name}.bias"]
    predicted = torch_conv(x, kernel, bias, STRIDE, PADDING, DILATION)
    split = OFFSET_GROUPS * K * 2
    return torch_conv(
        x, weights[f"{prefix}weight"], weights.get(f"{prefix}bias"), STRIDE, PADDING, DILATION,
        GROUPS, predicted[:, :split], sigmoid(predicted[:, split:]) if modulated else None,
    )  # fmt: skip


OPTIONS = dict(
    padding=tuple((p, p) for p in PADDING), kernel_dilation=DILATION,
    feature_group_count=GROUPS, offset_groups=OFFSET_GROUPS,
)  # fmt: skip


def nnx_output(x, params, modulated):
    cls = effjax.nnx.ModulatedDeformConvPack if modulated else effjax.nnx.DeformConvPack
    bias = "bias" in params
    layer = cls(C, OUT, (KH, KW), STRIDE, use_bias=bias, **OPTIONS, rngs=nnx.Rngs(0))
    nnx.update(layer, params)
    return layer(x)


def linen_output(x, params, modulated):
    cls = effjax.linen.ModulatedDeformConvPack if modulated else effjax.linen.DeformConvPack
    layer = cls(OUT, (KH, KW), STRIDE, use_bias="bias" in params, **OPTIONS)
    return layer.apply({"params": params}, x)


@pytest.mark.parametrize("output", [nnx_output, linen_output])
@pytest.mark.parametrize(
    ("offset_name", "modulated", "prefix"),
    [
        ("conv_offset", False, ""),  # mmcv and maskrcnn-benchmark, v1
        ("conv_offset", True, ""),  # mmcv, v2
        ("conv_offset_mask", True, ""),  # maskrcnn-benchmark, v2
        ("offset", True, "conv."),  # maskrcnn-benchmark's DFConv2d
    ],
)
def test_layers_of_pytorch(output, offset_name, modulated, prefix):
    x = normal(N, C, H, W)
    weights = pack_weights(offset_name, modulated, prefix)
    params = convert.convert_deform_conv(weights)
    got = output(jnp.asarray(x.transpose(0, 2, 3, 1)), params, modulated)
    want = pack_output(x, weights, offset_name, modulated, prefix)
    np.testing.assert_allclose(np.transpose(got, (0, 3, 1, 2)), want, rtol=1e-3, atol=1e-3)


def test_layers_with_names_of_ones_own():
    """torchvision's layer holds no offset convolution; its users write one or two."""
    x = normal(N, C, H, W)
    weights = pack_weights("where", True, "")
    split = OFFSET_GROUPS * K * 2
    apart = {name: value for name, value in weights.items() if not name.startswith("where")}
    for part, rows in (("moves", slice(None, split)), ("gates", slice(split, None))):
        apart |= {f"{part}.{name}": weights[f"where.{name}"][rows] for name in ("weight", "bias")}
    params = convert.convert_deform_conv(apart, offset="moves", mask="gates")
    together = convert.convert_deform_conv(weights, offset="where")
    jax.tree.map(np.testing.assert_array_equal, params, together)
    got = nnx_output(jnp.asarray(x.transpose(0, 2, 3, 1)), params, True)
    want = pack_output(x, weights, "where", True)
    np.testing.assert_allclose(np.transpose(got, (0, 3, 1, 2)), want, rtol=1e-3, atol=1e-3)


def test_layers_without_offsets_of_their_own():
    weights = {"weight": normal(OUT, C, 3, 3)}
    params = convert.convert_deform_conv(weights)
    assert list(params) == ["kernel"] and params["kernel"].shape == (3, 3, C, OUT)


@pytest.mark.parametrize(
    ("match", "weights", "names"),
    [
        ("has no `weight`", {"kernel": normal(1, 1, 3, 3)}, {}),
        ("must be OIHW", {"weight": normal(3, 3)}, {}),
        (r"has no `moves.weight`", {"weight": normal(1, 1, 3, 3)}, {"offset": "moves"}),
        (
            r"belong to no known layer: \['bn.weight'\]",
            {"weight": normal(1, 1, 3, 3), "bn.weight": normal(1)},
            {},
        ),
    ],
)
def test_weights_that_are_not_understood(match, weights, names):
    with pytest.raises(ValueError, match=match):
        convert.convert_deform_conv(weights, **names)
