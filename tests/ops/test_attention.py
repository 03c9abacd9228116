"""dot_product_attention: numerics against all scores, selection of kernels and memory."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import dot_product_attention
from effjax.memory import plan, residual_bytes
from effjax.ops._common.platform import trace_for_platform
from tests import oracles
from tests.contexts import assert_trees_close, mesh_of
from tests.programs import collective_sizes, needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary


def random_segments(n, t):
    """Return segments in order; the last is padding."""
    return np.sort(np.random.default_rng(0).integers(0, 3, (n, t)), -1).astype(np.int32)


def random_heads(n, t, heads, kv_heads, d, dtype="f4"):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(n, t, h, d)), dtype) for h in (heads, kv_heads, kv_heads)]


def results(attend, arrays, **options):
    """Return y and the gradients of a sum of y times random weights."""
    w = np.random.default_rng(2).normal(size=arrays[0].shape)

    @jax.jit
    def run(*arrays):
        y, backward = jax.vjp(lambda *a: attend(*a, **options), *arrays)
        return y, *backward(jnp.asarray(w, y.dtype))

    return run(*arrays)


def both(shape, dtype="f8", segments=False, chunk_size=None, implementation=None, **options):
    """Return the results of the function, and those of all scores in float64."""
    if segments:
        options["segment_ids"] = random_segments(*shape[:2])
    ours = dict(chunk_size=chunk_size, implementation=implementation)
    with jax.enable_x64(dtype == "f8"):
        arrays = random_heads(*shape, dtype)
        got = results(dot_product_attention, arrays, **ours, **options)
    assert {a.dtype for a in got} == {jnp.dtype(dtype)}
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, "f8")) for a in arrays]
        return got, results(oracles.attention, wide, **options)


def assert_close(got, want, tolerance):
    """Compare to the largest of all results, because the gradients of a single key are 0."""
    size = max(np.abs(a).max() for a in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3, "scale": 0.7, "softcap": 0.5, "segments": True},
        {"causal": False, "segments": True},
    ],
    ids=["causal", "all", "full"],
)
@vary("t, heads, kv_heads", [(9, 4, 2), (1, 4, 1), (2, 6, 2), (4, 4, 4), (8, 6, 1), (29, 4, 2)])
def test_sizes(t, heads, kv_heads, options):
    """Lengths below, at and above multiples of the chunk, and heads in groups."""
    assert_close(*both((2, t, heads, kv_heads, 5), chunk_size=4, **options), 1e-12)


@vary("window, t", [(5, 13), (1, 13), (4, 12), (8, 13), (13, 13), (40, 12)])
def test_windows(window, t):
    assert_close(*both((2, t, 2, 1, 4), chunk_size=4, window=window), 1e-12)


def test_segments_out_of_order():
    """A segment may be in several pieces; a token always attends to itself."""
    ids = np.array([[5, 5, -1, 5, 2, -1, 5, 5, 7, 2, 0]])
    assert_trees_close(*both((1, 11, 2, 2, 4), segment_ids=ids, chunk_size=2), 1e-12)


@vary("dtype, tolerance", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 2e-6)])
def test_dtypes(dtype, tolerance):
    """Sums over chunks and gradients accumulate in float32."""
    assert_trees_close(*both((2, 100, 4, 2, 16), dtype, segments=True, chunk_size=8), tolerance)


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"), [("f8", 5000.0, 1e-9), ("f4", 200.0, 1e-4)]
)
def test_large_scores(dtype, scale, tolerance):
    """Scores beyond the range of exp, and a row whose first chunks are all masked."""
    ids = np.array([[0] * 6 + [1] * 6])
    found = both((1, 12, 2, 1, 4), dtype, segment_ids=ids, chunk_size=2, scale=scale)
    assert_close(*found, tolerance)


@vary("spec", [P("i", None, "j"), P("i", "j")])
def test_sharded_heads_and_tokens(spec, x64):
    """Heads are independent: they do not communicate."""
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    arrays = random_heads(4, 8, 4, 2, 6, "f8")

    def gradients(attend, *arrays):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a))), (0, 1, 2))(*arrays)

    placed = jax.device_put(arrays, NamedSharding(mesh, spec))
    ours = functools.partial(dot_product_attention, chunk_size=4)
    program = jax.jit(functools.partial(gradients, ours)).lower(*placed).compile()
    assert_trees_close(program(*placed), gradients(oracles.attention, *arrays), 1e-12)
    assert bool(collective_sizes(program, "f8")) == (spec == P("i", "j"))


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4), (2, 5, 2, 0)])
def test_empty(shape):
    found = results(dot_product_attention, [jnp.zeros(shape)] * 3)
    assert [a.shape for a in found] == [shape] * 4


def test_no_array_of_all_scores():
    """Only the scores of a pair of chunks exist; y and logsumexp are residuals."""
    arrays = random_heads(2, 64, 4, 2, 8)
    ours = functools.partial(dot_product_attention, chunk_size=16)
    jaxpr = str(jax.make_jaxpr(functools.partial(results, ours))(arrays))
    assert "f32[2,2,16,2,16]" in jaxpr and "64,64" not in jaxpr and "64,2,64" not in jaxpr
    kept = residual_bytes(ours, *arrays)
    q, k, v = (a.nbytes for a in arrays)
    assert kept.argument_bytes == q + k + v
    assert kept.bytes - kept.argument_bytes == q + 4 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("options", "pairs"),
    [({}, 36), ({"window": 16}, 15), ({"window": 17}, 15), ({"causal": False}, 64)],
)
def test_excluded_chunks_are_left_out(options, pairs):
    ours = functools.partial(dot_product_attention, chunk_size=16, **options)
    jaxpr = str(jax.make_jaxpr(functools.partial(results, ours))(random_heads(1, 128, 1, 1, 4)))
    assert jaxpr.count(f"length={pairs}") == 2


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [((1, 4096, 32, 128), 256), ((8, 4096, 32, 128), 128), ((1, 4096, 1, 64), 2048)],
)
def test_default_chunk_size(shape, chunk):
    n, _, h, _ = shape
    q = jax.ShapeDtypeStruct(shape, "bfloat16")
    jaxpr = str(jax.make_jaxpr(dot_product_attention)(q, q, q))
    assert f"f32[{n},{h},{chunk},1,{chunk}] = dot_general" in jaxpr


LENGTH = 4096


def plan_gradients(
    target, length=LENGTH, width=128, dtype="bfloat16", segments=False, **options
):  # fmt: skip
    """Plan the gradients of one sequence; by default with the heads of Qwen3-8B."""
    if segments:
        options["segment_ids"] = jnp.zeros((1, length), int)

    def loss(*arrays):
        return dot_product_attention(*arrays, **options).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, length, heads, width), dtype) for heads in (32, 8, 8)]
    return plan(jax.grad(loss, (0, 1, 2)), *arrays, target=target)


@needs_gpu_compiler
def test_memory_on_gpu():
    """All scores take 2.1 GB in float32; the products are those of the pairs below the diagonal."""
    p = plan_gradients("h100", implementation="xla")
    assert p.device.temporaries <= 140e6
    products = 2 * 32 * LENGTH**2 * 128 * 7 / 2
    assert products <= p.step_time.flops["bf16"] <= 1.07 * products


@needs_gpu_compiler
@vary("options", [{"segments": True}, {}, {"window": 1024}], ids=str)
@vary("target", ["h100", "rtx4090"])
def test_cudnn_on_gpu(target, options):
    """It is the default for half precision. With segments, it reads a mask."""
    p = plan_gradients(target, **options)
    mask = 2 * LENGTH**2 if "segments" in options else 0
    assert "fmha" in p.hlo.lower() and p.device.temporaries <= 80e6 + 2 * mask


@needs_gpu_compiler
@vary(
    "options",
    [
        {"length": 16384, "segments": True},
        {"length": 256, "dtype": "float32"},
        {"length": 256, "width": 100},
        {"length": 255, "segments": True},
        {"length": 256, "softcap": 50.0},
    ],
    ids=str,
)
def test_loop_on_gpu(options):
    """It is the default if cuDNN does not support the arguments, or its mask is large."""
    assert "fmha" not in plan_gradients("h100", **options).hlo.lower()


@pytest.mark.parametrize(
    "options", [{"segments": True}, {"segments": True, "window": 5}, {"window": 5}], ids=str
)
def test_mask_of_cudnn(options, monkeypatch):
    """`jax.nn.dot_product_attention` gets what it needs, here run by its plain implementation."""
    attend = jax.nn.dot_product_attention

    def plain(*args, implementation, **named):
        assert implementation == "cudnn"
        return attend(*args, implementation="xla", **named)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    found = both((2, 24, 4, 2, 8), "f4", implementation="cudnn", **options)
    assert_trees_close(*found, 1e-5)


@pytest.mark.exhaustive
@needs_tpu_compiler
@pytest.mark.parametrize("options", [{}, {"implementation": "splash", "segments": True}], ids=str)
def test_memory_on_tpu(options):
    p = plan_gradients("v5e", **options)
    assert ("splash" in p.hlo) == bool(options) and p.device.temporaries <= 300e6


@vary(
    "options",
    [{"segments": True, "softcap": 0.5}, {"segments": True}, {"window": 100}, {"causal": False}],
    ids=str,
)
def test_splash_matches_all_scores(options):
    """In Pallas' interpreter."""
    found = both((1, 256, 2, 1, 64), "f4", implementation="splash", **options)
    assert_trees_close(*found, 1e-5)


@pytest.mark.parametrize(
    ("platform", "how"),
    [
        ("tpu", "shard_map_unchecked"),
        ("tpu", "shard_map"),
        ("tpu", "jit"),
        ("cuda", "jit"),
        ("cpu", "jit"),
    ],
)
def test_selection(platform, how, mesh8):
    """Splash attention where it can be traced and need not be partitioned; here, never cuDNN."""

    def gradients(q, k, v):
        return jax.grad(lambda *a: jnp.sum(dot_product_attention(*a)), (0, 1, 2))(q, k, v)

    if how != "jit":
        specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": how == "shard_map"}
        gradients = jax.shard_map(gradients, mesh=mesh8, **specs)
    q, k, v = (jax.ShapeDtypeStruct((8, 128, h, 64), "bfloat16") for h in (2, 1, 1))
    with trace_for_platform(platform):
        program = str(jax.make_jaxpr(gradients)(q, k, v))
    assert ("pallas_call" in program) == (how == "shard_map_unchecked")
    assert "scan" in program and "cudnn" not in program


def test_tokamax_is_called_with_our_options(monkeypatch):
    """Without the library, which is not installed for the tests."""
    calls = []

    class Library:
        @staticmethod
        def dot_product_attention(q, k, v, **options):
            calls.append(options)
            return q

    monkeypatch.setitem(sys.modules, "tokamax", Library)
    dot_product_attention(*random_heads(1, 8, 2, 1, 4), window=3, implementation="tokamax")
    want = dict(mask=None, scale=0.5, is_causal=True, local_window_size=(2, 0))
    assert calls == [want | {"logits_soft_cap": None}]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_tokamax_matches_all_scores(window, segments):
    pytest.importorskip("tokamax", reason="pip install tokamax")
    ids = jnp.arange(64)[None] // 24 if segments else None
    options = dict(window=window, segment_ids=ids)
    found = both((1, 64, 4, 2, 32), "f4", implementation="tokamax", **options)
    assert_trees_close(*found, 1e-5)
