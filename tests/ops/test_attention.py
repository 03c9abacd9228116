"""dot_product_attention: numerics against all scores, selection of kernels and memory."""

import functools
from typing import Any

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

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"window": 3, "scale": 0.7, "softcap": 0.5, "segments": True},
    "full": {"causal": False, "segments": True},
}


def random_segments(n, t, seed=0):
    """Return segments in order; the last is padding."""
    return np.sort(np.random.default_rng(seed).integers(0, 3, (n, t)), -1).astype(np.int32)


@vary("spec", [P("i", None, "j"), P("i", "j")])
def test_sharded_heads_and_tokens(spec, x64):
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    q, k, v = random_heads(4, 8, 4, 2, 6)

    def loss(attend, q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v)))

    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k, v)]
    ours = functools.partial(dot_product_attention, block_size=4)
    got = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1, 2)))(*placed)
    want = jax.grad(functools.partial(loss, oracles.attention), (0, 1, 2))(q, k, v)
    assert_trees_close(got, want, 1e-12)


def random_heads(n, t, heads, kv_heads, d, dtype="f8"):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(n, t, h, d)), dtype) for h in (heads, kv_heads, kv_heads)]


def results(attend, q, k, v, **options):
    """Return y and the gradients of a sum of y times random weights."""
    w = np.random.default_rng(2).normal(size=q.shape)

    @jax.jit
    def run(*arrays):
        y, backward = jax.vjp(lambda *a: attend(*a, **options), *arrays)
        return y, *backward(jnp.asarray(w, y.dtype))

    return run(q, k, v)


def assert_close(got, want, tolerance):
    """Compare to the largest of all results, because the gradients of a single key are 0."""
    size = max(float(jnp.abs(a).max()) for a in want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, "f8"), b, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("options", OPTIONS)
@vary("t, heads, kv_heads", [(9, 4, 2), (1, 4, 1), (2, 6, 2), (4, 4, 4), (8, 6, 1), (29, 4, 2)])
def test_sizes(t, heads, kv_heads, options, x64):
    """Lengths below, at and above multiples of the block, and heads in groups."""
    named = dict(OPTIONS[options])
    segments = random_segments(2, t) if named.pop("segments", False) else None
    named["segment_ids"] = segments
    arrays = random_heads(2, t, heads, kv_heads, 5)
    got = results(dot_product_attention, *arrays, block_size=4, **named)
    assert_close(got, results(oracles.attention, *arrays, **named), 1e-12)


@vary("window, t", [(5, 13), (1, 13), (4, 12), (8, 13), (13, 13), (40, 12)])
def test_windows(window, t, x64):
    arrays = random_heads(2, t, 2, 1, 4)
    ours = functools.partial(dot_product_attention, block_size=4, window=window)
    got = results(ours, *arrays)
    assert_close(got, results(oracles.attention, *arrays, window=window), 1e-12)


def test_segments_out_of_order(x64):
    """A segment may be in several pieces; a token always attends to itself."""
    ids = np.array([[5, 5, -1, 5, 2, -1, 5, 5, 7, 2, 0]])
    arrays = random_heads(1, 11, 2, 2, 4)
    named = dict(segment_ids=jnp.asarray(ids))
    ours = functools.partial(dot_product_attention, block_size=2, **named)
    got = results(ours, *arrays)
    assert_trees_close(got, results(oracles.attention, *arrays, **named), 1e-12)


@vary("dtype, tolerance", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 2e-6)])
def test_dtypes(dtype, tolerance):
    """Sums over blocks and gradients accumulate in float32."""
    arrays = random_heads(2, 100, 4, 2, 16, dtype)
    named = dict(segment_ids=jnp.asarray(random_segments(2, 100)))
    ours = functools.partial(dot_product_attention, block_size=8, **named)
    got = results(ours, *arrays)
    assert {str(a.dtype) for a in got} == {dtype}
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, "f8")) for a in arrays]
        assert_trees_close(got, results(oracles.attention, *wide, **named), tolerance)


def test_large_scores():
    """Scores beyond the range of exp, and a row whose first blocks are all masked."""
    q, k, v = random_heads(1, 12, 2, 1, 4, "f4")
    ids = jnp.asarray([[0] * 6 + [1] * 6])
    got = results(dot_product_attention, 100 * q, 100 * k, v, segment_ids=ids, block_size=2)
    want = results(oracles.attention, 100 * q, 100 * k, v, segment_ids=ids)
    assert_close(got, want, 1e-4)


def test_second_order(x64):
    arrays = random_heads(1, 7, 2, 1, 3)

    def curvature(attend):
        def squares(*arrays):
            loss = lambda *a: jnp.sum(jnp.sin(attend(*a)))  # noqa: E731
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*arrays))

        return jax.jit(jax.grad(squares, (0, 1, 2)))(*arrays)

    ours = functools.partial(dot_product_attention, block_size=3)
    assert_trees_close(curvature(ours), curvature(oracles.attention), 1e-11)


def test_reverse_mode_only():
    q, k, v = random_heads(1, 4, 2, 1, 4, "f4")
    with pytest.raises(NotImplementedError, match="dot_product_attention .* forward-mode"):
        jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (q,))


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4), (2, 5, 2, 0)])
def test_empty(shape):
    x = jnp.zeros(shape)
    y, *gradients = results(dot_product_attention, x, x, x)
    assert y.shape == shape and [g.shape for g in gradients] == [shape] * 3


def test_no_array_of_all_scores():
    """Only the scores of a pair of blocks exist; y and logsumexp are residuals."""
    arrays = random_heads(2, 64, 4, 2, 8, "f4")
    ours = functools.partial(dot_product_attention, block_size=16)
    jaxpr = str(jax.make_jaxpr(functools.partial(results, ours))(*arrays))
    assert "f32[2,2,16,2,16]" in jaxpr and "64,64" not in jaxpr and "64,2,64" not in jaxpr
    kept = residual_bytes(ours, *arrays)
    q, k, v = (a.nbytes for a in arrays)
    assert kept.argument_bytes == q + k + v
    assert kept.bytes - kept.argument_bytes == q + 4 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("options", "pairs"),
    [({}, 36), ({"window": 16}, 15), ({"window": 17}, 15), ({"causal": False}, 64)],
)
def test_excluded_blocks_are_left_out(options, pairs):
    arrays = random_heads(1, 128, 1, 1, 4, "f4")
    ours = functools.partial(dot_product_attention, block_size=16, **options)
    jaxpr = str(jax.make_jaxpr(functools.partial(results, ours))(*arrays))
    assert jaxpr.count(f"length={pairs}") == 2


@pytest.mark.parametrize(
    ("shape", "block"),
    [((1, 4096, 32, 128), 256), ((8, 4096, 32, 128), 128), ((1, 4096, 1, 64), 2048)],
)
def test_default_block_size(shape, block):
    n, _, h, _ = shape
    q = jax.ShapeDtypeStruct(shape, "bfloat16")
    jaxpr = str(jax.make_jaxpr(dot_product_attention)(q, q, q))
    assert f"f32[{n},{h},{block},1,{block}] = dot_general" in jaxpr


@pytest.mark.parametrize(
    ("spec", "kind"), [(P("i"), AxisType.Auto), (P(None, None, "i"), AxisType.Explicit)]
)
def test_jit_does_not_communicate(spec, kind):
    """Sequences and heads are independent."""
    mesh = mesh_of((8,), ("i",), kind)
    q, k, v = random_heads(8, 16, 16, 8, 4, "f4")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k, v)]
        run = functools.partial(dot_product_attention, block_size=4)
        gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1, 2)))
        assert not collective_sizes(gradient.lower(*placed).compile(), "f4")


LENGTH = 4096


def abstract_heads(kv_heads=8, length=LENGTH):
    """Return the queries, keys and values of Qwen3-8B."""
    shapes = [(1, length, h, 128) for h in (32, kv_heads, kv_heads)]
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


def gradients_of(implementation, **options):
    def loss(q, k, v):
        y = dot_product_attention(q, k, v, implementation=implementation, **options)
        return y.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


@needs_gpu_compiler
def test_memory_on_gpu():
    """All scores take 2.1 GB in float32; the products are those of the pairs below the diagonal."""
    p = plan(gradients_of("xla"), *abstract_heads(), target="h100")
    assert p.device.temporaries <= 140e6
    products = 2 * 32 * LENGTH**2 * 128 * 7 / 2
    assert products <= p.step_time.flops["bf16"] <= 1.07 * products


@needs_gpu_compiler
@vary("options", [{"segments": True}, {}, {"window": 1024}], ids=str)
@vary("target", ["h100", "rtx4090"])
def test_cudnn_on_gpu(target, options):
    """It is the default for half precision. With segments, it reads a mask."""
    named, mask = dict(options), 0
    if named.pop("segments", False):
        named["segment_ids"], mask = jnp.asarray(random_segments(1, LENGTH)), 2 * LENGTH**2
    p = plan(gradients_of(None, **named), *abstract_heads(), target=target)
    assert "fmha" in p.hlo.lower() and p.device.temporaries <= 80e6 + 2 * mask


@needs_gpu_compiler
@vary("why", ["long segments", "float32", "head size", "segments of odd length", "soft cap"])
def test_loop_on_gpu(why):
    """It is the default if cuDNN does not support the arguments, or its mask is large."""
    length = {"long segments": 16384, "segments of odd length": 255}.get(why, 256)
    q, k, v = abstract_heads(length=length)
    if why == "head size":
        q, k, v = (jax.ShapeDtypeStruct((*a.shape[:3], 100), a.dtype) for a in (q, k, v))
    if why == "float32":
        q, k, v = (jax.ShapeDtypeStruct(a.shape, "float32") for a in (q, k, v))
    options = {"segment_ids": jnp.zeros((1, length), int)} if "segments" in why else {}
    options |= {"softcap": 50.0} if why == "soft cap" else {}
    p = plan(gradients_of(None, **options), q, k, v, target="h100")
    assert "fmha" not in p.hlo.lower()


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
    named = dict(options)
    if named.pop("segments", False):
        named["segment_ids"] = jnp.asarray(random_segments(2, 24))
    arrays = random_heads(2, 24, 4, 2, 8, "f4")
    got = results(
        functools.partial(dot_product_attention, implementation="cudnn", **named), *arrays
    )
    assert_trees_close(got, results(oracles.attention, *arrays, **named), 1e-5)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_splash_on_tpu():
    arrays, segments = abstract_heads(), jnp.zeros((1, LENGTH), int)
    p = plan(gradients_of("splash", segment_ids=segments), *arrays, target="v5e")
    assert "splash" in p.hlo and p.device.temporaries <= 300e6


@needs_tpu_compiler
@pytest.mark.exhaustive
def test_memory_on_tpu():
    p = plan(gradients_of(None), *abstract_heads(), target="v5e")
    assert "splash" not in p.hlo and p.device.temporaries <= 300e6


@vary(
    "options",
    [{"segments": True, "softcap": 0.5}, {"segments": True}, {"window": 100}, {"causal": False}],
    ids=str,
)
def test_splash_matches_all_scores(options):
    """In Pallas' interpreter."""
    named = dict(options)
    if named.pop("segments", False):
        named["segment_ids"] = jnp.asarray(random_segments(1, 256))
    arrays = random_heads(1, 256, 2, 1, 64, "f4")
    ours = functools.partial(dot_product_attention, implementation="splash", **named)
    got = results(ours, *arrays)
    assert_trees_close(got, results(oracles.attention, *arrays, **named), 1e-5)


@pytest.mark.parametrize("how", ["jit", "shard_map", "shard_map_unchecked"])
def test_selection_on_tpu(how, mesh8):
    """Splash attention where it can be traced and need not be partitioned."""

    def gradients(q, k, v):
        return jax.grad(lambda *a: jnp.sum(dot_product_attention(*a)), (0, 1, 2))(q, k, v)

    if how != "jit":
        check = how == "shard_map"
        gradients = jax.shard_map(
            gradients, mesh=mesh8, in_specs=P("data"), out_specs=P("data"), check_vma=check
        )
    q, k, v = (jax.ShapeDtypeStruct((8, 128, h, 64), "bfloat16") for h in (2, 1, 1))
    with trace_for_platform("tpu"):
        program = str(jax.make_jaxpr(gradients)(q, k, v))
    assert ("pallas_call" in program) == (how == "shard_map_unchecked")


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_selection_without_cudnn(platform):
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")
    with trace_for_platform(platform):
        program = str(jax.make_jaxpr(dot_product_attention)(q, q, q))
    assert "scan" in program and "cudnn" not in program


def test_tokamax_is_called_with_our_options(monkeypatch):
    """Without the library, which is not installed for the tests."""
    calls = []

    class Library:
        @staticmethod
        def dot_product_attention(q, k, v, **options):
            calls.append(options)
            return q

    monkeypatch.setitem(__import__("sys").modules, "tokamax", Library)
    q, k, v = random_heads(1, 8, 2, 1, 4, "f4")
    dot_product_attention(q, k, v, window=3, implementation="tokamax")
    want = dict(mask=None, scale=0.5, is_causal=True, local_window_size=(2, 0))
    assert calls == [want | {"logits_soft_cap": None}]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_tokamax_matches_all_scores(window, segments):
    pytest.importorskip("tokamax", reason="pip install tokamax")
    arrays = random_heads(1, 64, 4, 2, 32, "f4")
    ids = jnp.arange(64)[None] // 24 if segments else None
    options = dict(window=window, segment_ids=ids)
    ours = functools.partial(dot_product_attention, implementation="tokamax")
    got = results(ours, *arrays, **options)
    assert_trees_close(got, results(oracles.attention, *arrays, **options), 1e-5)


X = np.ones((2, 4, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, "`q` must be floating point", {"q": X.astype(int)}),
        (TypeError, "the same dtype, not float32, float16", {"k": X.astype("f2")}),
        (ValueError, r"`q` of shape \(4, 4, 8\) must be \[N, T, H, D\]", {"q": X[0]}),
        (ValueError, r"`k` of shape \(2, 3, 4, 8\)", {"k": X[:, :3]}),
        (ValueError, r"`v` of shape \(2, 4, 2, 8\)", {"v": X[:, :, :2]}),
        (ValueError, "The 3 heads of `k`", {"k": X[:, :, :3], "v": X[:, :, :3]}),
        (ValueError, r"`segment_ids` of shape \(4,\)", {"segment_ids": np.zeros(4, int)}),
        (TypeError, "`segment_ids` must be integer", {"segment_ids": X[..., 0, 0]}),
        (ValueError, r"`window` \(=0\)", {"window": 0}),
        (ValueError, "`window` needs causal=True", {"window": 2, "causal": False}),
        (ValueError, r"`block_size` \(=0\)", {"block_size": 0}),
        (ValueError, r"`scale` \(=inf\)", {"scale": float("inf")}),
        (ValueError, r"`softcap` \(=0\) must be positive", {"softcap": 0}),
        (ValueError, '"cudnn" .* `softcap`', {"softcap": 2.0, "implementation": "cudnn"}),
        (ValueError, r"`implementation` \(='flash'\)", {"implementation": "flash"}),
        (ValueError, r"T \(=4\) must be a multiple of 128", {"implementation": "splash"}),
    ],
)
def test_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        dot_product_attention(**{"q": X, "k": X, "v": X} | args)
