"""Deformable convolution and its gradients in float64, as loops over taps."""

import itertools
import math

import numpy as np


def deform_conv(
    x, offset, kernel, mask=None, bias=None, dy=None, *, strides=(1, 1), padding=((0, 0), (0, 0)),
    dilation=(1, 1), groups=1, offset_groups=1,
):  # fmt: skip
    """Return y; with dy also the gradients of x, offset, kernel, mask and bias."""
    x, offset, kernel = (np.asarray(a, np.float64) for a in (x, offset, kernel))
    n, ho, wo, _ = offset.shape
    h, w, c = x.shape[1:]
    kh, kw, cg, o = kernel.shape
    taps, og, width = kh * kw, o // groups, c // offset_groups
    offset = offset.reshape(n, ho, wo, offset_groups, taps, 2)
    m = np.ones(offset.shape[:-1]) if mask is None else np.asarray(mask, np.float64)
    m = m.reshape(offset.shape[:-1])
    columns = np.zeros((n, ho, wo, taps, c))
    samples = []
    for b, p, q, g, k in itertools.product(*map(range, offset.shape[:-1])):
        y = p * strides[0] - padding[0][0] + (k // kw) * dilation[0] + offset[b, p, q, g, k, 0]
        z = q * strides[1] - padding[1][0] + (k % kw) * dilation[1] + offset[b, p, q, g, k, 1]
        if not (-1 < y < h and -1 < z < w):
            continue
        channels = slice(g * width, (g + 1) * width)
        corners = []
        for cy, cz in itertools.product((0, 1), (0, 1)):
            at = math.floor(y) + cy, math.floor(z) + cz
            if 0 <= at[0] < h and 0 <= at[1] < w:
                fy, fz = y - math.floor(y), z - math.floor(z)
                wy, wz = (fy if cy else 1 - fy), (fz if cz else 1 - fz)
                corners.append((at, wy, wz, 2 * cy - 1, 2 * cz - 1))
        value = sum(wy * wz * x[b, i, j, channels] for (i, j), wy, wz, _, _ in corners)
        columns[b, p, q, k, channels] = m[b, p, q, g, k] * value
        samples.append(((b, p, q, g, k), channels, value, corners))
    kernels = kernel.reshape(taps, cg, groups, og)
    grouped = columns.reshape(n, ho, wo, taps, groups, cg)
    out = np.einsum("npqkgc,kcgo->npqgo", grouped, kernels).reshape(n, ho, wo, o)
    out = out if bias is None else out + bias
    if dy is None:
        return out
    dy_groups = np.asarray(dy, np.float64).reshape(n, ho, wo, groups, og)
    dkernel = np.einsum("npqkgc,npqgo->kcgo", grouped, dy_groups).reshape(kernel.shape)
    dcolumns = np.einsum("npqgo,kcgo->npqkgc", dy_groups, kernels).reshape(columns.shape)
    dx, doffset, dmask = np.zeros_like(x), np.zeros_like(offset), np.zeros_like(m)
    for (b, p, q, g, k), channels, value, corners in samples:
        d = dcolumns[b, p, q, k, channels]
        dmask[b, p, q, g, k] = d @ value
        d = d * m[b, p, q, g, k]
        for (i, j), wy, wz, sy, sz in corners:
            dx[b, i, j, channels] += wy * wz * d
            doffset[b, p, q, g, k] += d @ x[b, i, j, channels] * np.array([sy * wz, sz * wy])
    doffset, dmask = (
        doffset.reshape(n, ho, wo, offset_groups * taps * 2),
        dmask.reshape(n, ho, wo, offset_groups * taps),
    )
    gradients = dx, doffset, dkernel
    gradients += () if mask is None else (dmask,)
    gradients += () if bias is None else (np.asarray(dy, np.float64).sum((0, 1, 2)),)
    return out, gradients
