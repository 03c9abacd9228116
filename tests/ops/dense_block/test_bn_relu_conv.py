"""bn_relu_conv: numerics, transformations, residuals and collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from effjax import bn_relu_conv
from tests import oracles
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    grad_of_vmap,
    gradients_with_parameters_of_each_device,
    in_scan,
    mesh_of,
    single_device,
)
from tests.programs import collective_sizes
from tests.tiers import exhaustive, product_cases

pytestmark = pytest.mark.usefixtures("x64")

CONVS = {
    "pointwise": ((1, 1, 6, 4), {"num_chunks": 2}),
    "strided": ((3, 3, 6, 4), {"strides": 2}),
    "grouped": ((1, 1, 3, 4), {"feature_group_count": 2}),
    "dilated": ((3, 2, 6, 4), {"kernel_dilation": (2, 1), "padding": ((1, 1), (0, 2))}),
    "unpadded": ((2, 2, 6, 4), {"padding": "valid"}),
}


def oracle_options(options):
    names = {"strides": "strides", "padding": "padding", "kernel_dilation": "rhs_dilation"}
    names["feature_group_count"] = "feature_group_count"
    options = {names[k]: v for k, v in options.items() if k in names}
    if "strides" in options:
        options["strides"] = (options["strides"],) * 2
    if options.get("padding") == "valid":
        options["padding"] = "VALID"
    return options


def setup(conv, masked=False):
    kernel_shape, options = CONVS[conv]
    rng = np.random.default_rng(0)
    params = rng.normal(size=6), rng.normal(size=6), rng.normal(size=kernel_shape)
    x = rng.normal(1, 2, (16, 5, 4, 6))
    mask = {"mask": rng.random((16, 5, 4, 1)) < 0.7} if masked else {}

    def oracle(params, batch, axis_name):
        z, statistics = oracles.batch_norm(
            batch["x"], *params[:2], mask=batch.get("mask"), relu=True
        )
        return oracles.conv(z, params[2], **oracle_options(options)), statistics

    def op(params, batch, axis_name):
        x = batch["x"]
        parts = x if conv == "grouped" else jnp.split(x, (1, 4), -1)
        return bn_relu_conv(parts, *params, axis_name=axis_name, mask=batch.get("mask"), **options)

    y = jax.eval_shape(lambda: oracle(params, {"x": x}, None)[0])
    return oracle, op, params, {"x": x, "w": rng.normal(size=y.shape), **mask}


@pytest.mark.parametrize(
    ("conv", "context"),
    [
        ("strided", "jit_explicit"),
        ("strided", "grad_of_shard_map_two_axes"),
        exhaustive("strided", "jit_auto"),
        exhaustive("strided", "pmap"),
        *product_cases(
            ["pointwise"],
            CONTEXTS,
            plain=[("pointwise", "shard_map_of_grad"), ("pointwise", "grad_of_jit_of_vmap")],
        ),
    ],
)
def test_matches_autodiff(conv, context):
    oracle, op, params, batch = setup(conv)
    want = single_device(oracle, params, batch)
    assert_trees_close(CONTEXTS[context](op, params, batch), want, 1e-12)


@pytest.mark.parametrize(
    ("conv", "between"),
    [("pointwise", jax.checkpoint), exhaustive("strided", in_scan)],
)
def test_rules_run_where_the_vmap_axis_is_out_of_scope(conv, between):
    oracle, op, params, batch = setup(conv)
    got = grad_of_vmap(between, op, params, batch)
    assert_trees_close(got, single_device(oracle, params, batch), 1e-12)


@pytest.mark.parametrize(
    ("conv", "how"), [("pointwise", "shard_map"), exhaustive("strided", "vmap")]
)
def test_different_parameters_per_device(conv, how):
    _, op, params, batch = setup(conv)

    def oracle(params, batch, axis_name):
        z, _ = oracles.batch_norm(batch["x"], *params[:2], relu=True, axis_name=axis_name)
        return oracles.conv(z, params[2], **oracle_options(CONVS[conv][1]))

    run = functools.partial(gradients_with_parameters_of_each_device, params=params, batch=batch)
    assert_trees_close(run(lambda *a: op(*a)[0], how=how), run(oracle, how="vmap"), 1e-12)


def test_explicit_mesh_without_set_mesh():
    oracle, op, params, batch = setup("pointwise")
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    loss = lambda op, p, x: jnp.sum(op(p, {"x": x}, None)[0] ** 2)  # noqa: E731
    gradient = functools.partial(jax.grad, argnums=(0, 1))
    want = jax.jit(gradient(functools.partial(loss, oracle)))(params, batch["x"])
    x = jax.device_put(batch["x"], jax.NamedSharding(mesh, P("i")))
    replicated = jax.device_put(params, jax.NamedSharding(mesh, P()))
    assert_trees_close(jax.jit(gradient(functools.partial(loss, op)))(replicated, x), want, 1e-12)


def test_half_precision_gradient_sums_to_zero():
    """The gradient of x has mean 0 even where the incoming gradient is constant over an image."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 8, 8, 16)), jnp.bfloat16)
    scale, bias = jnp.ones(16), jnp.full(16, 5.0)
    kernel = jnp.asarray(rng.normal(size=(1, 1, 16, 16)) / 4, jnp.bfloat16)
    weights = jnp.asarray(1 + 0.02 * rng.normal(size=(8, 1, 1, 16)), jnp.bfloat16)
    loss = lambda x: jnp.sum((bn_relu_conv(x, scale, bias, kernel)[0] * weights).astype("float32"))  # noqa: E731
    dx = jax.jit(jax.grad(loss))(x).astype(jnp.float32)
    assert jnp.abs(dx.sum((0, 1, 2))).max() <= 0.005 * jnp.abs(dx).sum((0, 1, 2)).max()


@pytest.mark.parametrize(
    ("conv", "masked"),
    [(conv, True) for conv in CONVS] + [("pointwise", False)],
)
def test_convolution_options(conv, masked):
    oracle, op, params, batch = setup(conv, masked)
    want = single_device(oracle, params, batch)
    assert_trees_close(single_device(op, params, batch), want, 1e-12)


@pytest.mark.parametrize("conv", ["pointwise", "strided"])
def test_residuals(conv):
    _, op, params, batch = setup(conv)
    shapes = lambda x: jax.tree.leaves(jax.vjp(lambda x: op(params, {"x": x}, None)[0], x)[1])  # noqa: E731
    kept = [a.shape for a in jax.eval_shape(shapes, batch["x"]) if a.shape[:1] == (16,)]
    assert kept == [(16, 5, 4, 1), (16, 5, 4, 3), (16, 5, 4, 2)]


def test_all_reduces(mesh8):
    _, op, params, batch = setup("pointwise")

    def step(params, x):
        return jax.grad(lambda x: jnp.sum(op(params, {"x": x}, "data")[0]))(x)

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh8, check_vma=False, **specs))
    found = collective_sizes(mapped.lower(params, batch["x"]).compile(), batch["x"].dtype)
    assert found == [("all-reduce", 12), ("all-reduce", 96)]


def test_half_precision():
    _, op, params, batch = setup("pointwise")
    x = jnp.asarray(batch["x"], jnp.bfloat16)
    y, statistics = jax.eval_shape(lambda x: op(params, {"x": x}, None), x)
    assert y.dtype == jnp.bfloat16
    assert statistics.mean.dtype == jnp.float32


def test_empty_batch():
    _, op, params, batch = setup("pointwise")
    dx = jax.jit(jax.grad(lambda x: jnp.sum(op(params, {"x": x}, None)[0])))(batch["x"][:0])
    assert dx.shape == (0, 5, 4, 6)


X = np.zeros((2, 4, 4, 6), np.float32)
GOOD = {"x": X, "scale": np.ones(6), "bias": np.ones(6), "kernel": np.ones((1, 1, 6, 4))}


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"must agree in \[N, H, W\] and dtype", {"x": [X, X[:, :2]]}),
        (ValueError, r"`x` .* must be \(N, H, W, C\)", {"x": X[0]}),
        (ValueError, r"`scale` of shape \(5,\) must be \(6,\)", {"scale": np.ones(5)}),
        (ValueError, "`kernel` of shape .* for the 6 channels", {"kernel": np.ones((1, 1, 5, 4))}),
        (ValueError, r"`num_chunks` \(=0\)", {"num_chunks": 0}),
    ],
)
def test_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        bn_relu_conv(**{**GOOD, **args})
