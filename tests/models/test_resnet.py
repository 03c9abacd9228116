"""ResNet in both flavors; all forms of it compute the same function, in float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from effjax import models
from effjax.memory import residual_bytes
from effjax.models import linen as linen_models
from tests.contexts import CONTEXTS, assert_trees_close, single_device
from tests.models.flavors import assert_same_shapes, draw, make_form, train_step
from tests.tiers import vary

OPTIONS: dict[str, Any] = dict(
    stage_sizes=(1, 1), width=4, num_classes=3, unbiased_running_var=True
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "bottleneck": dict(stage_sizes=(1, 2)),  # the last block has no convolution in its shortcut
    "stride in 1x1": dict(stride_in_1x1=True, small_inputs=True),
    "deformable": dict(
        stage_with_dcn=(False, True), offset_groups=2, inner_width=8, feature_group_count=4
    ),
    "basic, v1": dict(
        bottleneck=False, stage_with_dcn=(False, True), modulated=False, num_classes=None
    ),
    "frozen norm": dict(frozen_norm=True, epsilon=0.0),
    "frozen stage": dict(bottleneck=False, frozen_stages=1),
}
X = np.random.default_rng(1).normal(size=(3, 17, 14, 3))
MASK = np.array([True, True, False])


pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def reference(variant):
    """Return values, and what the plain nnx network computes with them."""
    plain = make_form("nnx", "ResNet", **OPTIONS | VARIANTS[variant], efficient=False)
    values = [draw(names) for names in plain.names(X)]
    return values, train_step(plain, values, X, mask=MASK)


def check_form(variant, form):
    """Compare outputs, all gradients and running statistics, with a mask and odd image sizes."""
    values, want = reference(variant)
    flavor, save = form.split()
    options = dict(efficient=False) if save == "plain" else dict(save=save)
    model = make_form(flavor, "ResNet", **OPTIONS | VARIANTS[variant] | options)
    assert_same_shapes(model.names(X), values)
    assert_trees_close(train_step(model, values, X, mask=MASK), want, 1e-11)


@pytest.mark.parametrize("form", ["linen conv", "nnx features"])
def test_forms_match_plain_nnx(form):
    check_form("deformable", form)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "form"),
    [
        ("bottleneck", "nnx conv"),
        ("stride in 1x1", "linen plain"),
        ("basic, v1", "nnx conv"),
        ("frozen norm", "linen conv"),
        ("frozen stage", "nnx features"),
    ],
)
def test_variants_match_plain_nnx(variant, form):
    check_form(variant, form)


def test_every_parameter_learns():
    _, want = reference("deformable")
    assert all(np.abs(g).max() > 0 for g in want["dparams"].values())
    offsets = {name for name in want["dparams"] if "offset_conv" in name}
    assert {name.split(".conv2")[0] for name in offsets} == {"stages.1.0"}


def test_frozen_norms_are_constants():
    values, got = reference("frozen norm")
    for name, array in got["dparams"].items():
        assert bool(np.any(array)) is not ("norm" in name), name
    jax.tree.map(np.testing.assert_array_equal, got["stats"], values[1])
    model = make_form("nnx", "ResNet", **OPTIONS | VARIANTS["frozen norm"])
    evaluated = jax.jit(functools.partial(model, train=False))(*values, X)[0]
    assert_trees_close(got["y"], evaluated, 1e-12)


def test_frozen_stages_are_constants():
    values, got = reference("frozen stage")
    for name, array in got["dparams"].items():
        assert np.any(array) == name.startswith(("stages.1", "classifier")), name
    assert not np.any(got["dx"])
    for name, array in got["stats"].items():
        assert np.array_equal(array, values[1][name]) != name.startswith("stages.1"), name


@vary("context", ["shard_map_of_grad", "vmap_of_grad", "jit_explicit"])
def test_statistics_over_devices(context):
    """Eight devices compute what one computes on the whole batch, with a deformable stage."""
    options = OPTIONS | dict(
        stage_sizes=(1,), stage_with_dcn=(True,), small_inputs=True, bottleneck=False
    )
    rng = np.random.default_rng(3)
    batch = {"x": rng.normal(size=(16, 5, 4, 3)), "w": rng.normal(size=(16, 3))}
    batch["mask"] = np.arange(16) % 5 > 0
    values = [draw(names) for names in make_form("nnx", "ResNet", **options).names(None)]

    def op(params, batch, axis_name):
        model = make_form("nnx", "ResNet", **options, axis_name=axis_name)
        return model(params, values[1], batch["x"], mask=batch["mask"])

    want = single_device(op, values[0], batch)
    assert_trees_close(CONTEXTS[context](op, values[0], batch), want, 1e-10)


@vary("flavor", ["linen", "nnx"])
def test_features(flavor):
    options = OPTIONS | dict(stage_sizes=(1, 1, 1, 1), efficient=False)
    headless = make_form(flavor, "ResNet", **options | dict(num_classes=None), dtype=jnp.float64)
    x = np.ones((1, 65, 90, 3))
    shapes = headless.names(x)
    assert not any("classifier" in name for name in shapes[0])
    run = functools.partial(headless, train=False)
    features = jax.eval_shape(functools.partial(run, method="features"), *shapes, x)[0]
    assert [f.shape for f in features] == [
        (1, 17, 23, 16), (1, 9, 12, 32), (1, 5, 6, 64), (1, 3, 3, 128)
    ]  # fmt: skip
    assert headless.model.feature_channels == tuple(f.shape[-1] for f in features)
    pooled = jax.eval_shape(run, *shapes, x)[0]
    assert pooled.shape == (1, 128)


def split_network(**options):
    """Return a network as a function, and the shapes of its parameters and statistics."""
    model = nnx.eval_shape(lambda: models.ResNet(**OPTIONS, **options, rngs=nnx.Rngs(0)))
    graphdef, params, stats = nnx.split(model, nnx.Param, ...)
    return lambda p, s, x: nnx.merge(graphdef, p, s, copy=True)(x), params, stats


@vary(("save", "more"), [("conv", 2 + 2), ("features", 1 + 2 * 3 + 2)])
def test_recomputed_operations(save, more, mesh8):
    """The last convolutions of blocks and shortcuts, or all convolutions, but no all-reduce."""

    def counts(**options):
        run, params, stats = split_network(axis_name="data", **options)
        loss = lambda *args: jax.lax.pmean(run(*args).sum(), "data")  # noqa: E731
        specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
        grad = jax.shard_map(jax.grad(loss), mesh=mesh8, **specs)
        x = jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32)
        text = str(jax.make_jaxpr(grad)(params, stats, x))
        return len(re.findall(r"= psum\w*\[", text)), text.count("conv_general_dilated[")

    plain = counts(efficient=False)
    assert counts(save=save) == (plain[0], plain[1] + more)


def test_kept_bytes():
    def kept_bytes(**options):
        run, *shapes = split_network(**options)
        params, stats = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        x = np.zeros((8, 33, 32, 3), np.float32)
        return residual_bytes(lambda p: run(p, stats, x).sum(), params).bytes - x.nbytes

    plain, conv, features = kept_bytes(efficient=False), kept_bytes(), kept_bytes(save="features")
    assert conv < 0.45 * plain and features < 0.6 * conv


def test_half_precision():
    """Features are computed in half precision, deformable or not; logits are float32."""
    x = jnp.zeros((1, 8, 8, 3), jnp.bfloat16)
    for dtype, images in ((jnp.bfloat16, x.astype(jnp.float32)), (None, x)):
        options = dict(stage_sizes=(1, 1), stage_with_dcn=(False, True), width=2, dtype=dtype)
        model = nnx.eval_shape(lambda o=options: models.ResNet(**o, rngs=nnx.Rngs(0)))
        features, y = nnx.eval_shape(lambda m, x: (m.features(x), m(x)), model, images)
        assert {f.dtype for f in features} == {jnp.dtype(jnp.bfloat16)}
        assert y.dtype == jnp.float32


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "`stage_with_dcn`", dict(stage_with_dcn=(True,))),
        (ValueError, "`frozen_stages`", dict(frozen_stages=5)),
        (TypeError, "`frozen_stages`", dict(frozen_stages=1.5)),
        (ValueError, "need bottleneck=True", dict(bottleneck=False, inner_width=8)),
        (ValueError, "`feature_group_count`", dict(feature_group_count=3)),
    ],
)
def test_rejects_bad_options(error, argument, options):
    for network in (functools.partial(models.ResNet, rngs=nnx.Rngs(0)), linen_models.ResNet):
        with pytest.raises(error, match=argument):
            network(**OPTIONS | options)
