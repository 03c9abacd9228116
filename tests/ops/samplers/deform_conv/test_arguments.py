"""Errors of deform_conv2d."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import deform_conv2d

X = np.zeros((2, 5, 4, 6), np.float32)
GOOD = {
    "x": X,
    "offset": np.zeros((2, 3, 2, 18), np.float32),
    "kernel": np.zeros((3, 3, 6, 4), np.float32),
    "mask": np.zeros((2, 3, 2, 9), np.float32),
    "bias": np.zeros(4, np.float32),
}


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"`x` of shape \(5, 4, 6\) must be \(N, H, W, C\)", {"x": X[0]}),
        (TypeError, "`x` must be float32 or.* its dtype is int32", {"x": X.astype(np.int32)}),
        (ValueError, "`x` must have 1 to .* pixels per image, not 0", {"x": X[:, :0]}),
        (ValueError, "`kernel` .* for the 6 channels", {"kernel": np.zeros((3, 3, 5, 4))}),
        (ValueError, r"`offset` .* must be \(2, 3, 2, 18\)", {"offset": np.zeros((2, 5, 4, 18))}),
        (ValueError, r"`offset_groups` \(=4\) must", {"offset": np.zeros((2, 3, 2, 72))}),
        (ValueError, r"`mask` .* must be \(2, 3, 2, 9\)", {"mask": np.zeros((2, 3, 2, 18))}),
        (ValueError, r"`bias` of shape \(5,\) must be \(4,\)", {"bias": np.zeros(5)}),
        (ValueError, r"`implementation` \(='cuda'\)", {"implementation": "cuda"}),
    ],
)
def test_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: deform_conv2d(**{**GOOD, **args}))


@pytest.mark.parametrize(
    "args", [{"kernel": GOOD["kernel"].transpose(3, 2, 0, 1)}, {"x": np.moveaxis(X, -1, 1)}]
)
def test_pytorch_layouts_point_to_compat(args):
    with pytest.raises(ValueError, match="NHWC.*HWIO.*effjax.compat"):
        jax.eval_shape(lambda: deform_conv2d(**{**GOOD, **args}))


def test_eval_shape():
    shapes = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in GOOD.items()}
    y = jax.eval_shape(lambda a: deform_conv2d(**a), shapes)
    assert (y.shape, y.dtype) == ((2, 3, 2, 4), jnp.float32)
