"""DenseNet and ResNet in both flavors; all forms of them compute the same function, in float64."""

import functools
import pickle
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx, serialization
from jax.sharding import PartitionSpec as P

import effjax
from effjax import models
from effjax.convert.networks import NETWORKS
from effjax.memory import residual_bytes
from effjax.models import linen as linen_models
from tests.contexts import CONTEXTS, assert_trees_close, single_device
from tests.models.flavors import FLAVORS, assert_same_shapes, draw, make_form, train_step
from tests.tiers import vary

# Forms: they compute what the plain nnx network does.

VARIANTS: dict[str, dict[str, Any]] = {
    "DenseNet": dict(growth_rate=4, block_config=(2, 2), num_init_features=8, drop_rate=0.2),
    "bottleneck": dict(stage_sizes=(1, 2)),  # the last block has no convolution in its shortcut
    "stride in 1x1": dict(stride_in_1x1=True, small_inputs=True),
    "deformable": dict(
        stage_with_dcn=(False, True), offset_groups=2, inner_width=8, feature_group_count=4
    ),
    "basic, v1": dict(
        bottleneck=False, stage_with_dcn=(False, True), modulated=False, num_classes=None
    ),
    "vd": dict(deep_stem=True, pool_shortcut=True, bottleneck=False),
    "frozen norm": dict(frozen_norm=True, epsilon=0.0),
    "frozen stage": dict(bottleneck=False, frozen_stages=1),
}
RESNET: dict[str, Any] = dict(
    stage_sizes=(1, 1), width=4, num_classes=3, unbiased_running_var=True
)  # fmt: skip
IMAGES = np.random.default_rng(1).normal(size=(3, 17, 14, 3))  # of odd sizes


def make_variant(flavor, variant, **options):
    if variant == "DenseNet":
        network, own = "DenseNet", dict(num_classes=3, unbiased_running_var=True)
    else:
        network, own = "ResNet", RESNET
    return make_form(flavor, network, **own | VARIANTS[variant] | options)


def run(model, values, is_linen=False):
    """Return the results of a training step with dropout and a mask."""
    key = jax.random.key(7)
    if not is_linen:  # linen makes this key of it
        key = linen_models.DenseNet().bind({}, rngs={"dropout": key}).make_rng("dropout")
    return train_step(model, values, IMAGES, mask=np.array([True, True, False]), key=key)


@functools.cache
def reference(variant):
    """Return values, and what the plain nnx network computes with them."""
    plain = make_variant("nnx", variant, efficient=False)
    values = [draw(names) for names in plain.names(IMAGES)]
    return values, run(plain, values)


def check_form(variant, flavor, **form):
    """Compare outputs, all gradients and running statistics."""
    values, want = reference(variant)
    model = make_variant(flavor, variant, **form)
    assert_same_shapes(model.names(IMAGES), values)
    tolerance = 1e-12 if variant == "DenseNet" else 1e-11
    assert_trees_close(run(model, values, flavor == "linen"), want, tolerance)


PLAIN = dict(efficient=False)
CONV = dict(save="conv")
FEATURES = dict(save="features")
CHUNKS = dict(save="features", chunk_size=3)


@pytest.mark.parametrize(
    ("variant", "flavor", "form"),
    [("DenseNet", "linen", CHUNKS), ("deformable", "linen", CONV), ("deformable", "nnx", FEATURES)],
)
def test_forms_match_plain_nnx(variant, flavor, form, x64):
    check_form(variant, flavor, **form)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "flavor", "form"),
    [
        ("DenseNet", "nnx", CONV),
        ("DenseNet", "nnx", CHUNKS),
        ("DenseNet", "linen", PLAIN),
        ("bottleneck", "nnx", CONV),
        ("stride in 1x1", "linen", PLAIN),
        ("basic, v1", "nnx", CONV),
        ("frozen norm", "linen", CONV),
        ("frozen stage", "nnx", FEATURES),
    ],
)
def test_other_forms_match_plain_nnx(variant, flavor, form, x64):
    check_form(variant, flavor, **form)


def test_every_parameter_learns(x64):
    _, want = reference("deformable")
    assert all(np.abs(g).max() > 0 for g in want["dparams"].values())
    offsets = {name for name in want["dparams"] if "offset_conv" in name}
    assert {name.split(".conv2")[0] for name in offsets} == {"stages.1.0"}


def test_frozen_norms_are_constants(x64):
    values, got = reference("frozen norm")
    for name, array in got["dparams"].items():
        assert bool(np.any(array)) is not ("norm" in name), name
    jax.tree.map(np.testing.assert_array_equal, got["stats"], values[1])
    model = make_variant("nnx", "frozen norm")
    evaluated = jax.jit(functools.partial(model, train=False))(*values, IMAGES)[0]
    assert_trees_close(got["y"], evaluated, 1e-12)


def test_frozen_stages_are_constants(x64):
    values, got = reference("frozen stage")
    for name, array in got["dparams"].items():
        assert np.any(array) == name.startswith(("stages.1", "classifier")), name
    assert not np.any(got["dx"])
    for name, array in got["stats"].items():
        assert np.array_equal(array, values[1][name]) != name.startswith("stages.1"), name


@vary("context", ["shard_map_of_grad", "vmap_of_grad", "jit_explicit"])
def test_statistics_over_devices(context, x64):
    """Eight devices compute what one computes on the whole batch, with a deformable stage."""
    options = RESNET | dict(
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
def test_features(flavor, x64):
    options = RESNET | dict(stage_sizes=(1, 1, 1, 1), efficient=False)
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
    model = nnx.eval_shape(lambda: models.ResNet(**RESNET, **options, rngs=nnx.Rngs(0)))
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


# What both have in common.

OPTIONS: dict[str, Any] = {
    "DenseNet": dict(block_config=(2, 1), growth_rate=2, num_init_features=4, num_classes=3),
    "ResNet": dict(stage_sizes=(1, 2), width=2, num_classes=3),
}
# Norms of stem, layers, transition and head, or of stem and blocks with their shortcuts.
NUM_NORMS = {"DenseNet": 1 + 3 * 2 + 1 + 1, "ResNet": 1 + 4 + 4 + 3}
X = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
networks = pytest.mark.parametrize("name", OPTIONS)


def make_nnx(name, **options):
    """Return a network whose arrays are shapes."""
    network = getattr(models, name)
    return nnx.eval_shape(lambda: network(**OPTIONS[name] | options, rngs=nnx.Rngs(0)))


def make_linen(name, **options):
    return getattr(linen_models, name)(**OPTIONS[name] | options)


@networks
def test_evaluation_uses_running_stats(name, x64):
    """Images are independent, nothing changes, and both flavors agree, also in `features`."""
    x = X[:, :8, :8].astype(np.float64)
    options = OPTIONS[name] | dict(small_inputs=True)
    scaled = np.concatenate([x[:1], 5 * x[1:]])
    runs, values = [], None
    for flavor in FLAVORS:
        model = make_form(flavor, name, **options)
        names = model.names(x)
        values = values or [draw(arrays) for arrays in names]
        run = functools.partial(model, train=False)

        @jax.jit
        def evaluate(params, stats, x, run=run):
            return run(params, stats, x), run(params, stats, x, method="features")[0]

        (logits, stats), features = evaluate(*values, x)
        jax.tree.map(np.testing.assert_array_equal, stats, values[1])
        np.testing.assert_allclose(evaluate(*values, scaled)[0][0][0], logits[0], rtol=1e-12)
        assert model.model.feature_channels == tuple(f.shape[-1] for f in features)
        runs.append((logits, features))
    assert_trees_close(runs[0], runs[1], 1e-12)
    logits, features = runs[0]
    assert features[-1].min() == 0  # after ReLU
    head = values[0]["classifier.kernel"], values[0]["classifier.bias"]
    assert_trees_close(features[-1].mean((1, 2)) @ head[0] + head[1], logits, 1e-12)


@networks
def test_every_norm_is_synchronized(name):
    options = dict(axis_name="data", axis_index_groups=4)
    nodes = [node for _, node in nnx.iter_modules(make_nnx(name, **options))]
    norms = [node for node in nodes if isinstance(node, nnx.BatchNorm)]
    assert len(norms) == NUM_NORMS[name]
    for norm in norms:
        assert type(norm) is effjax.nnx.BatchNorm
        assert norm.axis_name == "data" and norm.axis_index_groups == 4


@vary("name", ["ResNet", "DenseNet"])
def test_linen_variables(name):
    """They are the same in every form, and initialization does not change running statistics."""
    shapes = jax.eval_shape(make_linen(name, efficient=False).init, jax.random.key(0), X)
    model = make_linen(name, axis_name="absent")  # initialization needs no axis
    variables = jax.jit(functools.partial(model.init, train=True))(jax.random.PRNGKey(0), X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)
    for path, value in jax.tree_util.tree_leaves_with_path(variables["batch_stats"]):
        np.testing.assert_array_equal(value, float(path[-1].key == "var"))
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    assert jax.eval_shape(make_linen(name).apply, restored, X).shape == (4, 3)
    train = functools.partial(make_linen(name).apply, train=True)
    _, new = jax.eval_shape(functools.partial(train, mutable=["batch_stats"]), shapes, X)
    assert new == {"batch_stats": shapes["batch_stats"]}
    with pytest.raises(errors.ModifyScopeVariableError, match="batch_stats"):
        jax.eval_shape(train, shapes, X)


def test_linen_variables_must_match():
    model = make_linen("ResNet")
    shapes = jax.eval_shape(model.init, jax.random.key(0), X[..., :2])
    jax.eval_shape(model.apply, shapes, X[..., :2])  # the number of channels is that of the images
    params = shapes["params"]
    for wrong, match in (
        ({"params": params}, r"batch_stats/\S+ has shape None.* needs \(2,\)"),
        (shapes | {"params": params | {"fc": params["classifier"]}}, r"fc/bias .* needs None"),
        (shapes | {"params": params | {"classifier": params["stem_conv"]}}, "params/classifier/"),
    ):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(model.apply, wrong, X[..., :2])
    with pytest.raises(ValueError, match=r"stem_conv/kernel has shape \(7, 7, 2, 2\)"):
        jax.eval_shape(model.apply, shapes, X)


def test_linen_network_in_a_module():
    """A network is a submodule like others, also of a recomputed or frozen module."""

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            options = OPTIONS["ResNet"] | dict(num_classes=None, frozen_norm=True)
            backbone = linen.remat(linen_models.ResNet, static_argnums=(2,))(**options)
            return linen.Dense(3)(backbone(x, train))

    model = Classifier()
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    assert "stem_conv" in shapes["params"]["CheckpointResNet_0"]
    loss = lambda v, x: model.apply(v, x, train=True).sum()  # noqa: E731  # no statistics change
    assert jax.eval_shape(jax.grad(loss), shapes, X) == shapes


@pytest.mark.parametrize("name", NETWORKS)
def test_published_networks(name):
    """They are those that `effjax convert` reads, and options override theirs."""
    make, _ = NETWORKS[name]
    constructor = getattr(models, name)
    assert constructor(make.func) == make()
    assert constructor(make.func, num_classes=7) == make(num_classes=7)
    assert pickle.loads(pickle.dumps(constructor)) is constructor


def test_densenets_of_other_depths():
    model = models.densenet_cifar(22, 8, linen_models.DenseNet, num_classes=100)
    assert model.block_config == (3, 3, 3) and model.num_init_features == 16
    assert model.small_inputs and model.growth_rate == 8 and model.num_classes == 100


@vary(
    ("name", "count"),
    [
        ("densenet40_12", 176_122),
        ("densenet100_12", 769_162),
        ("densenet121", 7_978_856),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("wide_resnet50_2", 68_883_240),
        ("resnext50_32x4d", 25_028_904),
    ],
)
def test_published_parameter_counts(name, count):
    """test_torch.py has the names and shapes of those of torchvision."""
    constructor = getattr(models, name)
    assert f"{count:,} parameters" in constructor.__doc__
    model = nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


# DenseNet in float32.

SMALL: dict[str, Any] = dict(
    growth_rate=2, block_config=(1, 1), num_init_features=4, num_classes=3, small_inputs=True
)
SMALL_X = np.random.default_rng(0).normal(size=(16, 4, 4, 3)).astype(np.float32)


def make_small(**options):
    return models.DenseNet(**SMALL | options, rngs=nnx.Rngs(0))


@nnx.jit
def train(model):
    """Return the logits and the new running statistics of one training call."""
    model = nnx.clone(model)
    return model(SMALL_X), nnx.state(model, nnx.BatchStat)


def test_models_compare_by_identity():
    model, other = nnx.eval_shape(make_small), nnx.eval_shape(make_small)
    assert model == model and model != other and len({model, other}) == 2
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert nnx.graphdef(model) != nnx.graphdef(nnx.eval_shape(lambda: make_small(epsilon=1e-3)))


def test_initial_values():
    """Kernels have He's standard deviation, in a compiled initialization too."""
    model = nnx.jit(lambda: make_small(growth_rate=32, block_config=(1,)))()
    kernel = model.blocks[0].layers[0].conv2.kernel[...]  # [3, 3, 128, 32]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 32)), rtol=0.02)
    np.testing.assert_allclose(kernel.mean(), 0, atol=1e-3)
    np.testing.assert_array_equal(model.classifier.bias[...], 0)
    np.testing.assert_array_equal(model.final_norm.scale[...], 1)


def test_bfloat16_keeps_float32_state():
    model, reference = (
        make_small(block_config=(1,), dtype=dtype) for dtype in (jnp.bfloat16, None)
    )
    logits, stats = train(model)
    want, want_stats = train(reference)
    assert logits.dtype == jnp.float32
    assert all(v.dtype == jnp.float32 for v in jax.tree.leaves((stats, nnx.state(model))))
    np.testing.assert_allclose(logits, want, atol=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), stats, want_stats)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s, copy=True)(x))(state, SMALL_X)
    assert "bf16[16,4,4,6]" in str(jaxpr)  # the features of the first block
    # `momentum` is applied once per step; efficient_densenet_pytorch applies it twice.
    x = reference.stem_conv(jnp.asarray(SMALL_X))
    norm1 = want_stats["blocks"][0]["layers"][0]["norm1"]
    np.testing.assert_allclose(norm1["mean"][...], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(norm1["var"][...], 0.9 + 0.1 * x.var((0, 1, 2)), rtol=1e-6)


def test_dropout_requires_a_key_in_training():
    model = nnx.eval_shape(lambda: make_small(drop_rate=0.5))
    with pytest.raises(TypeError, match="`rngs` must be a single PRNG key"):
        model(SMALL_X)
    model.eval()
    assert nnx.eval_shape(lambda m, x: m(x), model, SMALL_X).shape == (16, 3)


@vary("efficient", [False, True])
def test_dropout_keys(efficient):
    """A key is used as it is; an Rngs and its stream draw one from `dropout`."""
    graphdef, state = nnx.split(make_small(drop_rate=0.5, efficient=efficient, block_config=(1,)))

    @jax.jit
    def call(key):
        def logits(rngs):
            return nnx.merge(graphdef, state, copy=True)(SMALL_X, rngs=rngs)

        rngs = [nnx.Rngs(dropout=key) for _ in range(3)]
        return logits(key), logits(rngs[0].dropout()), logits(rngs[1]), logits(rngs[2].dropout)

    raw, drawn, of_rngs, of_stream = call(jax.random.key(3))
    np.testing.assert_array_equal(of_rngs, drawn)
    np.testing.assert_array_equal(of_stream, drawn)
    assert np.abs(raw - drawn).max() > 1e-3


def test_frozen_norms_stay_frozen():
    """A block with a norm in evaluation mode falls back to the plain layers."""
    networks = [make_small(efficient=efficient) for efficient in (True, False)]
    for model in networks:
        model.blocks[0].layers[0].norm1.use_running_average = True
        model.transitions[0].norm.use_running_average = True
    (logits, stats), (want, want_stats) = (train(model) for model in networks)
    chex.assert_trees_all_close((logits, stats), (want, want_stats), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats["blocks"][0]["layers"][0]["norm1"]["mean"][...], 0)
    assert (stats["blocks"][0]["layers"][0]["norm2"]["mean"][...] != 0).all()


@networks
def test_rejects_bad_images(name):
    model = make_nnx(name)
    for x in (X[..., :1], X[:, :0], X[0]):
        with pytest.raises(ValueError, match=r"must be \[N, H, W, 3\]"):
            model(jnp.asarray(x))


@pytest.mark.parametrize(("small", "size"), [(True, 2), (False, 5)])
def test_smallest_images(small, size):
    model = nnx.eval_shape(lambda: make_small(small_inputs=small))
    images = lambda size: jnp.zeros((2, 8, size, 3))  # noqa: E731
    assert nnx.eval_shape(lambda m: m(images(size)), model).shape == (2, 3)
    with pytest.raises(ValueError, match=rf"must be \[N, H, W, 3\].* at least {size}"):
        nnx.eval_shape(lambda m: m(images(size - 1)), model)


@pytest.mark.parametrize(
    ("network", "argument", "value", "error"),
    [
        ("DenseNet", "drop_rate", 1.0, ValueError),
        ("DenseNet", "compression", 0.1, ValueError),
        ("DenseNet", "block_config", (), ValueError),
        ("ResNet", "stage_with_dcn", (True,), ValueError),
        ("ResNet", "frozen_stages", 5, ValueError),
        ("ResNet", "frozen_stages", 1.5, TypeError),
        ("ResNet", "feature_group_count", 3, ValueError),
    ],
)
def test_rejects_bad_options(network, argument, value, error):
    for make in (make_nnx, make_linen):
        with pytest.raises(error, match=f"`{argument}`"):
            make(network, **{argument: value})


def test_rejects_options_of_other_networks():
    with pytest.raises(ValueError, match="need bottleneck=True"):
        make_linen("ResNet", bottleneck=False, inner_width=8)
    with pytest.raises(ValueError, match="`depth`"):
        models.densenet_cifar(39)
