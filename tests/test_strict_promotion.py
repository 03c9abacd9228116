"""All operators run under `jax.numpy_dtype_promotion("strict")`."""

import functools

import jax
import jax.numpy as jnp
import pytest

from effjax import (
    DenseLayerParams,
    batch_norm_inference,
    bn_relu_conv,
    dcn_aggregate,
    deform_conv2d,
    deform_psroi_pool,
    deform_roi_pool,
    dense_block,
    dot_product_attention,
    linear_cross_entropy,
    ms_deform_attn,
    multiscale_roi_align,
    sync_batch_norm,
)


def _sync_batch_norm(x):
    mask = jnp.arange(4).reshape(4, 1, 1, 1) < 3
    options = dict(mask=mask, residual=x, activation="relu", axis_name="i")
    return sync_batch_norm(x, jnp.ones(3), jnp.zeros(3), **options)[0]


def _batch_norm_inference(x):
    return batch_norm_inference(x, jnp.zeros(3), jnp.ones(3), jnp.ones(3), jnp.zeros(3))


def _bn_relu_conv(x):
    kernel = jnp.ones((3, 3, 3, 2), x.dtype)
    return bn_relu_conv(x, jnp.ones(3), jnp.zeros(3), kernel, axis_name="i")[0]


def _dense_block(x):
    kernels = jnp.ones((1, 1, 3, 4), x.dtype), jnp.ones((3, 3, 4, 2), x.dtype)
    layer = (jnp.ones(3), jnp.zeros(3), kernels[0], jnp.ones(4), jnp.zeros(4), kernels[1])
    options = dict(axis_name="i", dropout_rate=0.5, key=jax.random.key(0))
    return dense_block(x, [DenseLayerParams(*layer)], **options)[0]


def _deform_conv2d(x, implementation=None):
    kernel = jnp.ones((3, 3, 3, 2), x.dtype)
    offset, mask = (jnp.ones((*x.shape[:3], n), x.dtype) for n in (18, 9))
    options = dict(padding=1, implementation=implementation, workspace_bytes=100)
    return deform_conv2d(x, offset, kernel, mask, jnp.ones(2), **options)


def _linear_cross_entropy(x):
    labels, where = jnp.zeros(x.shape[:-1], jnp.uint8), jnp.ones((4, 1, 1), bool)
    options = dict(bias=jnp.ones(7), where=where, z_loss=0.1, chunk_size=3)
    return linear_cross_entropy(x, jnp.ones((3, 7)), labels, **options)


def _dot_product_attention(x):
    q = x.reshape(x.shape[0], 25, 3, 1)
    options = dict(segment_ids=jnp.zeros(q.shape[:2], jnp.uint8), window=7, block_size=4)
    return dot_product_attention(q, q, q, **options)


def _ms_deform_attn(x, implementation=None):
    at = (*x.shape[:2], 1, 2, 3)
    locations, weights = jnp.ones((*at, 2), x.dtype), jnp.ones(at, x.dtype)
    options = dict(implementation=implementation, workspace_bytes=100)
    value, shapes = x.reshape(x.shape[0], 25, 1, 3), ((4, 5), (1, 5))
    return ms_deform_attn(value, shapes, locations, weights, **options)


def _dcn_aggregate(x, implementation=None):
    offset, mask = (jnp.ones((*x.shape[:3], n), x.dtype) for n in (18, 9))
    options = dict(padding=1, offset_scale=2.0, implementation=implementation)
    return dcn_aggregate(x, offset, mask, workspace_bytes=100, **options)


def _roi_pooling(x, implementation=None):
    boxes, options = jnp.ones((x.shape[0], 3, 4)), dict(implementation=implementation)
    offset = jnp.ones((x.shape[0], 3, 2, 2, 2), x.dtype)
    ratio = 2 if implementation is None else 0
    pooled = [deform_roi_pool(x, boxes, offset, output_size=2, sampling_ratio=ratio, **options)]
    pooled.append(deform_psroi_pool(x, boxes, offset, output_size=2, trans_std=0.1, **options))
    levels = dict(spatial_scales=[0.5], output_size=2)
    return sum(pooled, multiscale_roi_align([x], boxes, **levels, **options))


_with_kernels = [_deform_conv2d, _ms_deform_attn, _dcn_aggregate, _roi_pooling]
_in_xla = [functools.partial(operator, implementation="xla") for operator in _with_kernels]
OPERATORS = [
    _sync_batch_norm,
    _batch_norm_inference,
    _bn_relu_conv,
    _dense_block,
    _linear_cross_entropy,
    _dot_product_attention,
    *_with_kernels,
    *_in_xla,
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradient_under_strict_promotion(operator):
    x = jax.ShapeDtypeStruct((2, 4, 5, 5, 3), "bfloat16")
    run = jax.vmap(operator, axis_name="i")
    rank = "raise" if operator in [*_with_kernels, *_in_xla] else "allow"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion(rank):
        dx = jax.eval_shape(jax.grad(lambda x: run(x).astype(jnp.float32).sum()), x)
    assert dx.dtype == jnp.bfloat16
