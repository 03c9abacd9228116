"""Comparison of deformable attention and DCNv3 with PyTorch's `grid_sample`."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch", reason="requires PyTorch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import effjax.nnx  # noqa: E402
from effjax import convert  # noqa: E402
from effjax.convert.tables import SAME_NAMES  # noqa: E402

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = (5, 4), (3, 2), (1, 1)


def sampled(value, shapes, locations, weights):
    """Return [N, Q, M * D], each level by grid_sample with heads as images."""
    n, _, heads, depth = value.shape
    total = 0
    for level, part in enumerate(value.split([h * w for h, w in shapes], 1)):
        images = part.permute(0, 2, 3, 1).reshape(n * heads, depth, *shapes[level])
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        samples = F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)
        factors = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)
        total = total + (samples * factors[:, None]).sum(-1)  # [N * M, D, Q]
    queries = locations.shape[1]
    return total.reshape(n, heads * depth, queries).transpose(1, 2)


class Attention(nn.Module):
    """Copy of Deformable DETR's module."""

    def __init__(self, width, levels, heads, points):
        super().__init__()
        samples = heads * levels * points
        self.sizes = heads, levels, points
        self.sampling_offsets = nn.Linear(width, samples * 2)
        self.attention_weights = nn.Linear(width, samples)
        self.value_proj, self.output_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, query, reference, value, shapes, padding):
        n, queries, width = query.shape
        heads, levels, points = self.sizes
        value = self.value_proj(value).masked_fill(padding[..., None], 0.0)
        offsets = self.sampling_offsets(query).view(n, queries, heads, levels, points, 2)
        weights = self.attention_weights(query).view(n, queries, heads, levels * points)
        own = reference[:, :, None, :, None]
        if reference.shape[-1] == 2:
            sizes = torch.tensor([(w, h) for h, w in shapes], dtype=query.dtype)
            locations = own + offsets / sizes[:, None]
        else:
            locations = own[..., :2] + offsets / points * own[..., 2:] * 0.5
        weights = weights.softmax(-1).view(offsets.shape[:-1])
        value = value.view(n, value.shape[1], heads, width // heads)
        return self.output_proj(sampled(value, shapes, locations, weights))


class DCNv3(nn.Module):
    """Copy of InternImage's module, for convolutions that keep the size."""

    def __init__(self, width, groups, dilation=1, scale=1.0, remove_center=False):
        super().__init__()
        self.options = groups, dilation, scale, remove_center
        points = groups * (9 - remove_center)
        norm = nn.Sequential(nn.Identity(), nn.LayerNorm(width, eps=1e-6))
        self.dw_conv = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width), norm, nn.GELU()
        )
        self.offset, self.mask = nn.Linear(width, points * 2), nn.Linear(width, points)
        self.input_proj, self.output_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.center_feature_scale_proj_weight = nn.Parameter(torch.randn(groups, width))
        self.center_feature_scale_proj_bias = nn.Parameter(torch.randn(groups))

    def forward(self, x):
        n, h, w, width = x.shape
        groups, dilation, scale, remove_center = self.options
        projected = self.input_proj(x)
        conv, norm, act = self.dw_conv
        z = act(norm(conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        mask = self.mask(z).view(n, h * w, groups, 1, -1).softmax(-1)
        offset = self.offset(z).view(n, h * w, groups, 1, -1, 2)
        steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j or not remove_center]
        steps = dilation * torch.tensor(steps, dtype=x.dtype)  # x first
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        centers = torch.stack([columns, rows], -1).reshape(1, h * w, 1, 1, 1, 2)
        pixels = centers + scale * (steps + offset)
        locations = (pixels + 0.5) / torch.tensor([w, h])
        value = projected.reshape(n, h * w, groups, width // groups)
        y = sampled(value, [(h, w)], locations, mask).reshape(x.shape)
        gate = F.linear(
            z, self.center_feature_scale_proj_weight, self.center_feature_scale_proj_bias
        )
        gate = gate.sigmoid().repeat_interleave(width // groups, -1)
        return self.output_proj(y * (1 - gate) + projected * gate)


def check_against(theirs, args, ours, table=SAME_NAMES):
    """Compare results and gradients of the parameters and the first argument."""
    torch.manual_seed(0)
    theirs = theirs.double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    leaf, *others = (a.double() if a.is_floating_point() else a for a in args)
    leaf.requires_grad_()
    y = theirs(leaf, *others[:2], SHAPES, *others[2:]) if others else theirs(leaf)
    dy = torch.randn_like(y)
    y.backward(dy)
    state = {name: a.detach().numpy() for name, a in theirs.state_dict().items()}
    convert.from_torch(state, ours, table)
    first, *others = (jnp.asarray(a.detach().numpy()) for a in (leaf, *others))

    def loss(module, first):
        out = module(first, *others[:2], SHAPES, *others[2:]) if others else module(first)
        return jnp.sum(out * dy.numpy()), out

    (_, out), (gradients, dfirst) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        ours, first
    )
    want = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    want |= {"y": y.detach().numpy(), "first": leaf.grad.numpy()}
    got = convert.to_torch(gradients, table) | {"y": out, "first": dfirst}
    assert got.keys() == want.keys()
    for name, a in want.items():
        np.testing.assert_allclose(got[name], a, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("boxes", [False, True])
def test_attention(boxes):
    torch.manual_seed(1)
    pixels = sum(h * w for h, w in SHAPES)
    reference = torch.rand(2, 5, 3, 4 if boxes else 2)
    args = torch.randn(2, 5, 12), reference, torch.randn(2, pixels, 12), torch.rand(2, pixels) < 0.3
    ours = effjax.nnx.MSDeformAttn(12, 3, 3, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    check_against(Attention(12, 3, 3, 2), args, ours)


@pytest.mark.parametrize(("dilation", "scale", "remove_center"), [(1, 1.0, False), (2, 1.5, True)])
def test_dcnv3(dilation, scale, remove_center):
    torch.manual_seed(1)
    theirs = DCNv3(8, 2, dilation, scale, remove_center)
    ours = effjax.nnx.DCNv3(
        8, offset_groups=2, center_feature_scale=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0),
        kernel_dilation=dilation, offset_scale=scale, remove_center=remove_center,
    )  # fmt: skip
    check_against(theirs, (torch.randn(2, 5, 6, 8),), ours, convert.DCNV3)
