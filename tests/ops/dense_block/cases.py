"""Inputs of the tests of dense_block and bn_relu_conv."""

import jax
import jax.numpy as jnp
import numpy as np

from effjax import DenseLayerParams, bn_relu_conv
from tests import oracles
from tests.contexts import DEVICES


def make_params(layers=2, growth=2, channels=3, bottleneck=4, dtype=np.float64):
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) * 0.5).astype(dtype)  # noqa: E731
    params = []
    for i in range(layers):
        c, b = channels + i * growth, bottleneck * growth
        kernels = normal(1, 1, c, b), normal(3, 3, b, growth)
        params.append(
            DenseLayerParams(
                1 + normal(c), normal(c), kernels[0], 1 + normal(b), normal(b), kernels[1]
            )
        )
    return params


def make_batch(shape=(16, 5, 4, 3), width=7):
    rng = np.random.default_rng(1)
    mask = rng.random((shape[0], shape[1], 1, 1)) < 0.6
    mask[: shape[0] // DEVICES] = False  # the first device has no counted pixel
    x, w = rng.normal(1, 2, shape), rng.normal(size=(*shape[:3], width))
    return {"x": x, "w": w, "mask": mask}


def bind(block, mask=False, **options):
    """Return `dense_block` or its definition in the form of tests.contexts."""

    def op(params, batch, axis_name):
        masked = {"mask": batch["mask"]} if mask else {}
        return block(batch["x"], params, axis_name=axis_name, **masked, **options)

    return op


# By name: the shape of the kernel, the options of bn_relu_conv and those of `oracles.conv`.
CONVS = {
    "pointwise": ((1, 1, 6, 4), {"chunk_size": 3}, {}),
    "strided": ((3, 3, 6, 4), {"strides": 2}, {"strides": (2, 2)}),
    "grouped": ((1, 1, 3, 4), {"feature_group_count": 2}, {"feature_group_count": 2}),
    "dilated": (
        (3, 2, 6, 4),
        {"kernel_dilation": (2, 1), "padding": ((1, 1), (0, 2))},
        {"rhs_dilation": (2, 1), "padding": ((1, 1), (0, 2))},
    ),
    "unpadded": ((2, 2, 6, 4), {"padding": "valid"}, {"padding": "VALID"}),
}


def make_conv(conv, masked=False):
    """Return bn_relu_conv and its definition in the form of tests.contexts, and their arguments."""
    kernel_shape, options, conv_options = CONVS[conv]
    rng = np.random.default_rng(0)
    params = rng.normal(size=6), rng.normal(size=6), rng.normal(size=kernel_shape)
    x = rng.normal(1, 2, (16, 5, 4, 6))
    mask = {"mask": rng.random((16, 5, 4, 1)) < 0.7} if masked else {}

    def definition(params, batch, axis_name):
        *norm, kernel = params
        z, statistics = oracles.batch_norm(
            batch["x"], *norm, mask=batch.get("mask"), relu=True, axis_name=axis_name
        )
        return oracles.conv(z, kernel, **conv_options), statistics

    def op(params, batch, axis_name):
        x = batch["x"]
        parts = x if conv == "grouped" else jnp.split(x, (1, 4), -1)
        return bn_relu_conv(parts, *params, axis_name=axis_name, mask=batch.get("mask"), **options)

    y = jax.eval_shape(lambda: definition(params, {"x": x}, None)[0])
    return op, definition, params, {"x": x, "w": rng.normal(size=y.shape), **mask}
