"""Calls of every operator and module: NumPy scalars, strict promotion, forward mode, NCHW."""

import inspect
import operator
import re
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
from effjax import native
from effjax.models import DecoderConfig

KEY = jax.random.key(0)
X = jnp.ones((2, 6, 6, 8))
LEVELS = [X, X[:, ::2, ::2]]
TAPS, MASK, KERNEL = jnp.zeros((2, 6, 6, 18)), jnp.ones((2, 6, 6, 9)), jnp.ones((3, 3, 4, 4))
NCHW, TAPS_NCHW, OIHW = X.transpose(0, 3, 1, 2), TAPS.transpose(0, 3, 1, 2), jnp.ones((4, 8, 3, 3))
BOXES, ROIS = jnp.array([[[0, 0, 3, 3.0]]] * 2), jnp.ones((3, 5))
BIN_OFFSETS = jnp.ones((2, 1, 2, 2, 2))
SCALE = jnp.ones(8)
DENSE_LAYER = effjax.DenseLayerParams(
    SCALE, SCALE, jnp.ones((1, 1, 8, 8)), SCALE, SCALE, jnp.ones((3, 3, 8, 4))
)
LOCATIONS, WEIGHTS = jnp.ones((1, 5, 2, 1, 3, 2)) / 2, jnp.ones((1, 5, 2, 1, 3))
STACK, ROWS = {"w": jnp.ones((4, 3))}, jnp.ones((4, 3))

CONV = dict(strides=1, padding=1, kernel_dilation=1, feature_group_count=2)
EXPERTS = jnp.ones((6, 2), jnp.uint8)
TORCH_CONV = dict(stride=1, padding=(1, 1), dilation=1)
POOL = dict(output_size=2, spatial_scale=0.5, sampling_ratio=2)
OFFLOAD = dict(num_slices=2, num_microbatches=2)
STREAM = dict(**OFFLOAD, prefetch=1, resident_slices=1)


def add(w, x, key):
    return x + w["w"]


# Array arguments and options of operators.
OPERATORS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "sync_batch_norm": ((X, SCALE, SCALE), dict(
        epsilon=0.5, feature_axis=3, mask=jnp.ones((2, 1, 1, 1), bool), residual=X,
        activation="relu",
    )),
    "batch_norm_inference": ((X, *[SCALE] * 4), dict(epsilon=0.5, feature_axis=(3,))),
    "bn_relu_conv": ((X, SCALE, SCALE, KERNEL), dict(**CONV, epsilon=0.5)),
    "dense_block": (
        (X, [DENSE_LAYER]), dict(epsilon=0.5, chunk_size=3, dropout_rate=0.5, key=KEY)
    ),
    "linear_cross_entropy": ((X, jnp.ones((8, 9)), jnp.zeros((2, 6, 6), jnp.uint8)), dict(
        bias=jnp.ones(9), mask=jnp.ones((2, 1, 1), bool), chunk_size=4, z_loss=0.5,
        label_smoothing=0.5,
    )),
    "fp8_linear": ((X, jnp.ones((9, 8))), dict(transposed=True)),
    "dot_product_attention": ((X, X, X), dict(
        segment_ids=jnp.zeros((2, 6), jnp.uint8), window=2, scale=0.5, softcap=2.0, chunk_size=2
    )),
    "expert_mlp": (
        (X[0, 0], EXPERTS, jnp.ones((6, 2)), *[jnp.ones((3, 8, 8))] * 3),
        dict(activation="gelu_pytorch_tanh", transposed=True),
    ),
    "deform_conv2d": ((X, TAPS, KERNEL, MASK, jnp.ones(4)), dict(
        **CONV, offset_groups=1, deterministic=True, chunk_bytes=999
    )),
    "ms_deform_attn": (
        (jnp.ones((1, 6, 2, 4)), [(np.int64(2), 3)], LOCATIONS, WEIGHTS), dict(chunk_bytes=999)
    ),
    "dcn_aggregate": ((X, TAPS, MASK), dict(
        kernel_size=3, padding=1, offset_scale=0.5, remove_center=False, offset_groups=1,
        chunk_bytes=999,
    )),
    "roi_align": ((X, BOXES), dict(**POOL | dict(sampling_ratio=0), aligned=True)),
    "multiscale_roi_align": ((LEVELS, BOXES), dict(
        output_size=(2, 2), spatial_scales=(1.0, 0.5), canonical_scale=4.0, canonical_level=0
    )),
    "deform_roi_pool": ((X, BOXES, BIN_OFFSETS), dict(**POOL, gamma=0.5)),
    "deform_psroi_pool": ((X, BOXES, BIN_OFFSETS), dict(
        output_size=2, group_size=2, part_size=2, sample_per_part=2, trans_std=0.5
    )),
    "offload_scan": ((add, STACK, ROWS), dict(**STREAM, has_aux=False, params_in="device")),
    "offload_sequential": (
        ([add] * 4, [{"w": w} for w in ROWS], ROWS), dict(**OFFLOAD, params_in="device")
    ),
    "to_host": ((X,), {}),
    "compat.deform_conv2d": ((NCHW, TAPS_NCHW, OIHW), TORCH_CONV),
    "compat.deform_conv": ((NCHW, TAPS_NCHW, OIHW), dict(**TORCH_CONV, groups=1)),
    "compat.modulated_deform_conv": (
        (NCHW, TAPS_NCHW, MASK.transpose(0, 3, 1, 2), OIHW),
        dict(**TORCH_CONV, groups=1, deformable_groups=1),
    ),
    "compat.roi_align": ((NCHW, list(BOXES)), POOL),
    "compat.ps_roi_align": ((NCHW, ROIS), dict(output_size=2, spatial_scale=0.5)),
    "compat.deform_roi_pool": ((NCHW, ROIS, None), dict(**POOL, gamma=0.5)),
    "compat.deform_roi_pooling": (
        (NCHW, ROIS, None), dict(spatial_scale=0.5, out_size=2, out_channels=8, no_trans=True)
    ),
}  # fmt: skip
NAMED_AXES = ["sync_batch_norm", "bn_relu_conv", "dense_block"]
SAMPLERS = [
    "deform_conv2d", "ms_deform_attn", "dcn_aggregate", "roi_align", "multiscale_roi_align",
    "deform_roi_pool", "deform_psroi_pool",
]  # fmt: skip

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
    compression=0.5, chunk_size=8, small_inputs=True,
)  # fmt: skip
RESNET = dict(
    stage_sizes=(1, 1), stage_with_dcn=(False, True), bottleneck=True, modulated=True, width=8,
    num_classes=3, offset_groups=2, frozen_stages=1, stride_in_1x1=True,
)  # fmt: skip
PYRAMID = dict(out_channels=4, extra_levels=1)
DENSE_BLOCK = dict(num_layers=1, growth_rate=2, bn_size=2, drop_rate=0.0, momentum=0.5)
DECODER = DecoderConfig(
    model_type="llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=4,
)  # fmt: skip

# Options of modules and the arguments of a call.
NNX: dict[str, tuple[dict[str, Any], tuple]] = {
    "nnx.BatchNorm": (dict(**NORM, num_features=8), (X,)),
    "nnx.DenseBlock": (dict(**DENSE_BLOCK, in_features=8), (X,)),
    "nnx.DeformConv": (dict(**DEFORM_CONV, in_features=8, out_features=4), (X,)),
    "nnx.DCNv3": (DCN, (X,)),
    "nnx.MSDeformAttn": (ATTENTION, QUERIES),
    "nnx.DeformRoIPoolPack": (dict(**ROI_PACK, output_channels=8), (X, BOXES)),
    "nnx.OffloadModel": (dict(**OFFLOAD, layers=[jnp.sin] * 4), (ROWS,)),
    "models.DenseNet": (dict(**DENSENET, in_channels=8), (X,)),
    "models.densenet_cifar": (dict(depth=10, growth_rate=4, in_channels=8), (X,)),
    "models.ResNet": (dict(**RESNET, in_channels=8), (X,)),
    "models.FeaturePyramid": (dict(**PYRAMID, in_channels=(8, 8)), (LEVELS,)),
    "models.Decoder": (dict(config=DECODER, mlp_chunk_size=2), (jnp.zeros((1, 4), int),)),
}
LINEN: dict[str, tuple[dict[str, Any], tuple]] = {
    "linen.BatchNorm": (dict(**NORM, use_running_average=False), (X,)),
    "linen.DenseBlock": (dict(**DENSE_BLOCK, use_running_average=False), (X,)),
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


def run_nnx(name, *args, **options):
    rngs = {} if name == "nnx.OffloadModel" else {"rngs": nnx.Rngs(0)}
    return find(name)(**options, **rngs)(*args)


def run_linen(name, *args, **options):
    module = find(name)(**options)
    flags = {"train": True} if name in ("models.linen.DenseNet", "models.linen.ResNet") else {}
    variables = module.init(KEY, *args, **flags)
    return module.apply(variables, *args, mutable=["batch_stats"], **flags)[0]


def assert_same_program(run, options):
    """Assert that `run(**options)` is traced to the same program with NumPy scalars."""
    as_numpy = jax.tree.map(lambda v: KINDS.get(type(v), lambda v: v)(v), options)
    programs = [str(jax.make_jaxpr(lambda o=o: run(**o))()) for o in (options, as_numpy)]
    assert programs[0] == programs[1]


# Integers, numbers and flags may be NumPy scalars, such as sizes that were read from an array.


@pytest.mark.parametrize("name", [name for name, (_, options) in OPERATORS.items() if options])
def test_numpy_scalars_of_operators(name):
    args, options = OPERATORS[name]
    assert_same_program(lambda **options: find(name)(*args, **options), options)


@pytest.mark.parametrize("name", NNX | LINEN)
def test_numpy_scalars_of_modules(name):
    run = run_nnx if name in NNX else run_linen
    options, args = (NNX | LINEN)[name]
    assert_same_program(lambda **options: run(name, *args, **options), options)


def test_numpy_scalars_of_a_train_step():
    def run(**options):
        init, step = effjax.offload_train_step(
            lambda others, batch, key: batch, add, lambda others, x, batch, key: x.sum(),
            optax.sgd(0.5), params_in="device", **options,
        )  # fmt: skip
        return step(init(STACK, {}), ROWS)

    options = dict(fuse_update=False, clip_norm=1.0, loss_scale=8.0, skip_nonfinite=True)
    assert_same_program(run, STREAM | options)


def test_numpy_scalars_of_optimizers():
    def run(key, **options):
        adamw = effjax.optimizers.adamw_8bit(**options)
        tx = optax.chain(adamw, effjax.optimizers.stochastic_rounding(key))
        params = {"w": jnp.ones((4, 32), jnp.bfloat16)}
        return tx.update(params, tx.init(params), params)

    assert_same_program(run, dict(key=3, learning_rate=0.5, b1=0.5, block_size=16, min_size=64))


def halved(tree):
    """Return images, kernels and taps, of four axes or more, in bfloat16."""
    is_half = lambda a: getattr(a, "ndim", 0) > 3 and a.dtype == jnp.float32  # noqa: E731
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if is_half(a) else a, tree)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"axis_name": "i"}) for name in NAMED_AXES),
        ("batch_norm_inference", {}),
        ("linear_cross_entropy", {}),
        ("dot_product_attention", {}),
        ("fp8_linear", {}),
        *((name, {"implementation": i}) for name in SAMPLERS for i in (None, "xla")),
    ],
)
def test_gradient_under_strict_promotion(name, options):
    (x, *args), given = halved(OPERATORS[name])

    def loss(x):
        run = lambda x: find(name)(x, *args, **given, **options)  # noqa: E731
        y, *_ = jax.tree.leaves(jax.vmap(run, axis_name="i")(x))
        return y.astype(jnp.float32).sum()

    two = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), x)
    rank = "raise" if name in SAMPLERS else "allow"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion(rank):
        dx = jax.eval_shape(jax.grad(loss), two)
    assert {a.dtype for a in jax.tree.leaves(dx)} == {jnp.dtype("bfloat16")}


REVERSE_MODE_OPERATORS = [
    *NAMED_AXES, "linear_cross_entropy", "dot_product_attention", "expert_mlp", "fp8_linear",
    "offload_scan",
    "offload_sequential", "to_host", *(name for name in OPERATORS if name.startswith("compat")),
]  # fmt: skip
REVERSE_MODE_MODULES = [
    "nnx.BatchNorm", "nnx.DenseBlock", "nnx.OffloadModel", "models.DenseNet", "models.ResNet",
    "linen.BatchNorm", "linen.DenseBlock", "linen.OffloadModel", "models.linen.DenseNet",
    "models.linen.ResNet",
]  # fmt: skip


def assert_forward_mode_is_refused(call, x):
    with pytest.raises(NotImplementedError, match=r"^\w+ (does not support|supports only first)"):
        jax.jit(lambda x: jax.jvp(call, (x,), (x,))).lower(x)


@pytest.mark.parametrize("name", REVERSE_MODE_OPERATORS)
def test_forward_mode_is_refused(name):
    if "compat" in name and not native.is_available("cpu"):
        pytest.skip("only the native kernels are limited to reverse mode")
    args, options = OPERATORS[name]
    before, after = (args[:2], ()) if name.startswith("offload") else ((), args[1:])
    x = args[len(before)]
    assert_forward_mode_is_refused(lambda x: find(name)(*before, x, *after, **options), x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REVERSE_MODE_MODULES)
def test_forward_mode_of_modules_is_refused(name):
    run = run_nnx if name in NNX else run_linen
    options, (x,) = (NNX | LINEN)[name]
    if "ResNet" in name:
        options = {**options, "frozen_stages": -1}  # tangents stop at frozen stages
    assert_forward_mode_is_refused(lambda x: run(name, x, **options), x)


def test_docstrings_mention_reverse_mode_only():
    documented = {
        f"{module.__name__}.{name}".removeprefix("effjax.")
        for module in (
            effjax, effjax.compat, effjax.linen, effjax.models.linen, effjax.models, effjax.nnx
        )
        for name, value in inspect.getmembers(module)
        if callable(value) and re.search(r"(?i)reverse\s+mode\s+only", value.__doc__ or "")
    }  # fmt: skip
    assert documented == {*REVERSE_MODE_OPERATORS, *REVERSE_MODE_MODULES}


@pytest.mark.parametrize("layer", ["BatchNorm", "DenseBlock", "DeformConv", "DCNv3"])
@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_images_with_channels_first_are_refused(flavor, layer):
    name = f"{flavor}.{layer}"
    options, _ = (NNX | LINEN)[name]

    def run(x):
        if flavor == "nnx":
            return run_nnx(name, x, **options)
        module = find(name)(**options)
        return module.apply(module.init(KEY, X), x, mutable=["batch_stats"])

    with pytest.raises(ValueError, match=r"[Ff]eatures (are )?last"):
        jax.eval_shape(run, NCHW)
