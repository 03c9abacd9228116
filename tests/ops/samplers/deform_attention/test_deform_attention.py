"""Specific properties of ms_deform_attn and dcn_aggregate."""

import numpy as np
import pytest

from effjax import dcn_aggregate
from tests.ops.battery import own_rules_or_xla
from tests.ops.samplers.deform_attention.cases import make


@own_rules_or_xla
def test_non_finite_pixel_stays_local(implementation):
    """Corners and samples out of range neither read nor scale other pixels."""
    c = make("levels", dtype=np.float32)
    value, locations, weights = c.args
    locations[:] = np.clip(locations, 0.0, 0.99)
    last_level = 26  # its only pixel
    for pixel in (0, last_level):
        value[:, pixel] = np.nan
    locations[:, :, :, 0] = [0.5, 1.1]  # below the first level, away from its first pixel
    locations[:, :, :, 2] = [2.0, 0.5]  # right of the last
    locations[:, 0, :, 1] = np.nan
    weights[:, 0, :, 1] = np.inf
    weights[:, :, :, 2] = np.nan
    for a in c.got(implementation):
        assert np.all(np.isfinite(a))


@pytest.mark.usefixtures("x64")
def test_zero_offsets_of_dcn_read_whole_pixels():
    x = np.random.default_rng(0).normal(size=(1, 5, 6, 2))
    mask = np.zeros((1, 5, 6, 16))
    mask[..., [0, 15]] = 1  # top left of the first group, bottom right of the second
    y = dcn_aggregate(x, np.zeros((1, 5, 6, 32)), mask, padding=1, remove_center=True)
    wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    np.testing.assert_array_equal(y[..., 0], wide[:, :-2, :-2, 0])
    np.testing.assert_array_equal(y[..., 1], wide[:, 2:, 2:, 1])
