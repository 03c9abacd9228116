"""Integers, numbers and flags may be NumPy scalars, such as sizes that were read from an array."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import effjax
import effjax.compat
import effjax.linen
import effjax.models
import effjax.models.linen
import effjax.nnx
import effjax.optimizers
from effjax.models import DecoderConfig

X = jnp.ones((2, 6, 6, 8))
LEVELS = [X, X[:, ::2, ::2]]
TAPS, MASK, KERNEL = jnp.zeros((2, 6, 6, 18)), jnp.ones((2, 6, 6, 9)), jnp.ones((3, 3, 4, 4))
NCHW, TAPS_NCHW, OIHW = X.transpose(0, 3, 1, 2), TAPS.transpose(0, 3, 1, 2), jnp.ones((4, 8, 3, 3))
BOXES = jnp.array([[[0, 0, 3, 3.0]]] * 2)
SCALE = jnp.ones(8)
DENSE_LAYER = effjax.DenseLayerParams(
    SCALE, SCALE, jnp.ones((1, 1, 8, 8)), SCALE, SCALE, jnp.ones((3, 3, 8, 4))
)
LOCATIONS, WEIGHTS = jnp.ones((1, 5, 2, 1, 3, 2)) / 2, jnp.ones((1, 5, 2, 1, 3))
STACK, ROWS = {"w": jnp.ones((4, 3))}, jnp.ones((4, 3))

CONV = dict(strides=1, padding=1, kernel_dilation=1, feature_group_count=2)
POOL = dict(output_size=2, spatial_scale=0.5, sampling_ratio=2)
OFFLOAD = dict(num_slices=2, num_microbatches=2)
STREAM = dict(**OFFLOAD, prefetch=1, resident_slices=1)


def add(w, x, key):
    return x + w["w"]


# Array arguments and options of operators.
OPERATORS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "sync_batch_norm": ((X,), dict(epsilon=0.5, feature_axis=3)),
    "batch_norm_inference": ((X, SCALE, SCALE), dict(epsilon=0.5, feature_axis=(3,))),
    "bn_relu_conv": ((X, SCALE, SCALE, KERNEL), dict(**CONV, epsilon=0.5)),
    "dense_block": ((X, [DENSE_LAYER]), dict(epsilon=0.5, num_chunks=2, dropout_rate=0.0)),
    "deform_conv2d": (
        (X, TAPS, KERNEL),
        dict(**CONV, offset_groups=1, deterministic=True, workspace_bytes=2**20),
    ),
    "dcn_aggregate": (
        (X, TAPS, MASK),
        dict(kernel_size=3, padding=1, offset_scale=0.5, remove_center=False, offset_groups=1),
    ),
    "ms_deform_attn": (
        (jnp.ones((1, 6, 2, 4)), [(np.int64(2), 3)], LOCATIONS, WEIGHTS),
        dict(workspace_bytes=999),
    ),
    "roi_align": ((X, BOXES), dict(**POOL, aligned=True)),
    "multiscale_roi_align": (
        (LEVELS, BOXES),
        dict(output_size=(2, 2), spatial_scales=(1.0, 0.5), canonical_scale=4.0, canonical_level=0),
    ),
    "deform_roi_pool": ((X, BOXES), dict(**POOL, gamma=0.5)),
    "deform_psroi_pool": (
        (X, BOXES),
        dict(output_size=2, group_size=2, part_size=2, sample_per_part=2, trans_std=0.5),
    ),
    "linear_cross_entropy": (
        (X, jnp.ones((8, 9)), jnp.zeros((2, 6, 6), int)),
        dict(chunk_size=4, z_loss=0.5, label_smoothing=0.5),
    ),
    "offload_scan": ((add, STACK, ROWS), dict(**STREAM, has_aux=False, params_in="device")),
    "offload_sequential": (
        ([add] * 4, [{"w": w} for w in ROWS], ROWS),
        dict(**OFFLOAD, params_in="device"),
    ),
    "compat.deform_conv2d": ((NCHW, TAPS_NCHW, OIHW), dict(stride=1, padding=(1, 1), dilation=1)),
    "compat.modulated_deform_conv": (
        (NCHW, TAPS_NCHW, MASK.transpose(0, 3, 1, 2), OIHW),
        dict(stride=1, padding=1, dilation=1, groups=1, deformable_groups=1),
    ),
    "compat.roi_align": ((NCHW, list(BOXES)), POOL),
}

NORM = dict(axis=-1, momentum=0.5, epsilon=1e-3, use_bias=True, use_scale=False)
DEFORM_CONV = dict(
    **CONV, kernel_size=3, offset_groups=2, modulated=True, predict_offset=True, use_bias=True,
    deterministic=True,
)  # fmt: skip
DCN = dict(
    features=8, kernel_size=3, kernel_dilation=1, offset_groups=2, offset_scale=1.0,
    dw_kernel_size=3, center_feature_scale=True, remove_center=False,
)  # fmt: skip
ATTENTION = dict(features=8, num_levels=1, num_heads=2, num_points=2)
QUERIES = jnp.ones((1, 5, 8)), jnp.ones((1, 5, 1, 2)) / 2, jnp.ones((1, 6, 8)), [(2, 3)]
ROI_PACK = dict(**POOL, gamma=0.5, deform_fc_channels=4)
DENSENET = dict(
    growth_rate=4, block_config=(1, 1), num_init_features=8, bn_size=2, num_classes=3,
    compression=0.5, num_chunks=1, small_inputs=True,
)  # fmt: skip
RESNET = dict(
    stage_sizes=(1, 1), stage_with_dcn=(False, True), bottleneck=True, modulated=True, width=8,
    num_classes=3, offset_groups=2, frozen_stages=1, stride_in_1x1=True,
)  # fmt: skip
PYRAMID = dict(out_channels=4, extra_levels=1)
DECODER = DecoderConfig(
    model_type="llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=4,
)  # fmt: skip

# Options of modules and the arguments of a call.
NNX: dict[str, tuple[dict[str, Any], tuple]] = {
    "nnx.BatchNorm": (dict(**NORM, num_features=8), (X,)),
    "nnx.DeformConv": (dict(**DEFORM_CONV, in_features=8, out_features=4), (X,)),
    "nnx.DCNv3": (DCN, (X,)),
    "nnx.MSDeformAttn": (ATTENTION, QUERIES),
    "nnx.DeformRoIPoolPack": (dict(**ROI_PACK, output_channels=8), (X, BOXES)),
    "models.DenseNet": (dict(**DENSENET, in_channels=8), (X,)),
    "models.densenet_cifar": (dict(depth=10, growth_rate=4, in_channels=8), (X,)),
    "models.ResNet": (dict(**RESNET, in_channels=8), (X,)),
    "models.FeaturePyramid": (dict(**PYRAMID, in_channels=(8, 8)), (LEVELS,)),
    "models.Decoder": (dict(config=DECODER, mlp_chunk_size=2), (jnp.zeros((1, 4), int),)),
}
LINEN: dict[str, tuple[dict[str, Any], tuple]] = {
    "linen.BatchNorm": (dict(**NORM, use_running_average=False), (X,)),
    "linen.DeformConv": (dict(**DEFORM_CONV, features=4), (X,)),
    "linen.DCNv3": (DCN, (X,)),
    "linen.MSDeformAttn": (ATTENTION, QUERIES),
    "linen.OffloadModel": (dict(**OFFLOAD, layers=[jnp.sin] * 4), (ROWS,)),
    "linen.DeformRoIPoolPack": (ROI_PACK, (X, BOXES)),
    "models.linen.DenseNet": (DENSENET, (X,)),
    "models.linen.ResNet": (RESNET, (X,)),
    "models.linen.FeaturePyramid": (PYRAMID, (LEVELS,)),
}
KINDS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float32}


def find(name):
    return operator.attrgetter(name)(effjax)


def assert_same_program(run, options):
    """Assert that `run(**options)` is traced to the same program with NumPy scalars."""
    as_numpy = jax.tree.map(lambda v: KINDS.get(type(v), lambda v: v)(v), options)
    programs = [str(jax.make_jaxpr(lambda o=o: run(**o))()) for o in (options, as_numpy)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    args, options = OPERATORS[name]
    assert_same_program(lambda **options: find(name)(*args, **options), options)


@pytest.mark.parametrize("name", NNX)
def test_nnx_modules(name):
    options, args = NNX[name]
    assert_same_program(lambda **options: find(name)(**options, rngs=nnx.Rngs(0))(*args), options)


@pytest.mark.parametrize("name", LINEN)
def test_linen_modules(name):
    options, args = LINEN[name]

    def run(**options):
        return find(name)(**options).init_with_output(jax.random.key(0), *args)[0]

    assert_same_program(run, options)


def test_train_step():
    def run(**options):
        init, step = effjax.offload_train_step(
            lambda others, batch, key: batch, add, lambda others, x, batch, key: x.sum(),
            optax.sgd(0.5), params_in="device", **options,
        )  # fmt: skip
        return step(init(STACK, {}), ROWS)

    options = dict(fuse_update=False, clip_norm=1.0, loss_scale=8.0, skip_nonfinite=True)
    assert_same_program(run, STREAM | options)


def test_optimizers():
    def run(key, **options):
        adamw = effjax.optimizers.adamw_8bit(**options)
        tx = optax.chain(adamw, effjax.optimizers.stochastic_rounding(key))
        params = {"w": jnp.ones((4, 32), jnp.bfloat16)}
        return tx.update(params, tx.init(params), params)

    assert_same_program(run, dict(key=3, learning_rate=0.5, b1=0.5, block_size=16, min_size=64))
