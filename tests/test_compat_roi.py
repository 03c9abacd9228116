"""Boxes in PyTorch's layouts, against loops in float64; and what torchvision itself gave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import compat
from tests.ops.roi import oracle

RNG = np.random.default_rng(0)
INPUT = RNG.normal(size=(2, 4, 8, 9)).astype(np.float32)
NHWC = INPUT.transpose(0, 2, 3, 1)
ROIS = np.array([
    [1, 2.5, 3, 11, 12], [0, 0, 0, 17, 15], [1, -4, -3, 6, 5], [0, 8, 9, 8.5, 9.25], [1, 5, 5, 3, 9],
], np.float32)  # fmt: skip


def by_image(rois, **offset):
    """The definition's arguments for each box on its own: x, boxes and offset [1, 1, ...]."""
    for i, (n, *box) in enumerate(rois):
        more = {k: v[i][None, None] for k, v in offset.items()}
        yield {"x": NHWC[int(n)][None], "boxes": np.array(box)[None, None]} | more


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_roi_align(aligned, ratio):
    given = dict(spatial_scale=0.5, sampling_ratio=ratio, aligned=aligned)
    got = compat.roi_align(INPUT, ROIS, (2, 3), **given)
    options = given | dict(output_size=(2, 3), sampling_ratio=max(ratio, 0))
    want = [oracle.roi_align(**args, **options)[0, 0] for args in by_image(ROIS)]
    np.testing.assert_allclose(got.transpose(0, 2, 3, 1), want, atol=1e-5)

    ordered = ROIS[np.argsort(ROIS[:, 0], kind="stable")]
    listed = [ordered[ordered[:, 0] == n, 1:] for n in range(2)]
    np.testing.assert_allclose(
        compat.roi_align(INPUT, listed, (2, 3), **given),
        compat.roi_align(INPUT, ordered, (2, 3), **given), atol=1e-6,
    )  # fmt: skip


def test_gradients_of_both_forms_are_the_same():
    ordered = ROIS[np.argsort(ROIS[:, 0], kind="stable")]
    listed = [ordered[ordered[:, 0] == n, 1:] for n in range(2)]
    weights = RNG.normal(size=(5, 4, 2, 2)).astype(np.float32)
    one, other = (
        jax.grad(lambda x, b=b: jnp.sum(weights * compat.roi_align(x, b, 2, 0.5)))(INPUT)
        for b in (ordered, listed)
    )
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(one).max() > 0


def test_deform_roi_pool():
    offset = RNG.normal(size=(5, 2, 2, 3)).astype(np.float32)
    got = compat.deform_roi_pool(INPUT, ROIS, offset, (2, 3), 0.5, 2, 0.3)
    options = dict(output_size=(2, 3), spatial_scale=0.5, sampling_ratio=2, gamma=0.3)
    moved = by_image(ROIS, offset=offset.transpose(0, 2, 3, 1))
    want = [oracle.roi_align(**args, **options)[0, 0] for args in moved]
    np.testing.assert_allclose(got.transpose(0, 2, 3, 1), want, atol=1e-5)
    without = compat.deform_roi_pool(INPUT, ROIS, np.zeros(0, np.float32), 2, 0.5)
    want = compat.roi_align(INPUT, ROIS, 2, 0.5, aligned=True)
    np.testing.assert_array_equal(without, want)


def test_deform_roi_pooling():
    """Channels are (channel, row, column) there, and blocks of channels here."""
    offset = RNG.normal(size=(5, 2, 2, 2)).astype(np.float32)
    got = compat.deform_roi_pooling(INPUT, ROIS, offset, 0.5, 2, 1, False, 2, None, 3, 0.1)
    options = dict(output_size=(2, 2), spatial_scale=0.5, group_size=2, sample_per_part=3)
    moved = by_image(ROIS, offset=offset.transpose(0, 2, 3, 1))
    want = [oracle.deform_psroi_pool(**a, **options, trans_std=0.1)[0, 0] for a in moved]
    np.testing.assert_allclose(got.transpose(0, 2, 3, 1), want, atol=1e-5)
    plain = compat.deform_roi_pooling(INPUT, ROIS, offset, 0.5, 2, 4, True)
    want = [
        oracle.deform_psroi_pool(**a, output_size=(2, 2), spatial_scale=0.5)[0, 0]
        for a in by_image(ROIS)
    ]
    np.testing.assert_allclose(plain.transpose(0, 2, 3, 1), want, atol=1e-5)
