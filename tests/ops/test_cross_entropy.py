"""The loss and gradients of optax on whole logits, wherever and however it runs."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import linear_cross_entropy
from effjax.memory import plan, residual_bytes
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    gradients_with_parameters_of_each_device,
    in_scan,
    mesh_of,
    single_device,
)
from tests.programs import collective_sizes, needs_gpu_compiler
from tests.tiers import exhaustive

TOKENS, D, V = (16, 3), 5, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "bias": {"bias": True},
    "where_z_loss": {"bias": True, "where": True, "z_loss": 0.1},
}


def make(tokens=TOKENS, width=D, vocab_size=V, bias=True, where=False, z_loss=0.0, dtype="f8"):
    """Parameters and a batch; `z_loss` is not of these."""
    del z_loss
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(width, vocab_size)).astype(dtype)}
    if bias:
        params["bias"] = rng.normal(size=vocab_size).astype(dtype)
    batch = {
        "x": rng.normal(size=(*tokens, width)).astype(dtype),
        "labels": rng.integers(0, vocab_size, tokens),
        "w": rng.normal(size=tokens).astype(dtype),
    }
    if where:
        batch["where"] = rng.random(tokens) < 0.7
    return params, batch


def oracle(params, batch, axis_name=None, z_loss=0.0):
    logits = batch["x"] @ params["kernel"] + params.get("bias", 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(batch.get("where", True), losses, 0), ()


def op(params, batch, axis_name=None, chunk_size: int | None = 4, **options):
    names = {"bias": params.get("bias"), "where": batch.get("where")}
    x, kernel, labels = batch["x"], params["kernel"], batch["labels"]
    return linear_cross_entropy(x, kernel, labels, **names, chunk_size=chunk_size, **options), ()


def both(name):
    """The oracle and the operator with these options, and what they are applied to."""
    z_loss = {"z_loss": OPTIONS[name].get("z_loss", 0.0)}
    arrays = make(**{"bias": False} | OPTIONS[name])
    return functools.partial(oracle, **z_loss), functools.partial(op, **z_loss), *arrays


@pytest.mark.covering
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_optax(options, context, x64):
    plain, ours, params, batch = both(options)
    want = single_device(plain, params, batch)
    assert_trees_close(CONTEXTS[context](ours, params, batch), want, 1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
@pytest.mark.parametrize("options", ["bare", "where_z_loss"])
def test_parameters_may_differ_by_device(options, how, x64):
    plain, ours, params, batch = both(options)
    run = functools.partial(gradients_with_parameters_of_each_device, params=params, batch=batch)
    got, want = run(lambda *a: ours(*a)[0], how=how), run(lambda *a: plain(*a)[0], how="vmap")
    assert_trees_close(got, want, 1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("kernel", [P(), P("j"), P(None, "j")], ids=["whole", "by_d", "by_v"])
@pytest.mark.parametrize("x", [P("i"), P("i", "j"), P(None, "i")], ids=["batch", "both", "time"])
def test_explicit_mesh_of_the_arguments(x, kernel, x64):
    """No `jax.set_mesh`: the mesh is known from the types alone."""
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    params, batch = make((16, 4), width=6, vocab_size=10)
    want = gradients(oracle, params, batch)
    placed = dict(kernel=NamedSharding(mesh, kernel), bias=NamedSharding(mesh, P()))
    arrays = jax.device_put(params, placed), jax.device_put(batch, NamedSharding(mesh, x))
    assert_trees_close(gradients(op, *arrays), want, 1e-12)


def loss(op, params, x, batch):
    return jnp.sum(op(params, {**batch, "x": x})[0] * batch["w"])


def gradients(op, params, batch):
    """Of the parameters and of x."""
    gradient = jax.jit(jax.grad(functools.partial(loss, op), (0, 1)))
    return gradient(params, batch["x"], batch)


@pytest.mark.parametrize("around", [jax.checkpoint, in_scan])
def test_under(around, x64):
    plain, ours, params, batch = both("where_z_loss")
    run = around(lambda params, batch: ours(params, batch)[0])
    got = gradients(lambda params, batch: (run(params, batch), ()), params, batch)
    assert_trees_close(got, gradients(plain, params, batch), 1e-12)


def test_scan_and_vmap_over_batches(x64):
    plain, ours, params, batch = both("where_z_loss")
    batches = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), batch)

    def scanned(op):
        return lambda params, batches: (lax.map(lambda b: op(params, b)[0], batches), ())

    def mapped(op):
        return lambda params, batches: jax.vmap(op, (None, 0))(params, batches)

    want = gradients(mapped(plain), params, batches)
    for around in (scanned, mapped):
        assert_trees_close(gradients(around(ours), params, batches), want, 1e-12)


def test_second_order(x64):
    plain, ours, params, batch = both("where_z_loss")

    def curvature(f):
        def squares(x):
            d = jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, batch | {"x": x})[0])), (0, 1))(
                params, x
            )
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(d))

        return jax.jit(jax.grad(squares))(batch["x"])

    assert_trees_close(curvature(ours), curvature(plain), 1e-11)


def test_reverse_mode_only():
    _, ours, params, batch = both("bare")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: loss(ours, params, x, batch), (batch["x"],), (batch["x"],))


@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size", "chunk_size"),
    [
        ((), 5, 11, 4),
        ((7,), 5, 11, 1),
        ((2, 3, 2), 1, 11, 11),
        ((2, 3), 5, 11, 99),
        ((2, 3), 5, 11, None),
        ((2, 3), 5, 1, None),
        ((2, 3), 5, 12, 4),
        ((0, 3), 5, 11, 4),
        ((3, 0), 5, 11, None),
        ((2, 3), 0, 11, 4),
    ],
)
def test_shapes(tokens, width, vocab_size, chunk_size, x64):
    params, batch = make(tokens, width, vocab_size)
    ours = functools.partial(op, chunk_size=chunk_size)
    got, want = (single_device(f, params, batch) for f in (ours, oracle))
    if 0 not in tokens:
        assert_trees_close(got, want, 1e-12)
    assert ours(params, batch)[0].shape == tokens
    assert [d.shape for d in jax.tree.leaves(got)] == [d.shape for d in jax.tree.leaves(want)]


@pytest.mark.parametrize("tokens", [(0, 3), (3, 0)])
def test_no_tokens_have_no_gradient(tokens):
    found = gradients(op, *make(tokens))
    assert not any(np.any(d) for d in jax.tree.leaves(found))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("params_dtype", ["same", "float32"])
def test_dtypes(dtype, params_dtype):
    """Products of values in half precision; sums, also those over slices, and losses in float32."""
    kept = dtype if params_dtype == "same" else params_dtype
    params, batch = make((4, 8), width=32, vocab_size=400, dtype="f4")
    params = jax.tree.map(lambda p: jnp.asarray(p, kept), params)
    batch["x"] = jnp.asarray(batch["x"], dtype)
    ours = functools.partial(op, chunk_size=3)
    losses, (dparams, dx) = jax.jit(ours)(params, batch)[0], gradients(ours, params, batch)
    assert losses.dtype == "float32" and dx.dtype == dtype
    assert {str(d.dtype) for d in dparams.values()} == {kept}
    with jax.enable_x64(True):
        wide = lambda a, seen: np.asarray(a.astype(seen), "f8")  # noqa: E731
        params = {"kernel": wide(params["kernel"], dtype), "bias": wide(params["bias"], kept)}
        batch |= {"x": wide(batch["x"], dtype), "w": wide(batch["w"], "f8")}
        want, wants = oracle(params, batch)[0], gradients(oracle, params, batch)
    assert_trees_close(losses, want, 1e-6)
    assert_trees_close((dparams, dx), wants, {"bfloat16": 8e-3, "float16": 1e-3}.get(dtype, 1e-5))


def test_float64_losses(x64):
    assert op(*make())[0].dtype == "float64"


def test_many_slices_are_as_accurate_as_one():
    params, batch = make((4, 8), width=16, vocab_size=512, dtype="f4")
    got = single_device(functools.partial(op, chunk_size=2), params, batch)
    with jax.enable_x64(True):
        want = single_device(oracle, *make((4, 8), width=16, vocab_size=512))
    assert_trees_close(got, want, 2e-5)


def test_large_logits():
    params, batch = make(dtype="f4")
    params = jax.tree.map(lambda p: 1e4 * p, params)
    got, want = (single_device(f, params, batch) for f in (op, oracle))
    assert_trees_close(got, want, 1e-4)


def test_columns_of_minus_infinity():
    """As of a padded vocabulary: a whole slice of them, and the first one."""
    params, batch = make(dtype="f4")
    params["bias"][[*range(4), 9]] = -np.inf
    batch["labels"] = 4 + batch["labels"] % 5
    got, want = (single_device(f, params, batch) for f in (op, oracle))
    assert_trees_close(got, want, 1e-5)


def test_labels_that_are_no_columns(x64):
    """Their losses are NaN, but for those that do not count."""
    params, batch = make((7,))
    labels = batch["labels"].astype("int64")
    bad = [0, 1, 2, 3, 4]
    labels[bad] = -1, V, -100, 2**32 + 3, np.iinfo("int64").min
    batch |= {"labels": labels, "where": ~np.isin(np.arange(7), bad)}
    losses = jax.jit(lambda p, b: op(p, b | {"where": None})[0])(params, batch)
    np.testing.assert_array_equal(np.isnan(losses), np.isin(np.arange(7), bad))
    dparams, dx = gradients(op, params, batch)
    want = gradients(oracle, params, jax.tree.map(lambda a: a[5:], batch))
    assert_trees_close((dparams, dx[5:]), want, 1e-12)
    assert not np.any(dx[:5])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_dtypes_of_labels(dtype):
    """Of which some do not hold the size of the vocabulary."""
    params, batch = make(vocab_size=300, dtype="f4")
    labels = (batch["labels"] % 128).astype(dtype)
    batch["labels"] = labels.astype("int32")
    want = oracle(params, batch)
    ours = jax.jit(functools.partial(op, chunk_size=200))
    assert_trees_close(ours(params, batch | {"labels": labels}), want, 1e-5)


@pytest.mark.parametrize("where", [(3,), (16, 1), ()])
def test_where_is_broadcast(where):
    params, batch = make(dtype="f4")
    batch["where"] = np.random.default_rng(1).random(where) < 0.5
    assert_trees_close(jax.jit(op)(params, batch), jax.jit(oracle)(params, batch), 1e-5)


def test_nothing_of_tokens_by_vocabulary():
    """No array of either pass has so many elements, nor is more kept than the arguments."""
    params, batch = make((4, 8), width=16, vocab_size=640, dtype="f4")
    ours = functools.partial(op, chunk_size=128)
    jaxpr = str(jax.make_jaxpr(functools.partial(gradients, ours))(params, batch))
    assert "f32[4,8,128]" in jaxpr and "[4,8,640]" not in jaxpr and "[32,640]" not in jaxpr
    kept = residual_bytes(lambda p, x: op(p, batch | {"x": x})[0], params, batch["x"])
    assert kept.argument_bytes == sum(a.nbytes for a in (*params.values(), batch["x"]))
    logsumexp_and_labels = batch["labels"].size * (4 + 4)
    assert kept.bytes - kept.argument_bytes == logsumexp_and_labels


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [(16 * 1024, 1024), (10000, 1664), (64 * 1024, 512), (10, 2048), (0, 2048)],
)
def test_default_slices(tokens, columns):
    """Of 64 MiB of logits, in multiples of 128 columns; as wide as x where that is more."""
    shapes = [((tokens, 512), "f4"), ((512, 2048), "f4"), ((tokens,), "i4")]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    assert f":f32[{tokens},{columns}] = dot_general" in str(
        jax.make_jaxpr(linear_cross_entropy)(*args)
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("tokens", "spec"), [((16, 8), P("i")), ((16, 8), P(None, "i")), ((128,), P("i"))]
)
def test_jit_gathers_nothing(tokens, spec, kind):
    """The gradients of the parameters are summed over devices once, and nothing else is sent."""
    mesh = mesh_of((8,), ("i",), kind)
    params, batch = make(tokens, width=16, vocab_size=40, dtype="f4")
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, spec))
        gradient = jax.jit(jax.grad(functools.partial(loss, op), (0, 1)))
        sent = collective_sizes(gradient.lower(params, batch["x"], batch).compile(), "f4")
    assert {kind for kind, _ in sent} == {"all-reduce"}
    assert sum(size for _, size in sent) == 16 * 40 + 40


def test_shard_map_sums_once(mesh8):
    params, batch = make((16, 4), width=16, vocab_size=40, dtype="f4")
    mapped = jax.shard_map(
        jax.grad(lambda p, b: loss(op, p, b["x"], b)),
        mesh=mesh8, in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip
    sent = collective_sizes(jax.jit(mapped).lower(params, batch).compile(), "f4")
    assert {kind for kind, _ in sent} == {"all-reduce"}
    assert sum(size for _, size in sent) == 16 * 40 + 40


def planned(losses, batch_size):
    """The gradients of a head of 32768 columns for sequences of 1024 tokens of width 512."""
    tokens = batch_size, 1024
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype)  # noqa: E731
    args = shape(*tokens, 512), shape(512, 32768, dtype="float32"), shape(*tokens, dtype="int32")
    return plan(jax.grad(lambda *args: losses(*args).mean(), (0, 1)), *args)


@needs_gpu_compiler
@pytest.mark.parametrize(("batch_size", "columns"), [(16, 1024), exhaustive(64, 512)])
def test_memory_is_that_of_a_slice(batch_size, columns):
    """Its logits in float32, their gradient in half precision, and that of x in float32."""
    found = planned(linear_cross_entropy, batch_size).device
    assert found.temporaries <= 1.02 * batch_size * 1024 * ((4 + 2) * columns + 4 * 512)
    assert found.outputs <= 2 * batch_size * 1024 * 512 + 4 * 512 * 32768 + 2**10


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_whole_logits_need_more():
    def whole(x, kernel, labels):
        logits = jnp.dot(x, kernel.astype(x.dtype), preferred_element_type="float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    ours, plain = (planned(f, 16).peak_device_bytes for f in (linear_cross_entropy, whole))
    assert plain > 2 * 4 * 16 * 1024 * 32768 > 14 * ours


X = np.ones((4, 3), np.float32)
GOOD: dict[str, Any] = {"x": X, "kernel": np.ones((3, 5), np.float32), "labels": np.zeros(4, int)}
NO_ARRAY: list[Any] = [3, "x", [1.0], object(), np.array(["x"])]
BAD: dict[str, list] = {
    "x": [None, *NO_ARRAY, X.astype(int), 1j * X, X[:, :2], np.float32(1)],
    "kernel": [None, *NO_ARRAY, X.T.astype(int), 1j * X.T, X[0], X[:0], X.T[..., None], X.T[:, :0]],
    "labels": [None, *NO_ARRAY, X[:, 0], X[:, 0] > 0, np.zeros(3, int), np.zeros((4, 1), int)],
    "bias": [*NO_ARRAY, np.zeros(5, int), 1j * np.ones(5), np.ones(4), np.ones((1, 5))],
    "where": [*NO_ARRAY, np.ones(4), np.ones(3, bool), np.ones((2, 4), bool)],
    "z_loss": [None, -1.0, float("inf"), float("nan"), "a", [1.0]],
    "chunk_size": [0, -1, 2.0, True, "2", [2]],
    "precision": ["hi", 3.5, object()],
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_names_the_argument(name):
    for value in BAD[name]:
        with pytest.raises((TypeError, ValueError), match=rf"`{name}`"):
            linear_cross_entropy(**GOOD | {name: value})


def test_every_argument_has_its_values():
    assert set(inspect.signature(linear_cross_entropy).parameters) == set(BAD)
