"""Names, layouts, dtypes and errors of `from_torch` and `to_torch`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effjax.nnx
from effjax import convert, models
from effjax.convert.tables import torch_names

W = {"weight": np.arange(6.0).reshape(3, 2), "bias": np.arange(3.0)}


def linear(**options):
    return nnx.Linear(2, 3, **options, rngs=nnx.Rngs(0))


NAMES = [
    (convert.DENSENET, {
        "stem_conv.kernel": "features.conv0.weight",
        "blocks.3.layers.15.norm2.mean": "features.denseblock4.denselayer16.norm2.running_mean",
        "blocks_3.layers_15.norm2.var": "features.denseblock4.denselayer16.norm2.running_var",
    }),
    (convert.RESNET, {
        "stages.1.0.conv2.kernel": "layer2.0.conv2.weight",
        "stages_2_22.conv2.offset_conv.bias": "layer3.22.conv2.conv_offset.bias",
        "classifier.kernel": "fc.weight",
    }),
    (convert.PYRAMID, {"outputs.4.bias": "fpn_convs.4.conv.bias"}),
    (convert.MASKRCNN_RETINANET, {
        "outputs.4.kernel": "top_blocks.p7.weight", "laterals_0.bias": "fpn_inner2.bias",
    }),
    (convert.TORCHVISION_RETINANET, {"outputs.3.kernel": "extra_blocks.p6.weight"}),
    (convert.TORCHVISION_PYRAMID, {"laterals.1.bias": "inner_blocks.1.0.bias"}),
    (convert.DEFORM_CONV, {"kernel": "weight"}),
    (convert.Table({"offset": "offset_conv"}, below="conv"), {"offset_conv.bias": "offset.bias"}),
    (convert.Table({"a{i+1}": "b.{i}"}), {"b.9.c.d.kernel": "a10.c.d.weight"}),
    (convert.Table({"a": "b"}), {"bc.kernel": "bc.weight"}),
]  # fmt: skip


def test_names():
    for table, names in NAMES:
        assert torch_names(names, table) == names


def test_join_tables():
    # Only the kernel of a deformable convolution is one level deeper in maskrcnn-benchmark.
    parts = {
        "body": ("backbone.body", convert.MASKRCNN_RESNET),
        "fpn": ("backbone.fpn", convert.MASKRCNN_PYRAMID),
    }
    names = {
        "body.stem_conv.kernel": "backbone.body.stem.conv1.weight",
        "body.stages_0_0.conv2.kernel": "backbone.body.layer1.0.conv2.weight",
        "body.stages_0_2.norm3.var": "backbone.body.layer1.2.bn3.running_var",
        "body.stages_0_0.shortcut.kernel": "backbone.body.layer1.0.downsample.0.weight",
        "body.stages_0_0.shortcut_norm.bias": "backbone.body.layer1.0.downsample.1.bias",
        "body.stages_1_0.conv2.kernel": "backbone.body.layer2.0.conv2.conv.weight",
        "body.stages_1_0.conv2.offset_conv.kernel": "backbone.body.layer2.0.conv2.offset.weight",
        "body.stages_1_0.conv2.offset_conv.bias": "backbone.body.layer2.0.conv2.offset.bias",
        "body.stem_norm.mean": "backbone.body.stem.bn1.running_mean",
        "fpn.laterals_0.kernel": "backbone.fpn.fpn_inner1.weight",
        "fpn.outputs_3.bias": "backbone.fpn.fpn_layer4.bias",
        "roi.fc.bias": "roi.fc.bias",
    }
    table = convert.join_tables(parts)
    assert torch_names(names, table) == names and not table.counters
    # Parts may have different epsilons.
    assert convert.join_tables(parts | {"other": ("other", convert.RESNET)}).epsilon is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_convolution_ranks(size):
    layer = nnx.Conv(4, 6, (3,) * size, feature_group_count=2, rngs=nnx.Rngs(0))
    weight = np.random.randn(6, 2, *(3,) * size).astype(np.float32)
    weights = {"weight": weight, "bias": np.zeros(6)}
    assert convert.from_torch(weights, layer) is layer
    np.testing.assert_array_equal(layer.kernel[..., 1, 4], weight[4, 1])
    np.testing.assert_array_equal(convert.to_torch(layer)["weight"], weight)


def test_linen_variables():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))

    shapes = jax.eval_shape(Model().init, jax.random.key(0), np.ones((1, 2)))
    names = "weight", "bias", "running_mean", "running_var"
    weights = {f"0.{name}": array for name, array in W.items()}
    weights |= {f"1.{name}": np.full(3, float(i)) for i, name in enumerate(names)}
    weights |= {"1.num_batches_tracked": np.array(7)}
    table = convert.Table({"0": "Dense.0", "1": "BatchNorm.0"})
    variables = convert.from_torch(weights, shapes, table)
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    np.testing.assert_array_equal(variables["params"]["Dense_0"]["kernel"], W["weight"].T)
    np.testing.assert_array_equal(variables["batch_stats"]["BatchNorm_0"]["var"], np.full(3, 3.0))
    back = convert.to_torch(variables, table)
    assert back.keys() == weights.keys() and back["1.num_batches_tracked"] == 0
    assert all(array.flags.owndata or array.base is not None for array in back.values())


def test_keeps_dtypes_and_shardings_of_the_network(mesh8):
    sharding = NamedSharding(mesh8, P(None, None))
    layer = linear(param_dtype=jnp.bfloat16)
    layer.kernel.set_value(jax.device_put(layer.kernel[...], sharding))
    convert.from_torch(W, layer)
    assert layer.kernel[...].dtype == jnp.bfloat16 and layer.kernel[...].sharding == sharding
    assert convert.to_torch(layer)["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "rounded"),
    [
        ("float64", "float32", "float32"),
        ("float32", "float16", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float64", "float64", "float32"),  # without jax_enable_x64
    ],
)
def test_warns_if_values_are_rounded(dtype, param_dtype, rounded):
    into = jax.eval_shape(nn.Dense(3).init, jax.random.key(0), np.ones((1, 2)))
    into = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, param_dtype), into)
    weights = {name: array.astype(dtype) for name, array in W.items()}
    with warnings.catch_warnings(action="error"):
        convert.from_torch(weights, into)  # these integers fit in all dtypes
    weights["bias"] += 0.1
    with pytest.warns(UserWarning, match=f"bias from {dtype} to {rounded}") as found:
        variables = convert.from_torch(weights, into)
    assert found[0].filename == __file__
    np.testing.assert_array_equal(variables["params"]["bias"], weights["bias"].astype(rounded))


def test_does_not_warn_of_wider_dtypes_and_counters():
    layer = nnx.Sequential(effjax.nnx.BatchNorm(2, momentum=None, rngs=nnx.Rngs(0)))
    weights = convert.to_torch(layer)
    count = next(name for name in weights if name.endswith("num_batches_tracked"))
    weights = {name: array.astype(np.float16) for name, array in weights.items()}
    with warnings.catch_warnings(action="error"):
        convert.from_torch(weights | {count: np.array(2**24 + 1)}, layer)


def test_rejects_values_that_become_infinite():
    layer = linear(param_dtype=jnp.float16)
    before = layer.kernel[...]
    with pytest.raises(ValueError, match="bias from float32 to float16"):
        convert.from_torch({"weight": W["weight"], "bias": np.full(3, 1e30, np.float32)}, layer)
    np.testing.assert_array_equal(layer.kernel[...], before)
    convert.from_torch({"weight": W["weight"], "bias": np.full(3, -np.inf)}, layer)
    assert np.isneginf(layer.bias[...]).all()


def test_rejects_an_old_and_a_new_name_of_an_array():
    table, both = convert.Table(older=((r"^old\.", ""),)), W | {"old.bias": W["bias"]}
    with pytest.raises(ValueError, match="not both bias and old.bias"):
        convert.from_torch(both, linear(), table)
    given = {f"head.{name}": array for name, array in both.items() if name != "old.bias"}
    convert.from_torch(both | given, linear(), table, prefix="head")  # not of the head


def test_abstract_module():
    layer = nnx.eval_shape(linear)
    with pytest.raises(ValueError, match="no value at bias: it is abstract"):
        convert.to_torch(layer)
    np.testing.assert_array_equal(convert.from_torch(W, layer)(jnp.ones((1, 2))), [[1, 6, 11]])


def test_pretrained_body_with_a_new_head():
    model = nnx.Sequential(linear(), nnx.Linear(3, 5, rngs=nnx.Rngs(1)))
    head = model.layers[1].kernel[...]
    table = convert.Table({"body": "layers.0", "head": "layers.1"})
    weights = {f"body.{name}": array for name, array in W.items()}
    with pytest.raises(ValueError, match="missing: head.bias, head.weight.$"):
        convert.from_torch(weights, model, table)
    convert.from_torch(convert.to_torch(model, table) | weights, model, table)
    np.testing.assert_array_equal(model.layers[0].bias[...], W["bias"])
    np.testing.assert_array_equal(model.layers[1].kernel[...], head)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"left over: x0, x1, x10, x11, x12 and 15 more\.", {f"x{i}": 1.0 for i in range(20)}),
        (r"another shape: weight \(\(2, 3\), not \(3, 2\)\)\.", {"weight": np.ones((2, 3))}),
        (r"missing: bias, weight; left over: b\.", {"b": np.ones(1), "bias": ..., "weight": ...}),
        (r"left over: y+\.$", {"y" * 1000: np.ones(1)}),
    ],
)
def test_rejects_weights_that_do_not_match(match, change):
    layer, weights = linear(), {n: a for n, a in (W | change).items() if a is not ...}
    before = layer.kernel[...], layer.bias[...]
    with pytest.raises(ValueError, match=match) as error:
        convert.from_torch(weights, layer)
    assert len(str(error.value)) < 600
    jax.tree.map(np.testing.assert_array_equal, (layer.kernel[...], layer.bias[...]), before)


class OnAGpu:
    def __array__(self, *_args, **_kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, r"`weights\['bias'\]`.*complex", {"weights": W | {"bias": 1j * W["bias"]}}),
        (TypeError, "bias.* must be floating point", {"weights": W | {"bias": np.ones(3, int)}}),
        (TypeError, r"bias.*cuda:0.*\.detach\(\)\.cpu\(\)", {"weights": W | {"bias": OnAGpu()}}),
        (ValueError, "begin with 'a.', not bias, weight", {"prefix": "a"}),
        (TypeError, "`into` must be .* not a Dense; .* `init`", {"into": nn.Dense(3)}),
        (TypeError, "arrays by name, not a str. Read the file with .*load_w", {"weights": "a.pth"}),
        (TypeError, "`weights` must be arrays by name, not a list", {"weights": [W["bias"]]}),
        (TypeError, "`table` must be a Table", {"table": {"a": "b"}}),
        (TypeError, "`table` must have strings", {"table": convert.Table({"a": 5})}),
        (TypeError, "`table` must have strings", {"table": convert.Table(below=5)}),
        (ValueError, "`table` maps 'a{i}' to 'b'", {"table": convert.Table({"a{i}": "b"})}),
    ],
)
def test_rejects_wrong_arguments(error, match, arguments):
    with pytest.raises(error, match=match):
        convert.from_torch(**dict(weights=W, into=linear()) | arguments)


def test_names_a_missing_prefix():
    for prefix in ("module", "module.head"):
        weights = {f"{prefix}.{name}": array for name, array in W.items()}
        with pytest.raises(ValueError, match=f"left over: .* Pass prefix='{prefix}'"):
            convert.from_torch(weights, linear())
        assert convert.from_torch(weights, linear(), prefix=prefix).bias[0] == 0
    with pytest.raises(ValueError, match=r"Pass prefix='module.head'\."):
        convert.from_torch(weights, linear(), prefix="module")
    with pytest.raises(ValueError, match=r"left over: module.head.weight\.$"):
        convert.from_torch({"module.head.weight": W["weight"]}, linear())


@pytest.mark.parametrize(
    ("table", "epsilon"), [(convert.RESNET, 1e-5), (convert.MASKRCNN_RESNET, 0.0)]
)
def test_warns_of_another_epsilon(table, epsilon):
    """A weight file does not contain the epsilon of its batch norms, which changes all results."""

    def make(epsilon):
        options = dict(stage_sizes=(1,), width=2, num_classes=None, epsilon=epsilon)
        return nnx.eval_shape(lambda: models.ResNet(**options, rngs=nnx.Rngs(0)))

    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), nnx.state(make(epsilon)))
    weights = convert.to_torch(zeros, table)
    with warnings.catch_warnings(action="error"):
        convert.from_torch(weights, make(epsilon), table)
        convert.from_torch(weights, make(1e-3), table._replace(epsilon=1e-3))
        convert.from_torch(weights, make(1e-3), table._replace(epsilon=None))
    other = 1e-5 - epsilon
    message = f"epsilon={other}, and weights of `table` come from ones with epsilon={epsilon}"
    with pytest.warns(UserWarning, match=message) as found:
        convert.from_torch(weights, make(other), table)
    assert found[0].filename == __file__
    parts = {"body": ("body", table), "fpn": ("fpn", convert.PYRAMID)}
    assert convert.join_tables(parts).epsilon == epsilon


def test_names_of_like():
    layer = convert.from_torch(W, linear())
    like = {"bias": W["bias"], "weight": W["weight"]}
    assert list(convert.to_torch(layer, like=like)) == ["bias", "weight"]
    like = {"extra.weight": W["weight"]} | {f"a.{name}": array for name, array in W.items()}
    assert list(convert.to_torch(layer, prefix="a", like=like)) == ["a.weight", "a.bias"]


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "`like` must match .* missing: bias", {"like": {"weight": W["weight"]}}),
        (ValueError, "left over: extra", {"like": W | {"extra": W["weight"]}}),
        (
            ValueError,
            "Pass prefix='a'",
            {"like": {f"a.{n}": array for n, array in W.items()}},
        ),
        (ValueError, "`like` must have one array for bias", {"like": W | {"old.bias": W["bias"]}}),
        (TypeError, "`like` must be arrays by name, not a str", {"like": "weights.pth"}),
        (TypeError, "`variables` must be .* not a Dense", {"variables": nn.Dense(3)}),
    ],
)
def test_to_torch_rejects_wrong_arguments(error, match, options):
    table = convert.Table(older=((r"^old\.", ""),))
    with pytest.raises(error, match=match):
        convert.to_torch(**dict(variables=linear(), table=table) | options)


def test_rejects_two_arrays_of_one_name():
    with pytest.raises(ValueError, match="gives two arrays the name a.bias"):
        convert.to_torch(nnx.Sequential(linear(), linear()), convert.Table({"a": "layers.{i}"}))


def test_separate_offset_and_mask_convolutions():
    # The page "Coming from PyTorch" joins them in this way.
    rngs, options = nnx.Rngs(0), dict(padding=1, rngs=nnx.Rngs(1))
    offset, mask = (nnx.Conv(2, taps, (3, 3), rngs=rngs) for taps in (18, 9))
    layer = effjax.nnx.DeformConv(2, 4, 3, predict_offset=True, modulated=True, **options)
    weights = convert.to_torch(offset, prefix="offset") | convert.to_torch(mask, prefix="mask")
    weights |= {"weight": np.ones((4, 2, 3, 3)), "bias": np.zeros(4)}
    for name in ("weight", "bias"):
        parts = weights.pop(f"offset.{name}"), weights.pop(f"mask.{name}")
        weights[f"conv_offset.{name}"] = np.concatenate(parts)
    convert.from_torch(weights, layer, convert.DEFORM_CONV)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 6, 2)), jnp.float32)
    kernel, modulation = jnp.ones((3, 3, 2, 4)), jax.nn.sigmoid(mask(x))
    want = effjax.deform_conv2d(x, offset(x), kernel, modulation, padding=1)
    np.testing.assert_allclose(layer(x), want, atol=1e-4)


def test_weights_without_the_offsets_of_deformable_stages():
    def make(dcn):
        return models.ResNet(
            stage_sizes=(1, 1), width=4, num_classes=2, stage_with_dcn=(False, dcn),
            rngs=nnx.Rngs(0),
        )  # fmt: skip

    plain, model = convert.to_torch(make(False), convert.RESNET), make(True)
    with pytest.raises(ValueError, match=r"begin at zero.*pass to_torch\(into, table\) \| weights"):
        convert.from_torch(plain, model, convert.RESNET)
    convert.from_torch(convert.to_torch(model, convert.RESNET) | plain, model, convert.RESNET)
    del plain["fc.bias"]  # another name is missing too
    with pytest.raises(ValueError, match=r"missing: fc\.bias, .*conv_offset\.weight\.$"):
        convert.from_torch(plain, model, convert.RESNET)


def test_roi_pooling_of_mmcv():
    # mmcv flattens [C, rows, columns], and its offsets are [2, rows, columns].
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 9, 2)), jnp.float32)
    boxes = jnp.asarray([[[1, 1, 7, 6], [0, 2, 5, 8]]], jnp.float32)
    rng = np.random.default_rng(1)
    shapes = {"offset_fc.0": (5, 12), "offset_fc.2": (5, 5), "offset_fc.4": (12, 5)}
    shapes |= {"mask_fc.0": (5, 12), "mask_fc.2": (6, 5)}
    theirs = {f"{name}.weight": rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    theirs |= {f"{n}.bias": rng.normal(size=s[0]).astype(np.float32) for n, s in shapes.items()}

    def fc(name, x):
        return x @ theirs[f"{name}.weight"].T + theirs[f"{name}.bias"]

    options = dict(output_size=(2, 3), sampling_ratio=2)
    flat = effjax.deform_roi_pool(x, boxes, **options)[0].transpose(0, 3, 1, 2).reshape(2, 12)
    hidden = jax.nn.relu(fc("offset_fc.2", jax.nn.relu(fc("offset_fc.0", flat))))
    offset = fc("offset_fc.4", hidden).reshape(1, 2, 2, 2, 3).transpose(0, 1, 3, 4, 2)
    mask = jax.nn.sigmoid(fc("mask_fc.2", jax.nn.relu(fc("mask_fc.0", flat))))
    want = effjax.deform_roi_pool(x, boxes, offset, **options) * mask.reshape(1, 2, 2, 3, 1)

    given = dict(sampling_ratio=2, rngs=nnx.Rngs(0))
    layer = effjax.nnx.ModulatedDeformRoIPoolPack((2, 3), 2, 5, **given)
    convert.from_torch(theirs, layer, convert.DEFORM_ROI_POOL)
    np.testing.assert_allclose(layer(x, boxes), want, atol=1e-5)
    back = convert.to_torch(layer, convert.DEFORM_ROI_POOL)
    for name, array in theirs.items():
        np.testing.assert_array_equal(back[name], array)
