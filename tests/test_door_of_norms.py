"""What is no fit argument is refused, by an error that names the argument: batch norm, networks."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from effjax import models
from effjax.models import linen as linen_models

BAD = {
    "none": None,
    "list": [1.0],
    "number": 1.5,
    "integers": np.arange(3),
    "text": "text",
    "complex": np.ones(3, np.complex64),
    "object": object(),
}
X, V = np.ones((4, 3), np.float32), np.ones(3, np.float32)
IMAGES = np.ones((2, 4, 4, 3), np.float32)
LAYER = effjax.DenseLayerParams(
    V, V, np.ones((1, 1, 3, 2), np.float32), V[:2], V[:2], np.ones((3, 3, 2, 1), np.float32)
)
KEY = jax.random.key(0)

# For each argument, the values above that it takes.
OVER_DEVICES = dict(axis_name="none", axis_index_groups="none", stats="")
NORM = OVER_DEVICES | dict(
    use_running_average="none", axis="", momentum="none", epsilon="number",
    dtype="none complex", param_dtype="complex",  # NumPy takes an array for its dtype
    use_bias="", use_scale="", bias_init="", scale_init="", use_fast_variance="",
    unbiased_running_var="", track_running_stats="", activation="none",
)  # fmt: skip
DENSE_NET = dict(
    growth_rate="", block_config="", compression="", num_init_features="", bn_size="",
    drop_rate="", num_classes="", small_inputs="", efficient="", save="", num_chunks="none",
    axis_name="none", axis_index_groups="none", momentum="none", epsilon="number",
    dtype="none", param_dtype="", unbiased_running_var="",
)  # fmt: skip
RESNET = dict(
    stage_sizes="", bottleneck="", width="", stride_in_1x1="", stage_with_dcn="", modulated="",
    offset_groups="", num_classes="none", small_inputs="", efficient="", save="",
    frozen_stages="", frozen_norm="", axis_name="none text object", axis_index_groups="none",
    momentum="none", epsilon="number", dtype="none", param_dtype="", unbiased_running_var="",
)  # fmt: skip
PYRAMID = dict(
    out_channels="", extra_levels="", extra="", extra_from="", extra_relu="", dtype="none",
    param_dtype="",
)  # fmt: skip
OF_CALL = dict(x="integers complex", use_running_average="none", mask="none", residual="none")


def linen_norm(**args):
    return effjax.linen.BatchNorm().init(KEY, **dict(x=X, use_running_average=False) | args)


def nnx_norm(**args):
    return effjax.nnx.BatchNorm(3, rngs=nnx.Rngs(0))(**dict(x=X) | args)


def linen_dense_net(**args):
    return linen_models.DenseNet(block_config=(1,), small_inputs=True).init(
        KEY, **dict(x=IMAGES) | args
    )


@functools.cache
def small_dense_net():
    options = dict(block_config=(1,), small_inputs=True, drop_rate=0.5)
    return nnx.eval_shape(lambda: models.DenseNet(**options, rngs=nnx.Rngs(0)))


def nnx_dense_net(**args):
    return small_dense_net()(**dict(x=IMAGES, rngs=KEY) | args)


def linen_resnet(**args):
    return linen_models.ResNet(stage_sizes=(1,), width=2).init(KEY, **dict(x=IMAGES) | args)


def nnx_resnet(method="__call__", **args):
    model = nnx.eval_shape(lambda: models.ResNet(stage_sizes=(1,), width=2, rngs=nnx.Rngs(0)))
    return getattr(model, method)(**dict(x=IMAGES) | args)


def nnx_pyramid(features):
    return models.FeaturePyramid((3,), 2, rngs=nnx.Rngs(0))(features)


def linen_pyramid(features):
    return linen_models.FeaturePyramid(2).init(KEY, features)


DOORS = {
    "sync_batch_norm": (effjax.sync_batch_norm, dict(x=X), OVER_DEVICES | dict(
        x="", scale="none", bias="none", mask="none", epsilon="number", activation="none",
        residual="none", feature_axis="",
    )),
    "batch_norm_inference": (effjax.batch_norm_inference, dict(x=X, mean=V, var=V), dict(
        x="", mean="", var="", scale="none", bias="none", epsilon="number", activation="none",
        residual="none", feature_axis="",
    )),
    "bn_relu_conv": (
        effjax.bn_relu_conv, dict(x=IMAGES, scale=V, bias=V, kernel=LAYER.kernel1),
        OVER_DEVICES | dict(
            x="", scale="", bias="", kernel="", mask="none", epsilon="number", strides="",
            padding="", kernel_dilation="", feature_group_count="", num_chunks="none",
            precision="none",
        ),
    ),
    "dense_block": (
        effjax.dense_block, dict(x=IMAGES, params=[LAYER]),
        OVER_DEVICES | dict(
            x="", params="", save="", mask="none", epsilon="number", dropout_rate="", key="none",
            num_chunks="none", precision="none",
        ),
    ),
    "nnx.BatchNorm": (effjax.nnx.BatchNorm, dict(num_features=3, rngs=nnx.Rngs(0)), NORM | dict(
        num_features="", promote_dtype="", bias_metadata="", scale_metadata="",
    )),
    "linen.BatchNorm": (effjax.linen.BatchNorm, {}, NORM | dict(force_float32_reductions="")),
    "nnx.BatchNorm()": (nnx_norm, {}, OF_CALL),
    "linen.BatchNorm()": (linen_norm, {}, OF_CALL),
    "convert_batch_norm": (
        effjax.nnx.convert_batch_norm, dict(model=nnx.Linear(3, 3, rngs=nnx.Rngs(0))),
        dict(model="", axis_name="none text object", axis_index_groups="none",
             unbiased_running_var="none", stats="none"),
    ),
    "linen.convert_batch_norm": (
        effjax.linen.convert_batch_norm, dict(model=nn.Dense(3)),
        dict(model="", axis_name="none text object", axis_index_groups="none",
             unbiased_running_var="none", stats="none"),
    ),
    "revert_batch_norm": (effjax.nnx.revert_batch_norm, {}, dict(model="")),
    "nnx.DenseNet": (models.DenseNet, dict(rngs=nnx.Rngs(0)), DENSE_NET | dict(
        in_channels="",
    )),
    "linen.DenseNet": (linen_models.DenseNet, {}, DENSE_NET),
    "nnx.DenseNet()": (nnx_dense_net, {}, dict(x="", rngs="none", mask="none")),
    "linen.DenseNet()": (linen_dense_net, {}, dict(x="", train="", mask="none")),
    "nnx.ResNet": (models.ResNet, dict(rngs=nnx.Rngs(0)), RESNET | dict(in_channels="")),
    "linen.ResNet": (linen_models.ResNet, {}, RESNET),
    "nnx.ResNet()": (nnx_resnet, {}, dict(x="", mask="none")),
    "nnx.ResNet.features": (
        functools.partial(nnx_resnet, "features"), {}, dict(x="", mask="none"),
    ),
    "linen.ResNet()": (linen_resnet, {}, dict(x="", train="", mask="none")),
    "nnx.FeaturePyramid": (
        models.FeaturePyramid, dict(in_channels=(2,), rngs=nnx.Rngs(0)),
        PYRAMID | dict(in_channels=""),
    ),
    "linen.FeaturePyramid": (linen_models.FeaturePyramid, {}, PYRAMID),
    "nnx.FeaturePyramid()": (nnx_pyramid, {}, dict(features="")),
    "linen.FeaturePyramid()": (linen_pyramid, {}, dict(features="")),
    "resnet50": (models.resnet50, {}, dict(module="")),
    "densenet121": (models.densenet121, {}, dict(module="")),
    "densenet_cifar": (models.densenet_cifar, {}, dict(depth="", growth_rate="", module="")),
}  # fmt: skip
# Names of axes are looked up where statistics are taken, not in a constructor.
for constructor in ("nnx.BatchNorm", "linen.BatchNorm", "nnx.DenseNet", "linen.DenseNet"):
    DOORS[constructor][2]["axis_name"] = "none text object"


@pytest.mark.parametrize(
    ("door", "argument"), [(door, name) for door, (_, _, names) in DOORS.items() for name in names]
)
def test_bad_values(door, argument):
    function, good, taken = DOORS[door]
    for name in BAD.keys() - set(taken[argument].split()):
        with pytest.raises((TypeError, ValueError)) as error:
            function(**good | {argument: BAD[name]})
        assert re.search(rf"`{argument}[`\[]", str(error.value)), (name, error.value)


def test_every_argument_has_its_values():
    for door, (function, _, taken) in DOORS.items():
        names = set(inspect.signature(function).parameters)
        if not {"args", "options"} & names:
            assert names - {"parent", "name"} == set(taken), door


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: effjax.sync_batch_norm(X, axis_name=("i", "i")), "names an axis twice"),
        (lambda: effjax.sync_batch_norm(X, axis_name=("i", 0)), "tuple of names, not 0"),
        (lambda: effjax.sync_batch_norm(X, axis_name="i"), r"`axis_name` \(='i'\) is not mapped"),
        (lambda: effjax.sync_batch_norm(X, scale=1j * V), r"`scale` must be floating.*complex64"),
        (lambda: effjax.sync_batch_norm(X, feature_axis=True), "`feature_axis` must be an integer"),
        (
            lambda: effjax.dense_block(IMAGES, [LAYER._replace(bias2=1j * V[:2])]),
            r"`params\[0\].bias2` must be floating point",
        ),
        (lambda: effjax.dense_block(IMAGES, LAYER), "`params` must be a list of DenseLayerParams"),
        (lambda: effjax.dense_block(IMAGES, [LAYER[:5]]), r"`params\[0\]` must be"),
        (
            lambda: effjax.dense_block(IMAGES, [LAYER._replace(kernel1=V)]),
            r"`params\[0\].kernel1` of shape \(3,\) must be \[kh, kw",
        ),
        (
            lambda: effjax.dense_block(
                IMAGES, [LAYER], dropout_rate=0.5, key=jax.random.split(KEY, 2)
            ),
            r"`key` must be a single PRNG key",
        ),
        (
            lambda: effjax.bn_relu_conv(
                IMAGES[..., :2], V[:2], V[:2], LAYER.kernel2[..., :1, :], feature_group_count=2
            ),
            r"`kernel` of shape \(3, 3, 1, 1\).*feature_group_count=2",
        ),
        (
            lambda: effjax.bn_relu_conv(IMAGES, V, V, LAYER.kernel1[:0]),
            r"`kernel` of shape \(0, .* must have at least one tap",
        ),
        (
            lambda: effjax.nnx.BatchNorm(3, dtype=jnp.float32, rngs=nnx.Rngs(0))(X + 1j),
            r"`dtype` \(=float32\) must be complex",
        ),
        (
            lambda: effjax.nnx.BatchNorm(3, rngs=nnx.Rngs(0))(X, residual=X + 1j),
            "`residual` is complex64, but `x` is float32",
        ),
        (lambda: nnx_dense_net(rngs=nnx.Rngs(params=0)), "`rngs` has no stream `dropout`"),
        (lambda: models.DenseNet(num_chunks=0, rngs=nnx.Rngs(0)), r"`num_chunks` \(=0\)"),
        (lambda: models.DenseNet(num_chunks=1.5, rngs=nnx.Rngs(0)), "`num_chunks` must be"),
        (lambda: linen_models.DenseNet(num_chunks=0), r"`num_chunks` \(=0\)"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_or_obscure(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def norm(x, mask):
    return effjax.sync_batch_norm(x, mask=mask, axis_name="i")


def rectified(x, mask):
    return effjax.bn_relu_conv(x, V, V, LAYER.kernel1, mask=mask, axis_name="i")


def block(x, mask):
    return effjax.dense_block(x, [LAYER], mask=mask, axis_name="i")


@pytest.mark.parametrize("run", [norm, rectified, block])
def test_a_mask_of_numpy_that_vmap_maps_inside_jit(run):
    x = jax.random.normal(KEY, (2, *IMAGES.shape))
    mask = np.arange(16).reshape(2, 2, 4, 1, 1) % 3 > 0
    mapped = jax.vmap(lambda *args: run(*args)[0], axis_name="i")
    got = jax.jit(lambda x: mapped(x, mask))(x)
    np.testing.assert_allclose(got, jax.jit(mapped)(x, mask), atol=1e-5)


def test_a_large_value_is_not_shown_in_full():
    with pytest.raises(ValueError, match=r"^`stats` \(=array") as error:
        effjax.sync_batch_norm(X, stats=np.ones(900))
    assert len(str(error.value)) < 200
