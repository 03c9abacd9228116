import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import effjax
from effjax import BatchStats, batch_norm_inference, sync_batch_norm
from effjax.memory import collectives
from tests import oracles
from tests.contexts import (
    CONTEXTS,
    DEVICES,
    assert_trees_close,
    gradients_with_parameters_of_each_device,
    mesh_of,
    single_device,
)
from tests.programs import collective_sizes

pytestmark = pytest.mark.usefixtures("x64")

C = 5


def make_batch(seed=0, shape=(32, 3, 3, C)):
    rng = np.random.default_rng(seed)
    mask = rng.random((shape[0], shape[1], 1, 1)) < 0.6
    mask[: shape[0] // DEVICES] = False  # the first device has nothing to count
    return {
        "x": rng.normal(3, 2, shape),
        "w": rng.normal(size=shape),
        "mask": mask,
        "residual": rng.normal(size=shape),
    }


PARAMS = {"scale": np.linspace(0.5, 1.5, C), "bias": np.linspace(-1, 1, C)}
VARIANTS = {
    "bare": {"params": {}},
    "affine": {},
    "mask": {"mask": True},
    "relu": {"relu": True},
    "mask_residual_relu": {"mask": True, "residual": True, "relu": True},
}


def oracle_of(mask=False, residual=False, relu=False, params=PARAMS):
    del params

    def op(params, batch, axis_name):
        extra = {
            name: batch[name] for name, used in [("mask", mask), ("residual", residual)] if used
        }
        return oracles.batch_norm(batch["x"], **params, **extra, relu=relu)

    return op


def ours(stats, mask=False, residual=False, relu=False, params=PARAMS, **options):
    del params

    def op(params, batch, axis_name):
        extra = {
            name: batch[name] for name, used in [("mask", mask), ("residual", residual)] if used
        }
        activation = "relu" if relu else None
        kwargs = {"axis_name": axis_name, "activation": activation, "stats": stats, **options}
        y, statistics = sync_batch_norm(batch["x"], **params, **extra, **kwargs)
        return y, tuple(statistics)

    return op


@functools.cache
def expected(variant):
    with jax.enable_x64(True):
        options = VARIANTS[variant]
        return single_device(oracle_of(**options), options.get("params", PARAMS), make_batch())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stats", ["gather", "two_psum"])
def test_equals_autodiff_on_one_device(stats, variant, context):
    options = VARIANTS[variant]
    got = CONTEXTS[context](ours(stats, **options), options.get("params", PARAMS), make_batch())
    assert_trees_close(got, expected(variant), 1e-12)


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
@pytest.mark.parametrize("residual", [False, True])
def test_parameters_may_differ_by_device(residual, how):
    def op(norm, params, batch, axis_name):
        extra = {"residual": batch["residual"]} if residual else {}
        return norm(batch["x"], **params, **extra, axis_name=axis_name)[0]

    run = functools.partial(gradients_with_parameters_of_each_device, batch=make_batch())
    want = run(functools.partial(op, oracles.batch_norm), PARAMS, how="vmap")
    got = run(functools.partial(op, sync_batch_norm), PARAMS, how=how)
    assert_trees_close(got, want, 1e-12)


def test_only_some_axes_of_a_mesh_vary():
    """x varies over one of the two axes that share statistics."""
    mesh, x = mesh_of((4, 2), ("i", "j")), make_batch()["x"]

    def local(x):
        return lax.pmean(jnp.mean(sync_batch_norm(x, axis_name=("i", "j"))[0] ** 3), ("i",))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P())
    want = jax.grad(lambda x: jnp.mean(oracles.batch_norm(x)[0] ** 3))(x)
    assert_trees_close(jax.jit(jax.grad(mapped))(x), want, 1e-12)


@pytest.mark.parametrize("spec", [P("i"), P("i", None, None, "j")])
def test_explicit_mesh_of_the_arguments(spec):
    """No `jax.set_mesh`: the mesh is known from the types alone; channels may be sharded."""
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    x = np.random.default_rng(0).normal(size=(8, 3, 3, 6))
    scale, bias = np.linspace(1, 2, 6), np.linspace(0, 1, 6)
    loss = lambda norm, *args: jnp.sum(norm(*args)[0] ** 3)  # noqa: E731
    gradient = functools.partial(jax.grad, argnums=(0, 1, 2))
    want = gradient(functools.partial(loss, oracles.batch_norm))(x, scale, bias)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
    replicated = jax.device_put((scale, bias), jax.NamedSharding(mesh, P()))
    got = jax.jit(gradient(functools.partial(loss, sync_batch_norm)))(sharded, *replicated)
    assert_trees_close(got, want, 1e-12)


GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]


def per_group(x, w):
    """Loss and gradients with statistics inside each group of devices, on one device."""
    halves = [np.concatenate([np.split(a, DEVICES)[i] for g in GROUPS for i in g]) for a in (x, w)]

    def loss(x):
        parts = zip(jnp.split(x, 2), jnp.split(halves[1], 2), strict=True)
        return jnp.mean(jnp.stack([jnp.mean(oracles.batch_norm(a)[0] ** 2 * b) for a, b in parts]))

    value, dx = jax.value_and_grad(loss)(halves[0])
    order = np.argsort([i for g in GROUPS for i in g])
    return value, np.concatenate([np.split(dx, DEVICES)[i] for i in order])


def grouped(x, w, **options):
    loss = lambda x: jnp.mean(sync_batch_norm(x, axis_name="i", **options)[0] ** 2 * w)  # noqa: E731
    value, dx = jax.value_and_grad(loss)(x)
    return lax.pmean(value, "i")[None], dx / DEVICES


@pytest.mark.parametrize("stats", ["gather", "two_psum"])
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_groups_of_devices(how, stats):
    batch = make_batch()
    run = functools.partial(grouped, axis_index_groups=GROUPS, stats=stats)
    if how == "pmap":
        split = [a.reshape(DEVICES, -1, *a.shape[1:]) for a in (batch["x"], batch["w"])]
        value, dx = jax.pmap(run, axis_name="i")(*split)
        dx = dx.reshape(batch["x"].shape)
    else:
        mesh = mesh_of((DEVICES,), ("i",))
        specs = {"in_specs": (P("i"), P("i")), "out_specs": (P("i"), P("i"))}
        mapped = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
        value, dx = jax.jit(mapped)(batch["x"], batch["w"])
    want = per_group(batch["x"], batch["w"])
    assert_trees_close((value.ravel()[0], dx), want, 1e-12)


def test_one_axis_of_a_mesh_is_a_group():
    batch = make_batch()
    mesh = mesh_of((2, 4), ("group", "i"))
    order = [i for g in GROUPS for i in g]
    x, w = (
        np.concatenate([np.split(batch[name], DEVICES)[i] for i in order]) for name in ("x", "w")
    )

    def local(x, w):
        return lax.pmean(jnp.mean(sync_batch_norm(x, axis_name="i")[0] ** 2 * w), ("group", "i"))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(("group", "i")), P(("group", "i"))), out_specs=P()
    )
    value, dx = jax.jit(jax.value_and_grad(mapped))(x, w)
    dx = np.concatenate([np.split(np.asarray(dx), DEVICES)[i] for i in np.argsort(order)])
    assert_trees_close((value, dx), per_group(batch["x"], batch["w"]), 1e-12)


@pytest.mark.parametrize("stats", ["gather", "two_psum"])
def test_groups_where_jax_has_none_name_the_remedy(stats):
    run = functools.partial(sync_batch_norm, axis_name="i", axis_index_groups=GROUPS, stats=stats)
    x = np.ones((DEVICES, 4, C))
    mesh = mesh_of((DEVICES,), ("i",))
    with pytest.raises(ValueError, match=r"mesh of shape \(2, 4\) with axes \('group', 'i'\)"):
        jax.shard_map(lambda x: run(x)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)
    with pytest.raises(ValueError, match=r"mesh of shape \(2, 4\)"):
        jax.vmap(lambda x: run(x)[0], axis_name="i")(x)


@pytest.mark.parametrize("how", ["local", "gather", "two_psum"])
@pytest.mark.parametrize(("ratio", "tolerance"), [(1e3, 5e-6), (1e4, 5e-5)])
def test_variance_is_stable_where_the_mean_is_large(how, ratio, tolerance):
    x = (np.random.default_rng(0).normal(size=(DEVICES, 4096, 8)) + ratio).astype(np.float32)
    want = x.astype(np.float64).var((0, 1))
    if how == "local":
        var = sync_batch_norm(x.reshape(-1, 8))[1].var
    else:
        run = functools.partial(sync_batch_norm, axis_name="i", stats=how)
        var = jax.vmap(lambda x: run(x)[1].var, axis_name="i")(x)[0]
    assert var.dtype == jnp.float32
    assert np.abs(var / want - 1).max() <= tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes(dtype):
    batch = make_batch()
    x = jnp.asarray(batch["x"], dtype)
    params = {k: jnp.asarray(v, jnp.float32) for k, v in PARAMS.items()}

    def loss(x, params):
        y, statistics = sync_batch_norm(x, **params, activation="relu")
        return jnp.sum(y.astype(jnp.float64) * batch["w"]), (y, statistics)

    (dx, dparams), (y, statistics) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)
    assert y.dtype == dx.dtype == x.dtype
    assert {v.dtype for v in dparams.values()} == {jnp.dtype(jnp.float32)}
    assert {v.dtype for v in statistics} == {jnp.promote_types(dtype, jnp.float32)}
    exact = x.astype(jnp.float64)
    wide = jax.tree.map(lambda v: v.astype(jnp.float64), params)
    want = jax.grad(
        lambda x, p: jnp.sum(oracles.batch_norm(x, **p, relu=True)[0] * batch["w"]), argnums=(0, 1)
    )(exact, wide)
    y_want = oracles.batch_norm(exact, **wide, relu=True)[0]
    assert_trees_close((y, dx, dparams), (y_want, *want), 4 * float(jnp.finfo(dtype).eps) + 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("relu", "residual"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_keeps_x_and_nothing_of_its_size_besides(relu, residual, dtype):
    x = jnp.ones((64, 32), dtype)
    params = jnp.ones(32), jnp.zeros(32)
    activation = "relu" if relu else None

    def op(x, scale, bias, residual):
        return sync_batch_norm(x, scale, bias, activation=activation, residual=residual)[0]

    _, backward = jax.vjp(op, x, *params, x + 1 if residual else None)
    leaves = {id(v): v for v in jax.tree.leaves(backward)}.values()
    large = [v for v in leaves if v.size >= x.size]
    assert [v.dtype for v in large] == [x.dtype] * (2 if relu and residual else 1)
    assert sum(v.size for v in leaves if v.size < x.size) <= 4 * 32 + 2


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("stats", ["gather", "two_psum"])
def test_all_reduces(stats, check_vma, mask):
    """One (or two small) forward, one of 2C backward, and none more for replicated parameters."""
    mesh = mesh_of((DEVICES,), ("i",))
    batch = {k: make_batch()[k] for k in ("x", "mask")}

    def forward(batch, params):
        extra = {"mask": batch["mask"]} if mask else {}
        return sync_batch_norm(batch["x"], **params, **extra, axis_name="i", stats=stats)[0]

    def backward(batch, params):
        loss = lambda x, p: jnp.sum(jnp.sin(forward({**batch, "x": x}, p)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(batch["x"], params)

    def counted(fn, out_specs):
        specs = {"in_specs": (P("i"), P()), "out_specs": out_specs}
        mapped = jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)
        return collective_sizes(jax.jit(mapped).lower(batch, PARAMS).compile(), batch["x"].dtype)

    first = DEVICES * (2 * C + mask) if stats == "gather" else C + mask
    want = [first] if stats == "gather" else [first, C]
    got = counted(forward, P("i"))
    assert got == sorted(("all-reduce", n) for n in want)
    got = counted(backward, (P("i"), P() if check_vma else P("i")))
    assert got == sorted(("all-reduce", n) for n in [*want, 2 * C])


def test_auto_takes_two_small_all_reduces_for_many_features():
    def message(features):
        mesh = mesh_of((DEVICES,), ("i",))
        fn = lambda x: sync_batch_norm(x, axis_name="i")[0]  # noqa: E731
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        x = jax.ShapeDtypeStruct((DEVICES, features), jnp.float32)
        return len(re.findall("all_reduce", jax.jit(mapped).lower(x).as_text()))

    assert message(4096) == 1
    assert message(4097) == 2


def test_jit_over_a_sharded_batch_gathers_nothing(mesh8):
    x = jax.ShapeDtypeStruct(
        (32, 8, 8, 64), jnp.float32, sharding=jax.NamedSharding(mesh8, P("data"))
    )
    step = jax.grad(lambda x: jnp.sum(jnp.sin(sync_batch_norm(x)[0])))
    kinds = {c.kind for c in collectives(jax.jit(step).lower(x).compile().as_text())}
    assert kinds == {"all-reduce"}


@pytest.mark.parametrize("stats", ["gather", "two_psum"])
@pytest.mark.parametrize("axis_name", [None, "i"])
def test_nothing_counted(axis_name, stats):
    x = make_batch()["x"].reshape(DEVICES, -1, C)
    mask = np.zeros((1, 1), bool)

    def run(x):
        op = functools.partial(sync_batch_norm, axis_name=axis_name, mask=mask, stats=stats)
        (y, statistics), backward = jax.vjp(op, x)
        return y, statistics, backward((y, jax.tree.map(jnp.zeros_like, statistics)))[0]

    y, statistics, dx = jax.vmap(run, axis_name="i")(x)
    np.testing.assert_array_equal(statistics.mean, 0)
    np.testing.assert_array_equal(statistics.var, 1)
    np.testing.assert_array_equal(statistics.count, 0)
    np.testing.assert_allclose(y, x, rtol=1e-5)
    np.testing.assert_allclose(dx, y, rtol=1e-5)


def test_one_value_counted():
    x = jnp.asarray([[3.0, -1.0]])
    (y, statistics), backward = jax.vjp(lambda x: sync_batch_norm(x, bias=jnp.ones(2)), x)
    np.testing.assert_array_equal(y, 1)
    np.testing.assert_array_equal(statistics.var, 0)
    np.testing.assert_array_equal(statistics.count, 1)
    np.testing.assert_allclose(backward((y, statistics))[0], 0, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (3, 0)])
def test_zero_sizes(shape):
    x, features = jnp.zeros(shape), jnp.ones(shape[-1])
    (y, statistics), backward = jax.vjp(sync_batch_norm, x, features, features)
    assert y.shape == shape
    dx, dscale, _ = backward((y, statistics))
    assert dx.shape == shape
    np.testing.assert_array_equal(dscale, 0)
    if x.size == 0 and shape[-1]:
        np.testing.assert_array_equal(statistics.var, 1)
        np.testing.assert_array_equal(statistics.count, 0)


def test_a_constant_has_no_variance():
    y, statistics = sync_batch_norm(jnp.full((1024, 3), 1e4, jnp.float32))
    np.testing.assert_array_equal(statistics.var, 0)
    np.testing.assert_array_equal(y, 0)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_any_rank_and_feature_axes(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple))
    axis_count = data.draw(st.integers(1, len(shape) - 1))
    chosen = data.draw(st.permutations(range(len(shape))))[:axis_count]
    negative = data.draw(st.booleans())
    axis = tuple(a - len(shape) if negative else a for a in chosen)
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    features = tuple(n for a, n in enumerate(shape) if a in chosen)
    scale, bias = rng.normal(size=(2, *features))
    reduced = tuple(a for a in range(len(shape)) if a not in chosen)
    y, statistics = sync_batch_norm(x, scale, bias, feature_axis=axis if len(axis) > 1 else axis[0])
    want, (mean, var, count) = oracles.batch_norm(x, scale, bias, axes=reduced)
    assert statistics.mean.shape == statistics.var.shape == features
    assert statistics.count == count
    np.testing.assert_allclose(y, want, atol=1e-9)
    np.testing.assert_allclose(statistics.mean.ravel(), mean, atol=1e-12)
    given = batch_norm_inference(x, statistics.mean, statistics.var, scale, bias, feature_axis=axis)
    np.testing.assert_allclose(given, y, atol=1e-12)


def test_channels_last_with_an_odd_width_and_large_maps():  # apex issue 1768
    x = np.random.default_rng(0).normal(1, 3, (2, 96, 96, 65)).astype(np.float32)
    y, _ = sync_batch_norm(x)
    want, _ = oracles.batch_norm(x.astype(np.float64))
    np.testing.assert_allclose(y, want, atol=2e-5)


def test_a_mask_may_differ_by_feature():
    rng = np.random.default_rng(0)
    x, w, mask = rng.normal(size=(8, 6, C)), rng.normal(size=(8, 6, C)), rng.random((8, 6, C)) < 0.5

    def loss(norm, x):
        return jnp.sum(norm(x, mask=mask)[0] * w)

    want = jax.grad(functools.partial(loss, functools.partial(oracles.batch_norm, axes=(0, 1))))(x)
    np.testing.assert_allclose(
        jax.grad(functools.partial(loss, sync_batch_norm))(x), want, atol=1e-12
    )
    np.testing.assert_array_equal(sync_batch_norm(x, mask=mask)[1].count, mask.sum((0, 1)))


def test_masked_values_do_not_count_even_if_they_are_not_numbers():
    x = np.array([[1.0], [3.0], [np.nan]])
    _, statistics = sync_batch_norm(x, mask=np.array([[True], [True], [False]]))
    np.testing.assert_array_equal(statistics.mean, 2)


def test_masked_padding_may_be_anything_where_it_has_no_gradient():
    x, mask = make_batch()["x"], make_batch()["mask"]
    padded = np.where(mask, x, np.nan)

    def loss(x, scale):
        y = sync_batch_norm(x, scale, mask=mask, activation="relu")[0]
        return jnp.sum(jnp.where(mask, y, 0) ** 2)

    want = jax.grad(loss, argnums=(0, 1))(x, PARAMS["scale"])
    got = jax.grad(loss, argnums=(0, 1))(padded, PARAMS["scale"])
    assert_trees_close(got, want, 1e-12)


def test_under_scan_remat_and_vmap():
    x = make_batch()["x"]
    op = lambda x: jnp.sum(jnp.sin(sync_batch_norm(x, activation="relu")[0]))  # noqa: E731
    want = jax.grad(op)(x)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(op)))(x), want, atol=1e-12)
    stacked = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(jax.grad(op))(stacked)[0], want, atol=1e-12)
    summed = lambda xs: lax.scan(lambda c, x: (c + op(x), None), 0.0, xs)[0]  # noqa: E731
    np.testing.assert_allclose(jax.grad(summed)(stacked)[0], want, atol=1e-12)


def test_second_order():
    x, w = make_batch()["x"], make_batch()["w"]

    def curvature(norm, x):
        inner = jax.grad(lambda x: jnp.sum(jnp.sin(norm(x)[0]) * w))
        return jnp.sum(jnp.square(inner(x)))

    want = jax.grad(functools.partial(curvature, oracles.batch_norm))(x)
    got = jax.grad(functools.partial(curvature, sync_batch_norm))(x)
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_no_gradient_flows_through_the_statistics():
    x = make_batch()["x"]
    statistics = lambda x: sync_batch_norm(x)[1]  # noqa: E731
    gradient = jax.grad(lambda x: jnp.sum(statistics(x).mean + statistics(x).var))(x)
    np.testing.assert_array_equal(gradient, 0)


def test_inference_differentiates_in_every_argument():
    rng = np.random.default_rng(0)
    args = (
        rng.normal(size=(4, C)),
        rng.normal(size=C),
        rng.random(C) + 1,
        *rng.normal(size=(2, C)),
    )
    op = functools.partial(batch_norm_inference, activation="relu", residual=args[0])
    check_grads(op, args, order=1, modes=["fwd", "rev"], eps=1e-6)
    assert op(
        *(jnp.asarray(a, jnp.bfloat16) for a in args[:1]), *args[1:], residual=None
    ).dtype == (jnp.bfloat16)


X = np.ones((4, 3, C), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, "its dtype is int32", {"x": np.ones((4, C), np.int32)}),
        (ValueError, "rank 2 or more", {"x": np.ones(C, np.float32)}),
        (ValueError, r"`scale` of shape \(4,\) must have.*\(5,\)", {"scale": np.ones(4)}),
        (ValueError, r"`bias` of shape \(1, 5\)", {"bias": np.ones((1, C))}),
        (ValueError, r"`epsilon` \(=0\) must be positive", {"epsilon": 0}),
        (ValueError, "`activation` \\(='gelu'\\)", {"activation": "gelu"}),
        (ValueError, "`stats` \\(='fast'\\)", {"stats": "fast"}),
        (ValueError, "`residual` of shape", {"residual": np.ones((4, C), np.float32)}),
        (TypeError, "cast one of them", {"residual": X.astype(np.float64)}),
        (TypeError, r"pass mask.astype\(bool\)", {"mask": np.ones((4, 1, 1))}),
        (ValueError, "`mask` of shape .* must broadcast", {"mask": np.ones((5, 1, 1), bool)}),
        (ValueError, "must broadcast", {"mask": np.ones((1, 4, 3, 1), bool)}),
        (ValueError, r"`feature_axis` \(=3\) is out of range", {"feature_axis": 3}),
        (ValueError, "each once, but not all", {"feature_axis": (0, 1, 2)}),
        (ValueError, "each once, but not all", {"feature_axis": (2, -1)}),
        (ValueError, "names an axis twice", {"axis_name": ("i", "i")}),
        (ValueError, "divides one axis", {"axis_index_groups": [[0], [1]]}),
        (
            ValueError,
            "every device index once",
            {"axis_name": "i", "axis_index_groups": [[0], [0]]},
        ),
    ],
)
def test_bad_input(error, match, args):
    with pytest.raises(error, match=match):
        effjax.sync_batch_norm(**{"x": X, **args})


def test_batch_stats_is_a_tuple_of_its_three_fields():
    assert BatchStats._fields == ("mean", "var", "count")
