"""Networks and layers with PyTorch's weights reproduce PyTorch's results in float64."""

import functools
import os
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
from effjax.convert import networks
from effjax.convert.tables import SAME_NAMES
from effjax.models import linen as linen_models
from tests.convert import cases

pytestmark = pytest.mark.usefixtures("x64")

NORM = dict(unbiased_running_var=True, param_dtype="float64")
DENSENET = NORM | dict(
    growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2, num_classes=3
)
RESNET = NORM | dict(stage_sizes=(1, 1), width=2)
DEFORMED = RESNET | dict(stage_with_dcn=(False, True), offset_groups=2, num_classes=None)
EXTRAS = dict(extra_levels=2, extra="conv", param_dtype="float64")
DFCONV = dict(
    predict_offset=True, modulated=True, padding=1, use_bias=False, param_dtype="float64"
)  # fmt: skip
allclose = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


class Detector(linen.Module):
    def setup(self):
        self.backbone = linen_models.ResNet(**DEFORMED)
        self.neck = linen_models.FeaturePyramid(3, **EXTRAS)

    def __call__(self, x, train):
        levels = self.neck(self.backbone.features(x, train))
        return jnp.concatenate([level.reshape(len(level), -1) for level in levels], 1)


def nnx_module(make, *args, **options):
    """Return a module whose running statistics, which are float32 by default, are float64."""
    module = make(*args, **options, rngs=nnx.Rngs(0))
    statistics = nnx.state(module, nnx.BatchStat)
    nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.float64), statistics))
    return module


def pack(**options):
    options |= dict(padding=1, feature_group_count=2, offset_groups=2, param_dtype="float64")
    return nnx_module(effjax.nnx.DeformConv, 2, 4, 3, 2, predict_offset=True, **options)


# Tables, and functions that make modules. Both APIs share their operators and their names, so every
# case runs with one of them.
CASES = {
    "resnet": (
        convert.RESNET,
        lambda: nnx_module(models.ResNet, **RESNET, bottleneck=False, num_classes=3),
    ),
    "cumulative_batch_norm": (
        SAME_NAMES, lambda: nnx_module(effjax.nnx.BatchNorm, 5, momentum=None, **NORM)
    ),
    "pack": (convert.DEFORM_CONV, lambda: pack(use_bias=False)),
    "benchmark_pack": (convert.DEFORM_CONV, lambda: pack(modulated=True)),
    "batch_norm": (SAME_NAMES, lambda: effjax.linen.BatchNorm(momentum=0.9, **NORM)),
    "densenet": (convert.DENSENET, lambda: linen_models.DenseNet(**DENSENET)),
    "detector": (
        convert.join_tables(
            {"backbone": ("backbone", convert.RESNET), "neck": ("neck", convert.PYRAMID)}
        ),
        Detector,
    ),
    # maskrcnn-benchmark's DFConv2d has its kernel in a submodule `conv`.
    "dfconv": (
        convert.Table({"offset": "offset_conv"}, below="conv"),
        lambda: effjax.linen.DeformConv(4, 3, **DFCONV),
    ),
}  # fmt: skip
# Options of linen modules in training and in evaluation.
MODES = dict.fromkeys(("densenet", "detector"), (dict(train=True), dict(train=False)))
MODES["batch_norm"] = dict(use_running_average=False), dict(use_running_average=True)
STEPS = {"cumulative_batch_norm": 3}


def as_function(name, module, x, convert_weights):
    """Return ``(apply, params, stats)`` with converted weights.

    ``apply(params, stats, x, train)`` returns the output and new statistics.
    """
    if isinstance(module, nnx.Module):
        graphdef, params, stats = nnx.split(convert_weights(module), nnx.Param, ...)

        def apply(params, stats, x, train):
            module = nnx.merge(graphdef, params, stats, copy=True)
            module.train() if train else module.eval()
            return module(x), nnx.split(module, nnx.Param, ...)[2]

        return apply, params, stats
    modes = MODES.get(name, ({}, {}))
    shapes = jax.eval_shape(functools.partial(module.init, **modes[0]), jax.random.key(0), x)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64), shapes)
    variables = convert_weights(shapes)

    def apply(params, stats, x, train):
        variables, mode = {"params": params, **stats}, modes[0 if train else 1]
        return module.apply(variables, x, mutable=["batch_stats"], **mode)

    return apply, variables.pop("params"), variables


def assert_same_bits(got, want):
    """Assert that names, their order, dtypes and values are the same."""
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_statistics(name):
    case, (table, make) = cases.load(name), CASES[name]
    weights = cases.select(case, "weights")

    def convert_weights(into):
        variables = convert.from_torch(weights, into, table)
        assert_same_bits(convert.to_torch(variables, table, like=weights), weights)
        return variables

    apply, params, stats = as_function(name, make(), case["x"], convert_weights)

    def loss(params, stats, x):
        y, new = apply(params, stats, x, True)
        return jnp.sum(y * case["dy"]), (y, new)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    for _ in range(STEPS.get(name, 1)):
        (_, (y, stats)), (grads, dx) = step(params, stats, case["x"])
    evaluated, _ = jax.jit(functools.partial(apply, train=False))(params, stats, case["x"])
    allclose(y, case["y"])
    allclose(dx, case["dx"])
    allclose(evaluated, case["evaluated"])
    got, want = convert.to_torch(grads, table), cases.select(case, "gradients")
    want = {key.replace("offset_mask", "offset"): array for key, array in want.items()}
    assert got.keys() == want.keys()
    for key, array in want.items():
        allclose(got[key], array, err_msg=key)
    got = convert.to_torch(stats, table)
    for key, array in cases.select(case, "after").items():
        allclose(got[key], array, err_msg=key)
    if "num_batches_tracked" in got:
        assert got["num_batches_tracked"] == STEPS.get(name, 0)


def make_pyramid(channels=(8, 16), **options):
    return models.FeaturePyramid(channels, 3, **options, rngs=nnx.Rngs(0))


# A module for each table, and patterns that give names of other versions, with their replacements.
ROUND_TRIPS = {
    "DENSENET": (
        lambda: models.DenseNet(**DENSENET, rngs=nnx.Rngs(0)),
        (r"norm5", "norm_final"),  # of efficient_densenet_pytorch
        (r"(denselayer\d\.(norm|conv))(\d)", r"\1.\3"),  # of torchvision 0.2
    ),
    "RESNET": (lambda: models.ResNet(**DEFORMED, rngs=nnx.Rngs(0)), (r"\.conv_off", "_off")),
    "MASKRCNN_RESNET": (lambda: models.ResNet(**DEFORMED, epsilon=0, rngs=nnx.Rngs(0)),),
    "PYRAMID": (lambda: make_pyramid(**EXTRAS),),
    "MASKRCNN_PYRAMID": (make_pyramid,),
    "MASKRCNN_RETINANET": (lambda: make_pyramid((4, 8, 16), **EXTRAS),),
    "TORCHVISION_PYRAMID": (make_pyramid, (r"\.0\.(?=[wb])", ".")),
    "TORCHVISION_RETINANET": (
        lambda: make_pyramid((4, 8, 16), **EXTRAS), (r"(blocks\.\d)\.0\.", r"\1.")
    ),
    "DEFORM_CONV": (lambda: pack(modulated=True), ("offset", "offset_mask")),
    "DEFORM_ROI_POOL": (
        lambda: effjax.nnx.ModulatedDeformRoIPoolPack((2, 3), 2, 5, rngs=nnx.Rngs(0)),
    ),
    "DCNV3": (lambda: effjax.nnx.DCNv3(8, offset_groups=2, rngs=nnx.Rngs(0)),),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_of_every_table(name):
    """Weights, and those with older names, come back with the same names, order and bits."""
    assert set(ROUND_TRIPS) == {n for n, v in vars(convert).items() if isinstance(v, convert.Table)}
    (make, *others), table = ROUND_TRIPS[name], getattr(convert, name)
    like = convert.to_torch(make(), table, prefix="net")
    weights = {n: cases.random_array(n, a.shape).astype(a.dtype) for n, a in like.items()}
    weights = {n: a + 3 if "num_batches" in n else a for n, a in weights.items()}
    versions = [{re.sub(*other, n): a for n, a in weights.items()} for other in others]
    assert all(version.keys() != weights.keys() for version in versions)
    for given in (weights, dict(reversed(weights.items())), *versions):
        with warnings.catch_warnings(action="error"):
            module = convert.from_torch(given, nnx.eval_shape(make), table, prefix="net")
        assert_same_bits(convert.to_torch(module, table, prefix="net", like=given), given)
        assert convert.to_torch(module, table, prefix="net").keys() == weights.keys()


def test_layer_inside_a_network():
    weights = cases.select(cases.load("modulated_pack"), "weights")
    prefix, network = "backbone.layer2.0.conv2", {"neck.weight": np.zeros(3)}
    for name, array in weights.items():
        # `conv2_offset` is the name in old versions of mmdetection.
        old = f"{prefix}.{name}".replace("conv2.conv_offset", "conv2_offset")
        network |= {old: array, f"backbone.layer1.0.conv2.{name}": np.zeros(3)}
    layer = pack(modulated=True)
    convert.from_torch(network, layer, convert.DEFORM_CONV, prefix=prefix)
    back = convert.to_torch(layer, convert.DEFORM_CONV, prefix=prefix)
    assert back.keys() == {f"{prefix}.{name}" for name in weights}
    back = convert.to_torch(layer, convert.DEFORM_CONV, prefix=prefix, like=network)
    assert_same_bits(back, {name: a for name, a in network.items() if "layer2" in name})


def test_pipes_in_a_folder_are_not_read(tmp_path):
    networks.write_checkpoint(tmp_path / "new", {"params": {"a": np.ones(3)}})
    assert networks.read_checkpoint(tmp_path / "new").keys() == {"params.a"}
    os.mkfifo(tmp_path / "new" / "pipe")
    with pytest.raises(ValueError, match="pipe must be a regular file"):
        networks.read_checkpoint(tmp_path / "new")
