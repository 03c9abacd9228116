import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax.memory import residual_bytes
from effjax.models import DenseNet
from effjax.models.nnx.densenet import Transition
from effjax.nnx import BatchNorm, convert_batch_norm

OPTIONS: dict[str, Any] = dict(
    growth_rate=2, block_config=(2, 1), num_init_features=4, num_classes=3, small_inputs=True
)  # fmt: skip
X = np.random.default_rng(0).normal(size=(16, 4, 4, 3)).astype(np.float32)


def make(**options):
    return DenseNet(**OPTIONS | options, rngs=nnx.Rngs(0))


def run(model, x, **kwargs):
    """Logits of a copy of the model after one call, and its running statistics."""
    graphdef, state = nnx.split(model)

    def call(state, x):
        copy = nnx.merge(graphdef, state, copy=True)
        return copy(x, **kwargs), nnx.state(copy, nnx.BatchStat)

    return jax.jit(call)(state, x)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(block_config=()), "`block_config` is empty"),
        (dict(block_config=(2, 0)), r"`block_config` \(=\(2, 0\)\)"),
        (dict(growth_rate=0), r"`growth_rate` \(=0\)"),
        (dict(compression=0.0), r"`compression` \(=0.0\)"),
        (dict(compression=1.5), r"`compression` \(=1.5\)"),
        (dict(compression=0.1), r"`compression` \(=0.1\) leaves no channels"),
        (dict(drop_rate=1.0), r"`drop_rate` \(=1.0\)"),
        (dict(drop_rate=-0.1), r"`drop_rate` \(=-0.1\)"),
        (dict(momentum=2), r"`momentum` \(=2\)"),
        (dict(save="all"), r"`save` \(='all'\)"),
    ],
)
def test_options_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        make(**options)


@pytest.mark.parametrize(
    "options, shape, match",
    [
        ({}, (2, 4, 4), r"\(2, 4, 4\)"),
        ({}, (2, 4, 4, 1), "in_channels=3"),
        ({}, (2, 1, 4, 3), r"\(2, 1, 4, 3\) is too small.*at least 2"),
        (dict(small_inputs=False), (2, 4, 5, 3), r"too small.*at least 5"),
    ],
)
def test_inputs_are_checked(options, shape, match):
    model = nnx.eval_shape(lambda: make(**options))
    with pytest.raises(ValueError, match=match):
        model(jnp.zeros(shape))


def test_smallest_inputs_are_enough():
    for options, size in ((dict(), 2), (dict(small_inputs=False), 5)):
        logits = nnx.eval_shape(lambda o=options, s=size: make(**o)(jnp.zeros((2, s, s, 3))))
        assert logits.shape == (2, 3)


def test_mask_is_one_flag_an_image():
    model = nnx.eval_shape(make)
    with pytest.raises(ValueError, match=r"`mask` of shape \(16, 4\)"):
        model(X, mask=np.ones((16, 4), bool))


def test_initialization_follows_the_paper():
    model = make(growth_rate=32)
    kernel = model.blocks[0].layers[0].conv2.kernel[...]  # [3, 3, 128, 32]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 32)), rtol=0.02)
    np.testing.assert_allclose(kernel.mean(), 0, atol=1e-3)
    assert model.classifier.bias is not None
    np.testing.assert_array_equal(model.classifier.bias[...], 0)
    norm = model.final_norm
    np.testing.assert_array_equal(norm.scale[...], 1)
    np.testing.assert_array_equal(norm.bias[...], 0)
    jitted = nnx.jit(lambda: make(growth_rate=32).blocks[0].layers[0].conv2.kernel[...])
    np.testing.assert_allclose(jitted(), kernel, rtol=1e-6)


def test_bfloat16_computes_in_half_and_keeps_float32_state():
    """Close to float32, with float32 parameters, statistics, gradients and logits."""
    model, reference = make(dtype=jnp.bfloat16), make()
    logits, stats = run(model, X)
    want, want_stats = run(reference, X)
    assert logits.dtype == jnp.float32
    assert all(v.dtype == jnp.float32 for v in jax.tree.leaves((stats, nnx.state(model))))
    np.testing.assert_allclose(logits, want, atol=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), stats, want_stats)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s, copy=True)(x))(state, X)
    assert "bf16[16,4,4,8]" in str(jaxpr)  # the features of the first block


def test_dropout_needs_a_key_only_in_training():
    model = nnx.eval_shape(lambda: make(drop_rate=0.5))
    with pytest.raises(ValueError, match="rngs=nnx.Rngs"):
        model(X)
    model.eval()
    assert nnx.eval_shape(lambda m, x: m(x), model, X).shape == (16, 3)


@pytest.mark.parametrize("efficient", [True, False])
def test_dropout_keys(efficient):
    """A key is the key itself, an Rngs and its stream draw one from `dropout`."""
    graphdef, state = nnx.split(make(drop_rate=0.5, efficient=efficient))

    @jax.jit
    def call(key):
        def logits(rngs):
            return nnx.merge(graphdef, state, copy=True)(X, rngs=rngs)

        rngs = [nnx.Rngs(dropout=key) for _ in range(3)]
        return logits(key), logits(rngs[0].dropout()), logits(rngs[1]), logits(rngs[2].dropout)

    raw, drawn, of_rngs, of_stream = call(jax.random.key(3))
    np.testing.assert_array_equal(of_rngs, drawn)
    np.testing.assert_array_equal(of_stream, drawn)
    assert np.abs(raw - drawn).max() > 1e-3


@pytest.mark.parametrize("unbiased", [False, True])
def test_running_stats_move_once_a_step(unbiased):
    """efficient_densenet_pytorch moved them twice; here `momentum` is exactly one step's."""
    model = make(momentum=0.5, unbiased_running_var=unbiased)
    _, stats = run(model, X)
    x = model.stem_conv(jnp.asarray(X))
    got, var = stats["blocks"][0]["layers"][0]["norm1"], x.var((0, 1, 2), ddof=int(unbiased))
    np.testing.assert_allclose(got["mean"][...], 0.5 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(got["var"][...], 0.5 + 0.5 * var, rtol=1e-6)


def test_frozen_norms_stay_frozen():
    """Some norms in evaluation: such a block runs as the plain network, and they do not move."""
    models = [make(efficient=efficient) for efficient in (True, False)]
    for model in models:
        model.blocks[0].layers[0].norm1.use_running_average = True
        model.transitions[0].norm.use_running_average = True
    (logits, stats), (want, want_stats) = (run(model, X) for model in models)
    chex.assert_trees_all_close((logits, stats), (want, want_stats), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats["blocks"][0]["layers"][0]["norm1"]["mean"][...], 0)
    assert (stats["blocks"][0]["layers"][0]["norm2"]["mean"][...] != 0).all()


@pytest.mark.exhaustive
def test_converted_model_synchronises(mesh8):
    """`convert_batch_norm` reaches the operators: eight devices compute what one does, float64."""
    with jax.enable_x64(True):
        model = make(efficient=True, param_dtype=jnp.float64)
        x = X.astype(np.float64)
        labels = jnp.arange(16) % 3
        graphdef, params, stats = nnx.split(model, nnx.Param, ...)
        sync = nnx.graphdef(convert_batch_norm(model, "data"))

        def step(graphdef, reduce, params, stats, x, labels):
            def loss(params):
                copy = nnx.merge(graphdef, params, stats, copy=True)
                picked = jax.nn.log_softmax(copy(x))[jnp.arange(len(x)), labels]
                return reduce(-picked.mean()), nnx.state(copy, nnx.BatchStat)

            return jax.value_and_grad(loss, has_aux=True)(params)

        want = jax.jit(functools.partial(step, graphdef, lambda v: v))(params, stats, x, labels)
        mapped = jax.shard_map(
            functools.partial(step, sync, lambda v: jax.lax.pmean(v, "data")), mesh=mesh8,
            in_specs=(jax.P(), jax.P(), jax.P("data"), jax.P("data")), out_specs=jax.P(),
        )  # fmt: skip
        got = jax.jit(mapped)(params, stats, x, labels)
        chex.assert_trees_all_close(got, want, rtol=0, atol=1e-10)


def test_every_norm_is_of_effjax():
    model = nnx.eval_shape(lambda: make(small_inputs=False))
    norms = [m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)]
    assert len(norms) == 2 + 2 * 3 + 1 and {type(m) for m in norms} == {BatchNorm}


@pytest.mark.exhaustive
def test_memory_kept_for_the_backward_pass_is_linear_in_depth():
    """Twice the layers keep about twice the bytes, and far fewer than plain autodiff's square."""

    def kept(layers, **form):
        options = dict(block_config=(layers,), growth_rate=4, num_init_features=8)
        model = nnx.eval_shape(lambda: make(**options, **form))
        graphdef, params, stats = nnx.split(model, nnx.Param, ...)

        def call(params, stats, x):
            return nnx.merge(graphdef, params, stats, copy=True)(x)

        report = residual_bytes(
            call, params, stats, jax.ShapeDtypeStruct((8, 16, 16, 3), "float32")
        )
        return report.bytes - report.argument_bytes

    plain = kept(16, efficient=False) / kept(8, efficient=False)
    assert plain > 2.5
    for save, share in (("conv", 0.25), ("features", 0.1)):
        small, large = (kept(layers, save=save) for layers in (8, 16))
        assert large / small < 2.1
        assert large < share * kept(16, efficient=False)


def test_tabulate():
    """nnx runs every public method under jit."""
    model = make(block_config=(1, 1))
    for training in (True, False):
        model.train() if training else model.eval()
        table = nnx.tabulate(model, X[:2], console_kwargs=dict(width=200))
        rows = ("transitions/0", "blocks/1", *(() if training else ("blocks/1/layers/0/norm2",)))
        assert all(f" {row} " in table for row in rows)


def test_a_part_of_other_widths_is_found():
    def run(x):
        model = make()
        model.transitions[0] = Transition(8, 5, model.options, rngs=nnx.Rngs(0))
        return model(x)

    with pytest.raises(AssertionError, match="equal to '4' on axis '3' but got '5'"):
        nnx.eval_shape(run, X)
