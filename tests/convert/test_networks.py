"""Networks and layers with PyTorch's weights reproduce PyTorch's results in float64."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import effjax.linen
import effjax.nnx
from effjax import convert, models
from effjax.convert.tables import SAME_NAMES
from effjax.models import linen as linen_models
from tests.convert import cases

pytestmark = pytest.mark.usefixtures("x64")

SMALL = dict(
    growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2, num_classes=3,
    unbiased_running_var=True, param_dtype="float64",
)  # fmt: skip
NORM = dict(unbiased_running_var=True, param_dtype="float64")
PACK = dict(
    padding=1, feature_group_count=2, offset_groups=2, param_dtype="float64"
)  # fmt: skip
RESNET = dict(stage_sizes=(1, 1), width=2, unbiased_running_var=True, param_dtype="float64")
DEFORMED = RESNET | dict(stage_with_dcn=(False, True), offset_groups=2, num_classes=None)
EXTRAS = dict(extra_levels=2, extra="conv", param_dtype="float64")
DETECTOR = convert.join_tables(
    {"backbone": ("backbone", convert.RESNET), "neck": ("neck", convert.PYRAMID)}
)
# maskrcnn-benchmark's DFConv2d has its kernel in a submodule `conv`.
DFCONV2D = convert.Table({"offset": "offset_conv"}, below="conv")
TABLES = {
    "resnet": convert.RESNET, "detector": DETECTOR,
    "densenet": convert.DENSENET, "batch_norm": SAME_NAMES, "cumulative_batch_norm": SAME_NAMES,
    "pack": convert.DEFORM_CONV, "modulated_pack": convert.DEFORM_CONV,
    "benchmark_pack": convert.DEFORM_CONV, "dfconv": DFCONV2D,
}  # fmt: skip
DFCONV2D_OPTIONS = dict(modulated=True, padding=1, use_bias=False, param_dtype=jnp.float64)
STEPS = {"cumulative_batch_norm": 3}
allclose = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


def as_vector(levels):
    return jnp.concatenate([level.reshape(len(level), -1) for level in levels], 1)


class NnxDetector(nnx.Module):
    def __init__(self, rngs):
        self.backbone = models.ResNet(**DEFORMED, rngs=rngs)
        self.neck = models.FeaturePyramid((8, 16), 3, **EXTRAS, rngs=rngs)

    def __call__(self, x):
        return as_vector(self.neck(self.backbone.features(x)))


class LinenDetector(linen.Module):
    def setup(self):
        self.backbone = linen_models.ResNet(**DEFORMED)
        self.neck = linen_models.FeaturePyramid(3, **EXTRAS)

    def __call__(self, x, train):
        return as_vector(self.neck(self.backbone.features(x, train)))


def nnx_module(name):
    """Return the nnx module of a case."""
    rngs, layers = nnx.Rngs(0), effjax.nnx
    pack = functools.partial(layers.DeformConv, 2, 4, 3, predict_offset=True, rngs=rngs)
    module = {
        "resnet": lambda: models.ResNet(**RESNET, bottleneck=False, num_classes=3, rngs=rngs),
        "detector": lambda: NnxDetector(rngs),
        "densenet": lambda: models.DenseNet(**SMALL, rngs=rngs),
        "batch_norm": lambda: layers.BatchNorm(5, momentum=0.9, **NORM, rngs=rngs),
        "cumulative_batch_norm": lambda: layers.BatchNorm(5, momentum=None, **NORM, rngs=rngs),
        "pack": lambda: pack(2, use_bias=False, **PACK),
        "modulated_pack": lambda: pack(2, modulated=True, **PACK),
        "benchmark_pack": lambda: pack(2, modulated=True, **PACK),
        "dfconv": lambda: pack(**DFCONV2D_OPTIONS),
    }[name]()
    statistics = nnx.state(module, nnx.BatchStat)  # float32 by default
    nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.float64), statistics))
    return module


def linen_module(name):
    """Return the linen module of a case, and its call options for training and evaluation."""
    layers = effjax.linen
    conv = functools.partial(layers.DeformConv, 4, 3, predict_offset=True)
    modulated = conv(2, modulated=True, **PACK)
    module = {
        "resnet": linen_models.ResNet(**RESNET, bottleneck=False, num_classes=3),
        "detector": LinenDetector(),
        "densenet": linen_models.DenseNet(**SMALL),
        "batch_norm": layers.BatchNorm(momentum=0.9, **NORM),
        "cumulative_batch_norm": layers.BatchNorm(momentum=None, **NORM),
        "pack": conv(2, use_bias=False, **PACK),
        "modulated_pack": modulated,
        "benchmark_pack": modulated,
        "dfconv": conv(**DFCONV2D_OPTIONS),
    }[name]
    if name in ("densenet", "resnet", "detector"):
        return module, dict(train=True), dict(train=False)
    if "batch_norm" in name:
        return module, dict(use_running_average=False), dict(use_running_average=True)
    return module, {}, {}


def run_nnx(name, case):
    module = convert.from_torch(cases.select(case, "weights"), nnx_module(name), TABLES[name])
    check_round_trip(module, name, case)
    graphdef, params, _ = nnx.split(module, nnx.Param, ...)

    def loss(params, stats, x):
        module = nnx.merge(graphdef, params, stats, copy=True)
        y = module(x)
        return jnp.sum(y * case["dy"]), (y, nnx.state(module, nnx.BatchStat))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    for _ in range(STEPS.get(name, 1)):
        (_, (y, new)), grads = step(params, nnx.state(module, nnx.BatchStat), case["x"])
        nnx.update(module, new)
    module.eval()
    return y, grads, module, nnx.jit(lambda module, x: module(x))(module, case["x"])


def run_linen(name, case):
    module, train, evaluate = linen_module(name)
    init = functools.partial(module.init, **train)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64),
        jax.eval_shape(init, jax.random.key(0), case["x"]),
    )
    variables = convert.from_torch(cases.select(case, "weights"), shapes, TABLES[name])
    check_round_trip(variables, name, case)

    def loss(params, stats, x):
        variables = {"params": params, **stats}
        y, new = module.apply(variables, x, mutable=["batch_stats"], **train)
        return jnp.sum(y * case["dy"]), (y, new)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    params = variables.pop("params")
    for _ in range(STEPS.get(name, 1)):
        (_, (y, variables)), grads = step(params, variables, case["x"])
    variables = {"params": params, **variables}
    evaluated = jax.jit(functools.partial(module.apply, **evaluate))(variables, case["x"])
    return y, grads, variables, evaluated


def check_round_trip(variables, name, case):
    """Check that converting back gives the same bits under the current names."""
    want = cases.select(case, "weights")
    back = convert.to_torch(variables, TABLES[name])
    rename = "conv_offset_mask", "conv_offset"
    jax.tree.map(
        np.testing.assert_array_equal, back, {k.replace(*rename): v for k, v in want.items()}
    )
    kinds = {k.replace(*rename): (v.dtype, v.shape) for k, v in want.items()}
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == kinds
    assert_same_bits(convert.to_torch(variables, TABLES[name], like=want), want)


def assert_same_bits(got, want):
    """Assert that names, their order, dtypes and values are the same."""
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


# Both APIs share their operators and their names, so every case runs with one of them.
CASES = [
    (run_nnx, "resnet"), (run_linen, "densenet"), (run_linen, "detector"),
    (run_nnx, "cumulative_batch_norm"), (run_linen, "batch_norm"), (run_nnx, "pack"),
    (run_nnx, "benchmark_pack"), (run_linen, "dfconv"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "name"), CASES)
def test_values_gradients_and_statistics(name, run):
    case = cases.load(name)
    y, (grads, dx), after, evaluated = run(name, case)
    allclose(y, case["y"])
    allclose(dx, case["dx"])
    allclose(evaluated, case["evaluated"])
    got = convert.to_torch(grads, TABLES[name])
    want = {
        k.replace("conv_offset_mask", "conv_offset"): v
        for k, v in cases.select(case, "gradients").items()
    }
    assert got.keys() == want.keys()
    for key, array in want.items():
        allclose(got[key], array, err_msg=key)
    got = convert.to_torch(after, TABLES[name])
    for key, array in cases.select(case, "after").items():
        allclose(got[key], array, err_msg=key)
    if "num_batches_tracked" in got:
        assert got["num_batches_tracked"] == STEPS.get(name, 0)


OLDER = {
    "denselayer of torchvision 0.2": (r"(denselayer\d\.(norm|conv))(\d)", r"\1.\3"),
    "efficient_densenet_pytorch": (r"norm5", "norm_final"),
    "nn.DataParallel": (r"^", "module."),
}


@pytest.mark.parametrize("older", OLDER)
def test_older_names(older):
    weights = cases.select(cases.load("densenet"), "weights")
    renamed = {re.sub(*OLDER[older], name): array for name, array in weights.items()}
    assert renamed.keys() != weights.keys()
    prefix = "module" if older.startswith("nn") else ""
    model = convert.from_torch(renamed, nnx_module("densenet"), convert.DENSENET, prefix=prefix)
    back = convert.to_torch(model, convert.DENSENET)
    assert back.keys() == weights.keys()
    jax.tree.map(np.testing.assert_array_equal, back, weights)
    counted = {name: a + 7 if "num_batches" in name else a for name, a in renamed.items()}
    back = convert.to_torch(model, convert.DENSENET, prefix=prefix, like=counted)
    assert_same_bits(back, counted)


@pytest.mark.parametrize("below", ["conv2.conv_offset", "conv2.conv_offset_mask", "conv2_offset"])
def test_layer_inside_a_network(below):
    # `conv2_offset` is the name in old versions of mmdetection.
    weights = cases.select(cases.load("modulated_pack"), "weights")
    network = {"backbone.layer1.0.conv2.weight": np.zeros(3), "neck.weight": np.zeros(3)}
    for name, array in weights.items():
        where = name.replace("conv_offset", below) if "conv_offset" in name else f"conv2.{name}"
        network[f"backbone.layer2.0.{where}"] = array
    own = {name: array for name, array in network.items() if "layer2" in name}
    prefix = "backbone.layer2.0.conv2"
    layer = nnx_module("modulated_pack")
    convert.from_torch(network, layer, convert.DEFORM_CONV, prefix=prefix)
    back = convert.to_torch(layer, convert.DEFORM_CONV, prefix=prefix)
    assert back.keys() == {f"{prefix}.{name}" for name in weights}
    jax.tree.map(
        np.testing.assert_array_equal, back, {f"{prefix}.{n}": w for n, w in weights.items()}
    )
    back = convert.to_torch(layer, convert.DEFORM_CONV, prefix=prefix, like=network)
    assert_same_bits(back, own)


# A module for each table, with its options, and names of PyTorch's that differ from the current.
ROUND_TRIPS = {
    "DENSENET": (lambda: models.DenseNet(**SMALL, rngs=nnx.Rngs(0)), (r"norm5", "norm_final")),
    "RESNET": (lambda: models.ResNet(**DEFORMED, rngs=nnx.Rngs(0)), (r"\.conv_off", "_off")),
    "MASKRCNN_RESNET": (lambda: models.ResNet(**DEFORMED, epsilon=0, rngs=nnx.Rngs(0)), ()),
    "PYRAMID": (lambda: models.FeaturePyramid((8, 16), 3, **EXTRAS, rngs=nnx.Rngs(0)), ()),
    "MASKRCNN_PYRAMID": (lambda: models.FeaturePyramid((8, 16), 3, rngs=nnx.Rngs(0)), ()),
    "MASKRCNN_RETINANET": (lambda: retinanet(), ()),
    "TORCHVISION_PYRAMID": (
        lambda: models.FeaturePyramid((8, 16), 3, rngs=nnx.Rngs(0)), (r"\.0\.(?=[wb])", ".")
    ),
    "TORCHVISION_RETINANET": (lambda: retinanet(), (r"(blocks\.\d)\.0\.", r"\1.")),
    "DEFORM_CONV": (lambda: nnx_module("modulated_pack"), ("offset", "offset_mask")),
    "DEFORM_ROI_POOL": (
        lambda: effjax.nnx.ModulatedDeformRoIPoolPack((2, 3), 2, 5, rngs=nnx.Rngs(0)), ()
    ),
    "DCNV3": (lambda: effjax.nnx.DCNv3(8, offset_groups=2, rngs=nnx.Rngs(0)), ()),
}  # fmt: skip


def retinanet():
    return models.FeaturePyramid((4, 8, 16), 3, **EXTRAS, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_of_every_table(name):
    """Weights, and those with older names, come back with the same names, order and bits."""
    assert set(ROUND_TRIPS) == {n for n, v in vars(convert).items() if isinstance(v, convert.Table)}
    (make, older), table = ROUND_TRIPS[name], getattr(convert, name)
    like = convert.to_torch(make(), table, prefix="net")
    weights = {n: cases.random_array(n, a.shape).astype(a.dtype) for n, a in like.items()}
    weights = {n: a + 3 if "num_batches" in n else a for n, a in weights.items()}
    old = {re.sub(*older, n): a for n, a in weights.items()} if older else weights
    assert (old.keys() != weights.keys()) is bool(older)
    for given in (weights, old, dict(reversed(old.items()))):
        with warnings.catch_warnings(action="error"):
            module = convert.from_torch(given, make(), table, prefix="net")
        assert_same_bits(convert.to_torch(module, table, prefix="net", like=given), given)


def test_layer_with_another_name_of_the_offset_conv():
    # torchvision's layer has no offset convolution, so users choose its name.
    weights = cases.select(cases.load("modulated_pack"), "weights")
    renamed = {name.replace("conv_offset", "where"): array for name, array in weights.items()}
    table = convert.Table({"where": "offset_conv"})
    layer = convert.from_torch(renamed, nnx_module("modulated_pack"), table)
    back = convert.to_torch(layer, convert.DEFORM_CONV)
    jax.tree.map(np.testing.assert_array_equal, back, weights)


def maskrcnn_names():
    """Return the names of the backbone of R-50-FPN-DCN in maskrcnn-benchmark."""
    conv, norm = ["weight"], ["weight", "bias", "running_mean", "running_var"]
    names = [f"body.stem.conv1.{n}" for n in conv] + [f"body.stem.bn1.{n}" for n in norm]
    for stage, count in enumerate((3, 4, 6, 3), 1):
        for i in range(count):
            block = f"body.layer{stage}.{i}"
            second = ["offset.weight", "offset.bias", "conv.weight"] if stage > 1 else conv
            for k, of_conv in enumerate((conv, second, conv), 1):
                names += [f"{block}.conv{k}.{n}" for n in of_conv]
                names += [f"{block}.bn{k}.{n}" for n in norm]
            if i == 0:
                names += [f"{block}.downsample.0.weight"]
                names += [f"{block}.downsample.1.{n}" for n in norm]
    return names + [
        f"fpn.fpn_{kind}{level}.{name}"
        for kind in ("inner", "layer") for level in (1, 2, 3, 4) for name in ("weight", "bias")
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_names_of_maskrcnn_benchmark():
    options = dict(num_classes=None, stage_with_dcn=(False, True, True, True), frozen_norm=True)
    body = models.resnet50(linen_models.ResNet, **options, stride_in_1x1=True, epsilon=0.0)
    variables = jax.eval_shape(body.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    pyramid = linen_models.FeaturePyramid()
    levels = [jax.ShapeDtypeStruct((1, 8 >> i, 8 >> i, 256 << i), "float32") for i in range(4)]
    parts = {
        "body": (variables, convert.MASKRCNN_RESNET),
        "fpn": (jax.eval_shape(pyramid.init, jax.random.key(0), levels), convert.MASKRCNN_PYRAMID),
    }
    weights = {}
    for name, (shapes, table) in parts.items():
        zeros = jax.tree.map(lambda a: np.broadcast_to(np.float32(0), a.shape), shapes)
        weights |= convert.to_torch(zeros, table, prefix=f"module.backbone.{name}")
    assert weights.keys() == {f"module.backbone.{name}" for name in maskrcnn_names()}
    for name, (shapes, table) in parts.items():
        back = convert.from_torch(weights, shapes, table, prefix=f"module.backbone.{name}")
        assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, shapes)


def test_maskrcnn_names_give_the_same_backbone_as_mmdetection_names():
    weights = cases.select(cases.load("detector"), "weights")
    backbone = nnx_module("detector").backbone
    convert.from_torch(weights, backbone, convert.RESNET, prefix="backbone")
    theirs = convert.to_torch(backbone, convert.MASKRCNN_RESNET)
    assert "layer2.0.conv2.conv.weight" in theirs and "layer1.0.conv2.weight" in theirs
    assert not any("num_batches" in name for name in theirs)
    table = convert.MASKRCNN_RESNET._replace(epsilon=None)
    other = convert.from_torch(theirs, nnx_module("detector").backbone, table)
    mine, same = (nnx.to_pure_dict(nnx.state(m)) for m in (backbone, other))
    jax.tree.map(np.testing.assert_array_equal, mine, same)
    lost = {n.replace("conv2.conv.", "conv2."): a for n, a in theirs.items()}
    with pytest.raises(ValueError, match=r"missing: layer2\.0\.conv2\.conv\.weight"):
        convert.from_torch(lost, backbone, convert.MASKRCNN_RESNET)
