"""Pooling of boxes and its gradients in float64, as loops over samples."""

import itertools
import math

import numpy as np


def roi_align(
    x, boxes, offset=None, dy=None, *, output_size, spatial_scale=1.0, sampling_ratio=0,
    aligned=True, gamma=0.1,
):  # fmt: skip
    """Return y; with dy also the gradients of x and offset. Boxes are [N, R, 4]."""
    pool = _Pool(x, boxes, output_size, 1, dy)
    for n, r in np.ndindex(boxes.shape[:2]):
        x1, y1, x2, y2 = np.asarray(boxes[n, r], np.float64) * spatial_scale - 0.5 * aligned
        if not np.isfinite([x1, y1, x2, y2]).all():
            continue
        h, w = y2 - y1, x2 - x1
        if not aligned:
            h, w = max(h, 1.0), max(w, 1.0)
        bh, bw = h / output_size[0], w / output_size[1]
        gh, gw = (sampling_ratio or math.ceil(b) for b in (bh, bw))
        for i, j in np.ndindex(*output_size):
            move, slope = np.zeros(2), None
            if offset is not None:
                slope = gamma * np.array([h, w])
                move = slope * np.asarray(offset[n, r, i, j], np.float64)[::-1]
            places = [
                (y1 + (i + (a + 0.5) / gh) * bh + move[0], x1 + (j + (b + 0.5) / gw) * bw + move[1])
                for a, b in itertools.product(range(gh), range(gw))
            ]  # fmt: skip
            channels = slice(0, x.shape[-1])
            pool.mean((n, r, i, j), places, channels, channels, 1.0, max(gh * gw, 1), slope)
    return pool.results(None if offset is None else pool.moves[..., ::-1])


def deform_psroi_pool(
    x, boxes, offset=None, dy=None, *, output_size, spatial_scale=1.0, group_size=1,
    part_size=None, sample_per_part=4, trans_std=0.0,
):  # fmt: skip
    rows, columns = output_size
    part_size = part_size or rows
    pool = _Pool(x, boxes, output_size, group_size**2, dy)
    groups = 1 if offset is None else offset.shape[-1] // 2
    doffset = None if offset is None else np.zeros(offset.shape)
    width = pool.y.shape[-1] // groups
    for n, r in np.ndindex(boxes.shape[:2]):
        box = np.asarray(boxes[n, r], np.float64)
        if not np.isfinite(box).all():
            continue
        x1, y1, x2, y2 = np.sign(box) * np.floor(np.abs(box) + 0.5)
        x1, y1 = x1 * spatial_scale - 0.5, y1 * spatial_scale - 0.5
        w = max((x2 + 1) * spatial_scale - 0.5 - x1, 0.1)
        h = max((y2 + 1) * spatial_scale - 0.5 - y1, 0.1)
        for i, j, g in np.ndindex(rows, columns, groups):
            part, move = (i * part_size // rows, j * part_size // columns), np.zeros(2)
            slope = trans_std * np.array([h, w])
            if offset is not None:
                at = slice(2 * g, 2 * g + 2)
                move = slope * np.asarray(offset[n, r, *part, at], np.float64)[::-1]
            places = [
                (y1 + i * h / rows + a * h / rows / sample_per_part + move[0],
                 x1 + j * w / columns + b * w / columns / sample_per_part + move[1])
                for a, b in itertools.product(range(sample_per_part), repeat=2)
            ]  # fmt: skip
            block = i * group_size // rows * group_size + j * group_size // columns
            to = slice(g * width, (g + 1) * width)
            of = slice(block * groups * width + to.start, block * groups * width + to.stop)
            pool.moves[...] = 0
            pool.mean((n, r, i, j), places, of, to, 0.5, None, slope)
            if offset is not None:
                doffset[n, r, *part, at] += pool.moves[n, r, i, j, ::-1]
    return pool.results(doffset)


class _Pool:
    def __init__(self, x, boxes, output_size, blocks, dy):
        self.x = np.asarray(x, np.float64)
        self.dy = None if dy is None else np.asarray(dy, np.float64)
        self.dx = np.zeros_like(self.x)
        self.y = np.zeros((*boxes.shape[:2], *output_size, x.shape[-1] // blocks))
        self.moves = np.zeros((*boxes.shape[:2], *output_size, 2))

    def mean(self, at, places, of, to, margin, count, slope):
        """Add the mean of the samples at `places` (y, x) of the channels `of` to the channels `to`.

        Without `count`, divide by the number of samples inside.
        """
        h, w = self.x.shape[1:3]
        inside = [
            (y, x) for y, x in places
            if -margin <= y <= h - 1 + margin and -margin <= x <= w - 1 + margin
        ]  # fmt: skip
        count = max(len(inside), 1) if count is None else count
        for y, x in inside:
            for (i, wy, sy), (j, wx, sx) in itertools.product(_two(y, h), _two(x, w)):
                self.y[*at, to] += wy * wx * self.x[at[0], i, j, of] / count
                if self.dy is None:
                    continue
                d = self.dy[*at, to] / count
                self.dx[at[0], i, j, of] += wy * wx * d
                if slope is not None:
                    self.moves[at] += slope * [sy * wx, wy * sx] * (d @ self.x[at[0], i, j, of])

    def results(self, doffset):
        if self.dy is None:
            return self.y
        return self.y, (self.dx,) if doffset is None else (self.dx, doffset)


def _two(at, size):
    """Return (pixel, weight, derivative of the weight) of the pixels of a sample on one axis."""
    if at < 0:
        return [(0, 1.0, 0.0)]
    if at >= size - 1:
        return [(size - 1, 1.0, 0.0)]
    low = math.floor(at)
    return [(low, 1 - (at - low), -1.0), (low + 1, at - low, 1.0)]
