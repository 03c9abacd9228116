"""Dense block: numerics, transformations, residuals, collectives and memory."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from effjax import DenseLayerParams, dense_block
from effjax.memory import collectives, plan
from effjax.ops.dense_block.bottleneck import _split_rows
from tests import oracles
from tests.contexts import (
    CONTEXTS,
    DEVICES,
    assert_trees_close,
    grad_of_vmap,
    gradients_with_parameters_of_each_device,
    in_scan,
    mesh_of,
    single_device,
)
from tests.programs import collective_sizes, needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import exhaustive, product_cases

KEY = jax.random.key(0)
SAVE = ["conv", "features"]


def make_params(layers=2, growth=2, channels=3, bottleneck=4, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (rng.normal(size=shape) * 0.5).astype(dtype)  # noqa: E731
    params = []
    for i in range(layers):
        c, b = channels + i * growth, bottleneck * growth
        kernels = normal(1, 1, c, b), normal(3, 3, b, growth)
        params.append(
            DenseLayerParams(
                1 + normal(c), normal(c), kernels[0], 1 + normal(b), normal(b), kernels[1]
            )
        )
    return params


def make_batch(shape=(16, 5, 4, 3), width=7, seed=1):
    rng = np.random.default_rng(seed)
    mask = rng.random((shape[0], shape[1], 1, 1)) < 0.6
    mask[: shape[0] // DEVICES] = False  # the first device has no counted pixel
    x, w = rng.normal(1, 2, shape), rng.normal(size=(*shape[:3], width))
    return {"x": x, "w": w, "mask": mask}


def ours(mask=False, **options):
    def op(params, batch, axis_name):
        masked = {"mask": batch["mask"]} if mask else {}
        return dense_block(batch["x"], params, axis_name=axis_name, **masked, **options)

    return op


def oracle_of(mask=False, **options):
    def op(params, batch, axis_name):
        masked = {"mask": batch["mask"]} if mask else {}
        return oracles.dense_block(batch["x"], params, **masked, **options)

    return op


@functools.cache
def expected(mask, dropout_rate=0.0):
    with jax.enable_x64(True):
        op = oracle_of(mask, dropout_rate=dropout_rate, key=KEY)
        return single_device(op, make_params(), make_batch())


@pytest.mark.parametrize(
    ("save", "context"),
    [
        ("features", "single_device"),
        ("features", "grad_of_shard_map_two_axes"),
        exhaustive("features", "jit_auto"),
        exhaustive("features", "vmap_of_grad"),
        *product_cases(
            ["conv"],
            ["single_device", *CONTEXTS],
            plain=[("conv", "jit_explicit"), ("conv", "grad_of_jit_of_vmap")],
        ),
    ],
)
def test_matches_autodiff(save, context, x64):
    run = CONTEXTS.get(context, single_device)
    got = run(ours(save=save, num_chunks=2), make_params(), make_batch())
    assert_trees_close(got, expected(False), 1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("between", [jax.checkpoint, in_scan])
def test_rules_run_where_the_vmap_axis_is_out_of_scope(between, x64):
    got = grad_of_vmap(between, ours(num_chunks=2), make_params(), make_batch())
    assert_trees_close(got, expected(False), 1e-12)


@pytest.mark.parametrize(
    ("context", "stats"),
    product_cases(
        ["pmap", "shard_map_of_grad"],
        ["gather", "two_psum"],
        plain=[("shard_map_of_grad", "two_psum")],
    ),
)
def test_mask(context, stats, x64):
    op = ours(mask=True, num_chunks=2, stats=stats)
    got = CONTEXTS[context](op, make_params(), make_batch())
    assert_trees_close(got, expected(True), 1e-12)


@pytest.mark.parametrize(
    ("context", "save"),
    product_cases(["jit_auto", "jit_explicit"], SAVE, plain=[("jit_auto", "features")]),
)
def test_dropout(context, save, x64):
    run = CONTEXTS.get(context, single_device)
    op = ours(save=save, num_chunks=2, dropout_rate=0.3, key=KEY)
    got = run(op, make_params(), make_batch())
    assert_trees_close(got, expected(False, 0.3), 1e-12)


@pytest.mark.exhaustive
def test_dropout_with_one_key_per_device(x64):
    """Matches the plain network over `sync_batch_norm` with the same keys."""
    import effjax

    def plain(params, batch, axis_name):
        f, key = batch["x"], jax.random.fold_in(KEY, lax.axis_index(axis_name))
        norm = functools.partial(effjax.sync_batch_norm, axis_name=axis_name, activation="relu")
        for i, p in enumerate(params):
            h = oracles.conv(norm(f, p.scale1, p.bias1)[0], p.kernel1)
            y = oracles.conv(norm(h, p.scale2, p.bias2)[0], p.kernel2)
            y = oracles.dropout(y, 0.3, jax.random.fold_in(key, i))
            f = jnp.concatenate([f, y], -1)
        return f, ()

    def efficient(params, batch, axis_name):
        key = jax.random.fold_in(KEY, lax.axis_index(axis_name))
        f, _ = dense_block(batch["x"], params, axis_name=axis_name, dropout_rate=0.3, key=key)
        return f, ()

    context = CONTEXTS["shard_map_of_grad"]
    want = context(plain, make_params(), make_batch())
    assert_trees_close(context(efficient, make_params(), make_batch()), want, 1e-12)


def test_different_parameters_per_device(x64):
    def run(block, how):
        op = lambda params, batch, axis_name: block(batch["x"], params, axis_name=axis_name)[0]  # noqa: E731
        return gradients_with_parameters_of_each_device(
            op, make_params(1), make_batch(width=5), how
        )

    assert_trees_close(run(dense_block, "shard_map"), run(oracles.dense_block, "vmap"), 1e-12)


@pytest.mark.exhaustive  # test_matches_autodiff covers explicit meshes in the plain tier
def test_explicit_mesh_without_set_mesh(x64):
    mesh = mesh_of((DEVICES,), ("i",), AxisType.Explicit)
    params, x = make_params(), make_batch()["x"]
    loss = lambda block, p, x: jnp.sum(jnp.sin(block(x, p)[0]))  # noqa: E731
    gradient = functools.partial(jax.grad, argnums=(0, 1))
    want = jax.jit(gradient(functools.partial(loss, oracles.dense_block)))(params, x)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("i")))
    replicated = jax.device_put(params, jax.NamedSharding(mesh, P()))
    got = jax.jit(gradient(functools.partial(loss, dense_block)))(replicated, sharded)
    assert_trees_close(got, want, 1e-12)


@pytest.mark.parametrize("num_chunks", [4, exhaustive(1), exhaustive(9)])
def test_chunks_need_not_divide_the_rows(num_chunks, x64):
    op = ours(save="features", num_chunks=num_chunks)
    got = single_device(op, make_params(), make_batch())
    assert_trees_close(got, expected(False), 1e-12)


@hypothesis.settings(max_examples=100)
@hypothesis.given(height=st.integers(1, 200), num_chunks=st.integers(1, 250))
def test_chunks_cover_every_row_once(height, num_chunks):
    size, count = _split_rows(height, num_chunks)
    assert count * size >= height > (count - 1) * size
    assert size <= height and count <= num_chunks


@pytest.mark.parametrize("save", ["features", exhaustive("conv")])
def test_layers_of_different_sizes(save, x64):
    rng = np.random.default_rng(0)
    params, channels = [], 3
    for growth, bottleneck, k in [(2, 5, 3), (4, 3, 1)]:
        shapes = (channels,), (channels,), (1, 1, channels, bottleneck), (bottleneck,)
        shapes = (*shapes, (bottleneck,), (k, k, bottleneck, growth))
        params.append(DenseLayerParams(*(rng.normal(size=s) for s in shapes)))
        channels += growth
    batch = make_batch((4, 7, 3, 3), channels)
    want = single_device(oracle_of(), params, batch)
    assert_trees_close(single_device(ours(save=save), params, batch), want, 1e-12)


def test_no_layers(x64):
    x = make_batch()["x"]
    run = jax.jit(
        jax.grad(lambda x: (dense_block(x, [])[0].sum(), dense_block(x, [])), has_aux=True)
    )
    dx, (features, statistics) = run(x)
    np.testing.assert_array_equal(dx, 1)
    np.testing.assert_array_equal(features, x)
    assert statistics == []


def test_empty_batch(x64):
    x = make_batch()["x"]
    gradient = jax.jit(jax.grad(lambda p, x: dense_block(x, p)[0].sum(), argnums=(0, 1)))
    for empty in (x[:0], x[:, :0]):
        dparams, dx = gradient(make_params(1), empty)
        assert dx.shape == empty.shape
        assert all(np.all(np.asarray(d) == 0) for d in jax.tree.leaves(dparams))


def test_scan_remat_and_vmap(x64):
    params, batch = make_params(1), make_batch((2, 4, 3, 3))
    op = lambda x: jnp.sum(jnp.sin(dense_block(x, params, num_chunks=2)[0]))  # noqa: E731
    want = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(oracles.dense_block(x, params)[0]))))(
        batch["x"]
    )
    stacked = jnp.stack([batch["x"], 2 * batch["x"]])
    close = functools.partial(np.testing.assert_allclose, desired=want, atol=1e-11)
    close(jax.jit(jax.vmap(jax.grad(op)))(stacked)[0])
    body = jax.checkpoint(lambda c, x: (c + op(x), None))
    close(jax.jit(jax.grad(lambda xs: lax.scan(body, 0.0, xs)[0]))(stacked)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", exhaustive("float16")])
def test_half_precision_error(dtype):
    params = make_params(1, growth=4, channels=8, dtype=np.float32)
    batch = make_batch((8, 6, 6, 8), 12)
    x, w = jnp.asarray(batch["x"], dtype), jnp.asarray(batch["w"], dtype)

    def plain(params, x):
        for p in params:
            z = oracles.batch_norm(x.astype(jnp.float32), p.scale1, p.bias1, relu=True)[0]
            h = oracles.conv(z.astype(x.dtype), p.kernel1.astype(x.dtype))
            z = oracles.batch_norm(h.astype(jnp.float32), p.scale2, p.bias2, relu=True)[0]
            x = jnp.concatenate([x, oracles.conv(z.astype(x.dtype), p.kernel2.astype(x.dtype))], -1)
        return x

    def grads(block, x, w):
        loss = lambda p, x: jnp.sum((block(p, x) * w).astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)

    exact = grads(plain, x.astype(jnp.float32), w.astype(jnp.float32))
    features, statistics = jax.eval_shape(dense_block, x, params)
    assert features.dtype == x.dtype
    assert {v.dtype for v in jax.tree.leaves(statistics)} == {jnp.dtype(jnp.float32)}

    def error(got):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
        norm = lambda v: float(jnp.linalg.norm(v.astype(jnp.float32)))  # noqa: E731
        return [norm(a.astype(jnp.float32) - b) / norm(b) for a, b in pairs]

    mine = error(grads(lambda p, x: dense_block(x, p, num_chunks=2)[0], x, w))
    theirs = error(grads(plain, x, w))
    # The plain network is more accurate on a CPU, where XLA keeps float32 between operations; hence
    # the factor.
    assert np.mean(mine) <= 1.5 * np.mean(theirs) + 1e-4


def test_residuals():
    params, x = make_params(4, dtype=np.float32), jnp.zeros((2, 8, 8, 3))

    def kept(save):
        def residuals(params, x):
            return jax.tree.leaves(
                jax.vjp(lambda p, x: dense_block(x, p, save=save)[0], params, x)[1]
            )

        return sorted(
            a.shape for a in jax.eval_shape(residuals, params, x) if a.shape[:3] == (2, 8, 8)
        )

    assert kept("features") == [(2, 8, 8, 11)]
    assert kept("conv") == [(2, 8, 8, 8)] * 4 + [(2, 8, 8, 11)]


@pytest.mark.parametrize(("save", "layers"), [("features", 2), exhaustive("conv", 3)])
def test_all_reduces(save, layers):
    """At most 2 per layer and pass, each of the size of one layer's features: O(L) bytes."""
    params = make_params(layers, dtype=np.float32)
    batch = make_batch((DEVICES, 4, 4, 3), 3 + 2 * layers)
    x, w = batch["x"].astype(np.float32), batch["w"].astype(np.float32)
    block = functools.partial(dense_block, save=save, axis_name="i", num_chunks=2)

    def step(params, x, w):
        return jax.grad(lambda p, x: jnp.sum(block(x, p)[0] * w), argnums=(0, 1))(params, x)

    specs = {"in_specs": (P(), P("i"), P("i")), "out_specs": P("i")}
    mapped = jax.shard_map(step, mesh=mesh_of((DEVICES,), ("i",)), check_vma=False, **specs)
    got = collective_sizes(jax.jit(mapped).lower(params, x, w).compile(), x.dtype)
    first, growth, bottleneck = 3, 2, 8
    widths = [first] + [growth] * (layers - 1) + [bottleneck] * layers
    forward, backward = [2 * DEVICES * n for n in widths], [2 * n for n in widths]
    assert got == sorted(("all-reduce", n) for n in forward + backward)


def test_jit_of_sharded_batch_does_not_gather(mesh8):
    params = make_params(2, dtype=np.float32)
    sharded = jax.NamedSharding(mesh8, P("data"))
    x = jax.ShapeDtypeStruct((16, 8, 8, 3), jnp.float32, sharding=sharded)
    loss = lambda p, x: jnp.sum(jnp.sin(dense_block(x, p, num_chunks=4)[0]))  # noqa: E731
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    assert {c.kind for c in collectives(program.as_text())} == {"all-reduce"}


def block_shapes(layers, dtype):
    """Return the shapes of a block's parameters: 24 channels, growth 12."""
    params = []
    for i in range(layers):
        c = 24 + 12 * i
        shapes = (c,), (c,), (1, 1, c, 48), (48,), (48,), (3, 3, 48, 12)
        params.append(DenseLayerParams(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)))
    return params


@functools.cache
def h200_temp(layers, save, dtype="float32", num_chunks=None):
    """Return MB of temporaries of a step at batch 64, 32x32 pixels, growth 12."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731

    def step(params, x, w):
        def loss(params, x):
            features, _ = dense_block(x, params, save=save, num_chunks=num_chunks)
            return jnp.sum((features * w).astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    x, w = shape(64, 32, 32, 24), shape(64, 32, 32, 24 + 12 * layers)
    return plan(step, block_shapes(layers, dtype), x, w).device.temporaries / 1e6


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_h200_temporaries_are_linear_in_the_depth():
    two, three, four = (h200_temp(layers, "features") for layers in (2, 3, 4))
    assert four - three <= 1.05 * (three - two)


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("save", "dtype", "num_chunks", "megabytes"),
    [
        ("conv", "float32", None, 145),
        ("features", "float32", None, 110),
        ("features", "float32", 1, 110),  # XLA removes loops of one iteration
        ("features", "bfloat16", None, 55),
    ],
)
def test_h200_temporaries_of_4_layers(save, dtype, num_chunks, megabytes):
    assert h200_temp(4, save, dtype, num_chunks) <= megabytes


@needs_tpu_compiler
@pytest.mark.parametrize("passes", ["forward", exhaustive("gradients")])
def test_jit_over_tpus(passes):
    """Forward, each layer does two all-reduces, and none is of pixels."""
    mesh = AbstractMesh((4,), ("data",), (AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 16, 16, 24), jnp.bfloat16, sharding=sharded)

    def run(params, x):
        return dense_block(x, params)[0].astype(jnp.float32)

    if passes == "gradients":
        run = jax.grad(lambda params, x, run=run: jnp.sum(jnp.sin(run(params, x))), argnums=(0, 1))
    found = plan(run, block_shapes(2, jnp.bfloat16), x, target="v5e").collectives
    assert {c.kind for c in found} == {"all-reduce"}
    assert max(c.bytes for c in found) <= 4 * (3 * 3 * 48 * 12 + 4 * 48)
    if passes == "forward":
        assert sum(c.count for c in found) == 4


GOOD = make_params(2, dtype=np.float32)
X = np.zeros((2, 4, 4, 3), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"`x` .* must be \(N, H, W, C\)", {"x": X[0]}),
        (ValueError, r"`params\[0\].scale1` of shape \(3,\) must be \(2,\)", {"x": X[..., :2]}),
        (ValueError, "`save` \\(='nothing'\\)", {"save": "nothing"}),
        (ValueError, r"`dropout_rate` \(=1.0\) must be", {"dropout_rate": 1.0}),
        (TypeError, "`key` must be a single PRNG key", {"dropout_rate": 0.1}),
        (ValueError, r"`mask` .* must broadcast to `x\[..., :1\]`", {"mask": X > 0}),
        (TypeError, r"`params\[0\]` must be DenseLayerParams", {"params": GOOD[0]}),
    ],
)
def test_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        dense_block(**{"x": X, "params": GOOD, **args})
