"""Deformable convolution and its gradients in float64, from those of deformable attention."""

import numpy as np

from tests.ops.samplers.deform_attention.oracle import attention


def deform_conv(
    x, offset, kernel, mask=None, bias=None, dy=None, *, strides=(1, 1), padding=((0, 0), (0, 0)),
    dilation=(1, 1), groups=1, offset_groups=1,
):  # fmt: skip
    """Return y; with dy also the gradients of x, offset, kernel, mask and bias."""
    x, offset, kernel = (np.asarray(a, np.float64) for a in (x, offset, kernel))
    n, ho, wo, _ = offset.shape
    h, w, c = x.shape[1:]
    kh, kw, cg, o = kernel.shape
    taps = kh * kw
    at = n, ho, wo, offset_groups, taps
    k = np.arange(taps)
    rows = np.arange(ho)[:, None, None, None] * strides[0] - padding[0][0] + k // kw * dilation[0]
    columns = np.arange(wo)[:, None, None] * strides[1] - padding[1][0] + k % kw * dilation[1]
    offset_xy = offset.reshape(*at, 2)[..., ::-1]
    locations = offset_xy + np.stack(np.broadcast_arrays(columns, rows), -1)
    weights = np.ones(at) if mask is None else np.asarray(mask, np.float64).reshape(at)

    # A sample of each tap and group of channels is the result of a query and a head.
    def by_tap(a):
        return np.moveaxis(a, 4, 3).reshape(n, ho * wo * taps, offset_groups, 1, 1, *a.shape[5:])

    def by_group(a, shape):
        split = a.reshape(n, ho, wo, taps, offset_groups, *a.shape[5:])
        return np.moveaxis(split, 4, 3).reshape(shape)

    value = x.reshape(n, h * w, offset_groups, c // offset_groups)
    args = value, [(h, w)], by_tap(locations), by_tap(weights)
    kernels = kernel.reshape(taps, cg, groups, o // groups)
    sampled = attention(*args, normalized=False).reshape(n, ho, wo, taps, groups, cg)
    out = np.einsum("npqkgc,kcgo->npqgo", sampled, kernels).reshape(n, ho, wo, o)
    out = out if bias is None else out + bias
    if dy is None:
        return out
    dy = np.asarray(dy, np.float64).reshape(n, ho, wo, groups, o // groups)
    dkernel = np.einsum("npqkgc,npqgo->kcgo", sampled, dy).reshape(kernel.shape)
    dsampled = np.einsum("npqgo,kcgo->npqkgc", dy, kernels)
    _, (dx, dlocations, dweights) = attention(*args, dsampled, normalized=False)
    gradients = dx.reshape(x.shape), by_group(dlocations[..., ::-1], offset.shape), dkernel
    gradients += () if mask is None else (by_group(dweights, np.shape(mask)),)
    gradients += () if bias is None else (dy.sum((0, 1, 2)).reshape(o),)
    return out, gradients
