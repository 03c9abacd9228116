"""Deformable attention and its gradients in float64, as loops over samples."""

import itertools
import math

import numpy as np


def attention(value, shapes, locations, weights, dy=None, *, normalized=True):
    """Return y [N, Q, M * D]; with dy also the gradients of value, locations and weights."""
    value, locations, weights = (np.asarray(a, np.float64) for a in (value, locations, weights))
    n, _, heads, depth = value.shape
    queries = locations.shape[1]
    starts = np.cumsum([0, *(h * w for h, w in shapes)])
    y = np.zeros((n, queries, heads, depth))
    dvalue, dlocations, dweights = (np.zeros_like(a) for a in (value, locations, weights))
    if dy is not None:
        dy = np.asarray(dy, np.float64).reshape(y.shape)
    for at in itertools.product(*map(range, weights.shape)):
        b, q, m, level, _ = at
        h, w = shapes[level]
        size = np.array([w, h]) if normalized else np.ones(2)
        px, py = locations[at] * size - 0.5 if normalized else locations[at]
        if not (-1 < py < h and -1 < px < w):
            continue
        fy, fx = py - math.floor(py), px - math.floor(px)
        for cy, cx in itertools.product((0, 1), (0, 1)):
            i, j = math.floor(py) + cy, math.floor(px) + cx
            if not (0 <= i < h and 0 <= j < w):
                continue
            wy, wx = (fy if cy else 1 - fy), (fx if cx else 1 - fx)
            pixel = b, starts[level] + i * w + j, m
            y[b, q, m] += weights[at] * wy * wx * value[pixel]
            if dy is None:
                continue
            d = dy[b, q, m]
            dvalue[pixel] += weights[at] * wy * wx * d
            dot = d @ value[pixel]
            dweights[at] += wy * wx * dot
            signs = np.array([(2 * cx - 1) * wy, (2 * cy - 1) * wx])
            dlocations[at] += weights[at] * dot * signs * size
    y = y.reshape(n, queries, heads * depth)
    return y if dy is None else (y, (dvalue, dlocations, dweights))


def dcn(
    x, offset, mask, dy=None, *, kernel=(3, 3), strides=(1, 1), padding=((0, 0), (0, 0)),
    dilation=(1, 1), scale=1.0, remove_center=False,
):  # fmt: skip
    """Return DCNv3's aggregation; with dy also its gradients. Taps are ordered by columns."""
    n, ho, wo, _ = offset.shape
    h, w, c = x.shape[1:]
    taps = [(j, i) for j in range(kernel[1]) for i in range(kernel[0])]
    if remove_center:
        taps.remove((kernel[1] // 2, kernel[0] // 2))
    groups = mask.shape[-1] // len(taps)
    middle = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    rows, columns = (
        np.arange(size) * strides[axis] - padding[axis][0] + middle[axis]
        for axis, size in enumerate((ho, wo))
    )
    centers = np.stack(np.meshgrid(columns, rows), -1)[:, :, None, None]
    steps = np.array(taps) * dilation[::-1] - middle[::-1]
    offsets = np.asarray(offset, np.float64).reshape(n, ho, wo, groups, len(taps), 2)
    locations = centers + scale * (steps + offsets)
    args = (
        np.asarray(x).reshape(n, h * w, groups, c // groups), [(h, w)],
        locations.reshape(n, ho * wo, groups, 1, len(taps), 2),
        np.asarray(mask).reshape(n, ho * wo, groups, 1, len(taps)),
    )  # fmt: skip
    result = attention(*args, dy, normalized=False)
    if dy is None:
        return result.reshape(n, ho, wo, c)
    y, (dvalue, dlocations, dweights) = result
    dx, doffset = dvalue.reshape(x.shape), scale * dlocations.reshape(offset.shape)
    return y.reshape(n, ho, wo, c), (dx, doffset, dweights.reshape(mask.shape))
