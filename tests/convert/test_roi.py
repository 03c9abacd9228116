"""Conversion of the weights of mmcv's deformable RoI pooling layers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import effjax
from effjax import convert

X = np.random.default_rng(0).normal(size=(1, 8, 9, 2)).astype(np.float32)
BOXES = np.array([[[1, 1, 7, 6], [0, 2, 5, 8]]], np.float32)


def test_mmcv_weights():
    # mmcv flattens [C, rows, columns], and its offsets are [2, rows, columns].
    rng = np.random.default_rng(1)
    shapes = {"offset_fc.0": (5, 12), "offset_fc.2": (5, 5), "offset_fc.4": (12, 5)}
    shapes |= {"mask_fc.0": (5, 12), "mask_fc.2": (6, 5)}
    theirs = {f"{name}.weight": rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    theirs |= {f"{n}.bias": rng.normal(size=s[0]).astype(np.float32) for n, s in shapes.items()}

    def fc(name, x):
        return x @ theirs[f"{name}.weight"].T + theirs[f"{name}.bias"]

    options = dict(output_size=(2, 3), sampling_ratio=2)
    flat = effjax.deform_roi_pool(X, BOXES, **options)[0].transpose(0, 3, 1, 2).reshape(2, 12)
    hidden = jax.nn.relu(fc("offset_fc.2", jax.nn.relu(fc("offset_fc.0", flat))))
    offset = fc("offset_fc.4", hidden).reshape(1, 2, 2, 2, 3).transpose(0, 1, 3, 4, 2)
    mask = jax.nn.sigmoid(fc("mask_fc.2", jax.nn.relu(fc("mask_fc.0", flat))))
    want = effjax.deform_roi_pool(X, BOXES, offset, **options) * mask.reshape(1, 2, 2, 3, 1)

    given = dict(sampling_ratio=2, rngs=nnx.Rngs(0))
    layer = effjax.nnx.ModulatedDeformRoIPoolPack((2, 3), 2, 5, **given)
    convert.from_torch(theirs, layer, convert.DEFORM_ROI_POOL)
    np.testing.assert_allclose(layer(jnp.asarray(X), jnp.asarray(BOXES)), want, atol=1e-5)
    back = convert.to_torch(layer, convert.DEFORM_ROI_POOL)
    for name, array in theirs.items():
        np.testing.assert_array_equal(back[name], array)
