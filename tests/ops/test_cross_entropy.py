"""linear_cross_entropy: numerics against optax, collectives and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import linear_cross_entropy
from effjax.memory import plan, residual_bytes
from tests import oracles
from tests.contexts import assert_trees_close, mesh_of, single_device
from tests.ops.subjects import make_head, run_head
from tests.programs import needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary

op = functools.partial(run_head, linear_cross_entropy, chunk_size=4)
oracle = functools.partial(run_head, oracles.cross_entropy)


def check(params, batch, tolerance, chunk_size: int | None = 4, **options):
    """Compare losses and gradients with those of all logits in float64."""
    got = single_device(functools.partial(op, chunk_size=chunk_size, **options), params, batch)
    with jax.enable_x64(True):
        wide = {name: np.asarray(batch[name], "f8") for name in "xw"}
        wide = batch | wide | {"labels": batch["labels"].astype("i8")}
        params = jax.tree.map(lambda p: np.asarray(p, "f8"), params)
        want = single_device(functools.partial(oracle, **options), params, wide)
    assert_trees_close(got, want, tolerance)


def loss(op, params, x, batch):
    return jnp.sum(op(params, {**batch, "x": x})[0] * batch["w"])


def gradients(op, params, batch):
    gradient = jax.jit(jax.grad(functools.partial(loss, op), (0, 1)))
    return gradient(params, batch["x"], batch)


@vary(
    "tokens, width, vocab_size, chunk_size",
    [
        ((2, 3, 2), 5, 11, 4),
        ((), 5, 11, 4),
        ((7,), 1, 11, 1),
        ((2, 3), 5, 12, 4),
        ((2, 3), 5, 11, 99),
        ((2, 3), 5, 11, None),
        ((2, 3), 5, 1, None),
        ((2, 3), 0, 11, 4),
    ],
)
def test_shapes(tokens, width, vocab_size, chunk_size, x64):
    params, batch = make_head(tokens, width, vocab_size)
    check(params, batch, 1e-12, chunk_size)
    losses = jax.eval_shape(op, params, batch)[0]
    assert losses.shape == tokens and losses.dtype == "float64"


@pytest.mark.parametrize("tokens", [(0, 3), (3, 0)])
def test_empty_batch(tokens):
    params, batch = make_head(tokens)
    found = gradients(op, params, batch)
    assert not any(np.any(d) for d in jax.tree.leaves(found))
    assert found[1].shape == batch["x"].shape


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_accuracy_of_many_chunks(label_smoothing):
    arrays = make_head((4, 8), width=16, vocab_size=512, dtype="f4")
    check(*arrays, 2e-5, chunk_size=2, label_smoothing=label_smoothing)


def test_large_logits():
    params, batch = make_head(dtype="f4")
    check(jax.tree.map(lambda p: 1e4 * p, params), batch, 1e-4)


def test_columns_of_minus_infinity():
    """As of a padded vocabulary: a whole chunk of them, and the first one."""
    params, batch = make_head(dtype="f4")
    params["bias"][[*range(4), 9]] = -np.inf
    batch["labels"] = 4 + batch["labels"] % 5
    check(params, batch, 1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_label_dtypes(dtype):
    """Of which some do not hold the size of the vocabulary."""
    params, batch = make_head(vocab_size=300, dtype="f4")
    batch["labels"] = (batch["labels"] % 128).astype(dtype)
    check(params, batch, 1e-5, chunk_size=200)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_mask_broadcasts(shape):
    params, batch = make_head(dtype="f4")
    batch["mask"] = np.random.default_rng(1).random(shape) < 0.5
    check(params, batch, 1e-5)


def test_invalid_labels_give_nan(x64):
    """Their losses are NaN, but for those that do not count."""
    params, batch = make_head((7,))
    bad = np.arange(7) < 5
    batch["labels"][bad] = -1, 11, -100, 2**32 + 3, np.iinfo("int64").min
    np.testing.assert_array_equal(np.isnan(jax.jit(op)(params, batch)[0]), bad)
    dparams, dx = gradients(op, params, batch | {"mask": ~bad})
    want = gradients(oracle, params, jax.tree.map(lambda a: a[5:], batch))
    assert_trees_close((dparams, dx[5:]), want, 1e-12)
    assert not np.any(dx[:5])


@vary("dtype, kept", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_dtypes(dtype, kept):
    """Products of half-precision values accumulate in float32, over chunks too."""
    params, batch = make_head((4, 8), width=32, vocab_size=400, dtype="f4")
    params = jax.tree.map(lambda p: jnp.asarray(p, kept), params)
    batch["x"] = jnp.asarray(batch["x"], dtype)
    ours = functools.partial(op, chunk_size=3)
    losses, (dparams, dx) = jax.jit(ours)(params, batch)[0], gradients(ours, params, batch)
    assert losses.dtype == "float32" and dx.dtype == dtype
    assert {str(d.dtype) for d in dparams.values()} == {kept}
    with jax.enable_x64(True):
        params["kernel"] = params["kernel"].astype(dtype)
        params = jax.tree.map(lambda p: np.asarray(p, "f8"), params)
        batch |= {name: np.asarray(batch[name], "f8") for name in "xw"}
        want, wants = jax.jit(oracle)(params, batch)[0], gradients(oracle, params, batch)
    assert_trees_close(losses, want, 1e-6)
    assert_trees_close((dparams, dx), wants, {"bfloat16": 8e-3, "float16": 1e-3}[dtype])


@vary(
    "x, kernel",
    [(P("i"), P(None, "j")), (P("i", "j"), P()), (P("i"), P("j")), (P(None, "i"), P(None, "j"))],
)
def test_sharded_tokens_and_kernel(x, kernel, x64):
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    params, batch = make_head((16, 4), width=6, vocab_size=10)
    want = gradients(oracle, params, batch)
    placed = dict(kernel=NamedSharding(mesh, kernel), bias=NamedSharding(mesh, P()))
    arrays = jax.device_put(params, placed), jax.device_put(batch, NamedSharding(mesh, x))
    assert_trees_close(gradients(op, *arrays), want, 1e-12)


def test_logits_never_exist_at_full_size():
    """No array of either pass has so many elements, nor is more kept than the arguments."""
    params, batch = make_head((4, 8), width=16, vocab_size=640, dtype="f4")
    ours = functools.partial(op, chunk_size=128)
    jaxpr = str(jax.make_jaxpr(functools.partial(gradients, ours))(params, batch))
    assert "f32[4,8,128]" in jaxpr and "[4,8,640]" not in jaxpr and "[32,640]" not in jaxpr
    kept = residual_bytes(lambda p, x: op(p, batch | {"x": x})[0], params, batch["x"])
    assert kept.argument_bytes == sum(a.nbytes for a in (*params.values(), batch["x"]))
    logsumexp_and_labels = batch["labels"].size * (4 + 4)
    assert kept.bytes - kept.argument_bytes == logsumexp_and_labels


@pytest.mark.parametrize(("tokens", "columns"), [(10000, 1664), (64 * 1024, 512), (0, 2048)])
def test_default_chunk_size(tokens, columns):
    """64 MiB of logits in multiples of 128 columns, or D columns if that is more."""
    shapes = [((tokens, 512), "f4"), ((512, 2048), "f4"), ((tokens,), "i4")]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    assert f":f32[{tokens},{columns}] = dot_general" in str(
        jax.make_jaxpr(linear_cross_entropy)(*args)
    )


def plan_gradients(batch_size, target="h200", sharding=None):
    """Plan the gradients of a head [512, 32768] for sequences of 1024 tokens."""
    tokens = batch_size, 1024
    args = (
        jax.ShapeDtypeStruct((*tokens, 512), "bfloat16", sharding=sharding),
        jax.ShapeDtypeStruct((512, 32768), "float32"),
        jax.ShapeDtypeStruct(tokens, "int32", sharding=sharding),
    )
    gradients = jax.grad(lambda *args: linear_cross_entropy(*args).mean(), (0, 1))
    return plan(gradients, *args, target=target)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_no_transposed_copies():
    """A transposed kernel takes as much memory as any other, also beside its embedding."""

    def gradients(embedding, kernel, tokens, **options):
        def layer(x, _):
            wide = jnp.sin(x @ jnp.ones((512, 65536), x.dtype))
            return x + jnp.sin(wide @ jnp.ones((65536, 512), x.dtype)), None

        def loss(embedding, kernel):
            x, _ = lax.scan(layer, embedding[tokens], None, length=3)
            return linear_cross_entropy(x, kernel, tokens, chunk_size=1024, **options).sum()

        return jax.grad(loss, (0, 1))(embedding, kernel)

    tokens = jax.ShapeDtypeStruct((1, 256), "int32")
    rows, columns = (
        jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((32768, 512), (512, 32768))
    )
    plain = plan(gradients, rows, columns, tokens, target="h100")
    transposed = functools.partial(gradients, transposed=True)
    p = plan(transposed, rows, rows, tokens, target="h100")
    assert p.peak_device_bytes <= 1.02 * plain.peak_device_bytes


@needs_gpu_compiler
@vary("batch_size, columns", [(16, 1024), (64, 512)])
def test_memory_of_one_chunk(batch_size, columns):
    """Logits in float32, their gradient in half precision, and that of x in float32."""
    memory = plan_gradients(batch_size).device
    assert memory.temporaries <= 1.02 * batch_size * 1024 * ((4 + 2) * columns + 4 * 512)
    assert memory.outputs <= 2 * batch_size * 1024 * 512 + 4 * 512 * 32768 + 2**10


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_jit_over_tpus():
    mesh = AbstractMesh((4,), ("data",), (AxisType.Auto,))
    p = plan_gradients(16, "v5e", NamedSharding(mesh, P("data")))
    assert p.device.temporaries <= 1.02 * 2 * 4 * 1024 * 4096
    # The gradient of the kernel, chunk by chunk.
    assert {c.kind for c in p.collectives} == {"all-reduce"}
    assert sum(c.bytes * c.count for c in p.collectives) == 4 * 512 * 32768
