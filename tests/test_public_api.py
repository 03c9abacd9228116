"""Public names: parity of the Flax modules, the reference, and names of PyTorch."""

import pathlib
import re

import jax
import numpy as np
import pytest
from flax.nnx import Rngs

import effjax
from effjax import compat, convert, linen, memory, models, native, nnx, optimizers, train
from effjax._names import FLAX_NAMES
from effjax.models import linen as linen_models

IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32")


def ones(*shape):
    return np.ones(shape, np.float32)


def test_nnx_and_linen_have_the_same_names_except_the_documented_ones():
    page = pathlib.Path(__file__).parent.parent / "docs" / "reference" / "index.md"
    rows = page.read_text().partition("| `effjax.nnx` | `effjax.linen` | |")[2].splitlines()
    cells = [row.split("|")[1:3] for row in rows if row.startswith("| `")]
    of_nnx, of_linen = (
        {c.strip(" `") for c in column} - {""} for column in zip(*cells, strict=True)
    )
    assert of_nnx == set(dir(nnx)) - set(dir(linen)) and "OffloadOptimizer" in of_nnx
    assert of_linen == set(dir(linen)) - set(dir(nnx)) and of_linen
    assert all(f"`{name}`" in (nnx.__doc__ or "") for name in of_nnx)
    assert all(f"`{name}`" in (linen.__doc__ or "") for name in of_linen)
    assert len(set(dir(nnx)) & set(dir(linen))) >= 8


@pytest.mark.parametrize(
    "module",
    [effjax, nnx, linen, models, linen_models, convert, memory, native, optimizers, train, compat],
    ids=lambda module: module.__name__,
)  # fmt: skip
def test_dir_lists_the_documented_names(module):
    page = pathlib.Path(__file__).parent.parent / "docs" / "reference" / f"{module.__name__}.md"
    listed = re.findall(r"^(?:\.\. (?:auto\w+|data)::| {9}) (\w+)$", page.read_text(), re.M)
    modules = {"effjax": [*effjax._MODULES, "__version__"]}
    modules["effjax.models"] = ["linen"]
    assert sorted(dir(module)) == sorted([*listed, *modules.get(module.__name__, [])])
    assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize("module", [effjax, nnx, linen], ids=lambda module: module.__name__)
def test_names_of_torch_are_explained(module):
    for theirs, ours in FLAX_NAMES.items():
        assert not hasattr(module, theirs) and hasattr(nnx, ours) and hasattr(linen, ours)
        with pytest.raises(AttributeError, match=f"has no attribute '{theirs}'. It is") as error:
            getattr(module, theirs)
        places = ["effjax.nnx", "effjax.linen"] if module is effjax else [module.__name__]
        assert all(f"{place}.{ours}" in str(error.value) for place in places)
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'x'$"):
        module.x  # noqa: B018


CONV = dict(x=IMAGES, offset=IMAGES, kernel=IMAGES)
TORCH_ARGUMENTS = [
    (effjax.deform_conv2d, CONV, "weight", "kernel"),
    (effjax.deform_conv2d, CONV, "stride", "strides"),
    (effjax.deform_conv2d, CONV, "dilation", "kernel_dilation"),
    (effjax.deform_conv2d, CONV, "deformable_groups", "offset_groups"),
    (effjax.sync_batch_norm, dict(x=IMAGES), "weight", "scale"),
    (effjax.sync_batch_norm, dict(x=IMAGES), "eps", "epsilon"),
    (effjax.batch_norm_inference, dict(x=IMAGES, mean=IMAGES, var=IMAGES), "eps", "epsilon"),
    (nnx.BatchNorm, dict(num_features=3, rngs=Rngs(0)), "eps", "epsilon"),
    (linen.BatchNorm, {}, "eps", "epsilon"),
    (nnx.DeformConv, dict(in_features=1, out_features=1), "stride", "strides"),
    (linen.DeformConv, dict(features=1, kernel_size=3), "deformable_groups", "offset_groups"),
    (nnx.DenseBlock, dict(in_features=1, num_layers=1), "eps", "epsilon"),
    (linen.DenseBlock, dict(num_layers=1), "eps", "epsilon"),
    (models.DenseNet, dict(rngs=Rngs(0)), "eps", "epsilon"),
    (models.ResNet, dict(rngs=Rngs(0)), "groups", "feature_group_count"),
    (linen_models.DenseNet, {}, "eps", "epsilon"),
    (linen_models.ResNet, {}, "groups", "feature_group_count"),
]


@pytest.mark.parametrize(("function", "arguments", "theirs", "ours"), TORCH_ARGUMENTS)
def test_arguments_of_torch_are_explained(function, arguments, theirs, ours):
    name = function.__qualname__
    match = rf"^{name}\(\) has no argument `{theirs}`; it is `{ours}` here\.$"
    with pytest.raises(TypeError, match=match):
        function(**arguments, **{theirs: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        function(**arguments, no_such=1)


def test_keywords_by_position_are_explained():
    boxes = ones(1, 2, 4)
    for pool, arguments in (
        (effjax.roi_align, (IMAGES, boxes, 7)), (effjax.multiscale_roi_align, ([IMAGES], boxes, 7)),
        (effjax.deform_roi_pool, (IMAGES, boxes, None, 7)),
        (effjax.deform_psroi_pool, (IMAGES, boxes, None, 7)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"by position; `output_size` is a keyword, as in"):
            pool(*arguments)


SIZES = [
    ("MSDeformAttn", dict(features=250, num_levels=2), "`num_heads` (=8) must divide the 250"),
    *(("MSDeformAttn", {size: 0}, f"`{size}` (=0) must be an integer of at least 1")
      for size in ("features", "num_levels", "num_heads", "num_points")),
    ("DCNv3", dict(features=65), "`offset_groups` (=4) must divide the 65 features"),
    ("DCNv3", dict(features=64, offset_groups=0), "`offset_groups` (=0) must be an integer"),
    ("DeformConv", dict(offset_groups=0), "`offset_groups` (=0) must be an integer"),
    ("DeformConv", dict(offset_groups=3), "`offset_groups` (=3) must divide the 8"),
    ("DeformConv", dict(feature_group_count=0), "`feature_group_count` (=0) must be"),
    ("DeformConv", dict(feature_group_count=8), "`feature_group_count` (=8) must divide the 12"),
    ("DeformRoIPoolPack", dict(deform_fc_channels=0), "`deform_fc_channels` (=0) must be"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "options", "message"), SIZES)
def test_sizes_are_checked_when_a_layer_is_made(layer, options, message):
    """Those of linen are made at the first call."""
    inputs = {
        "MSDeformAttn": (ones(1, 5, 250), ones(1, 5, 2, 2), ones(1, 20, 250), [(4, 4), (2, 2)]),
        "DeformRoIPoolPack": (ones(1, 4, 4, 8), ones(1, 2, 4)),
    }
    required: dict = {
        "DeformConv": (
            dict(kernel_size=3, predict_offset=True),
            dict(in_features=8, out_features=12),
            dict(features=12),
        ),
        "DeformRoIPoolPack": (dict(output_size=2), dict(output_channels=8), {}),
    }
    both, of_nnx, of_linen = required.get(layer, ({}, {}, {}))
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(nnx, layer)(**both, **of_nnx, **options, rngs=Rngs(0))
    made = getattr(linen, layer)(**both, **of_linen, **options)
    images = ones(1, 8, 8, options.get("features", 8))
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(made.init, jax.random.key(0), *inputs.get(layer, (images,)))


@pytest.mark.parametrize(
    "offload",
    [
        lambda layer: effjax.offload_scan(layer, ones(2, 1), ones(3, 1), params_in="device"),
        lambda layer: effjax.offload_sequential([layer], [ones(1)], ones(3, 1), params_in="device"),
    ],
    ids=["scan", "sequential"],
)
def test_layer_without_a_key_is_explained(offload):
    run = lambda layer: jax.eval_shape(lambda: offload(layer))  # noqa: E731
    with pytest.raises(TypeError, match=r"layer\(params, x, key\), not \(w, x\)\. A layer without"):
        run(lambda w, x: w * x)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        run(lambda w, x, key: (lambda a, b: a)(x))  # an error inside of the layer
    for layer in (lambda *args: args[1], lambda w, x, key=None: x):
        run(layer)
