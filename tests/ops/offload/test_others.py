"""Parameters of embed and head in host memory: the same results as on the device, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from effjax import OffloadState, linear_cross_entropy, offload_jit, offload_train_step, to_host
from effjax.memory import plan
from effjax.ops.offload import compiled, row_update
from effjax.optimizers import adamw_8bit, in_float32, stochastic_rounding
from tests.contexts import mesh_of
from tests.ops.offload import test_plans as plans
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    WIDTH,
    assert_equal_bits,
    kinds,
    on,
    to_numpy,
)
from tests.ops.offload.steps import ADAMW, TOKENS, embed, head, others
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

# XLA fuses and rewrites the update of whole arrays and that of chunks differently, which changes
# last bits. Without these passes, equal operations have equal results.
EXACT = {"xla_disable_hlo_passes": "fusion,algsimp"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Update the rows of both matrices in several chunks, for one of them with a rest."""
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 700)


@pytest.fixture
def exact(monkeypatch):
    """Compile without passes that change bits."""
    monkeypatch.setattr(compiled, "_compile", lambda lowered, options: lowered.compile(EXACT))


def with_scalar():
    return {**others(), "scale": jnp.ones(WIDTH), "unused": 0.1 * jnp.ones((30, WIDTH))}


def shift(w, x, key):
    return x + w["c"]


def scaled_head(others, x, batch, key):
    return head(others, x * others["scale"], batch, key)


def train(
    where, tx=ADAMW, w=None, embed=embed, head=scaled_head, layers=shift, steps=3, **options
):  # fmt: skip
    """Return (losses, layers, others, state of the others, norm of the gradients)."""
    init, step = offload_train_step(embed, layers, head, tx, others_in=where, **options)
    w = with_scalar() if w is None else w
    stack = {"c": 0.1 * jnp.ones((LAYERS, WIDTH))}
    if isinstance(layers, list):
        stack = [jax.tree.map(lambda a, i=i: a[i], stack) for i in range(LAYERS)]
    if options.get("params_in") != "device":
        stack = to_host(stack)
    state = init(stack, to_host(w) if where == "host" else w)
    step, losses = offload_jit(step), []
    for _ in range(steps):
        before = state.layers, state.others
        state, loss, *_ = step(state, TOKENS)
        losses.append(loss)
        assert all(a.is_deleted() for a in jax.tree.leaves(before))
    kind = {"host": "pinned_host", "device": "device"}[where]
    arrays = [a for a in jax.tree.leaves(state.others_state) if a.ndim]
    assert kinds(state.others) == {kind} and kinds(arrays) <= {kind}
    return to_numpy((losses, state.layers, state.others, state.others_state, state.grad_norm))


def count_chunked(tx, w=None):
    """Return how many parameters are updated in chunks, and how many on their own but whole."""
    large = row_update.plan_rows(tx, with_scalar() if w is None else w).large.values()
    return sum(bool(leaf.factors) for leaf in large), sum(not leaf.factors for leaf in large)


def tied_head(others, x, batch, key):
    return head({"u": others["e"].T}, x, batch, key)


def deep_embed(others, batch, key):
    """Apply matrices that the gradients need."""
    return jnp.tanh(others["e"][batch] @ others["a"]) @ others["b"]


def wide():
    """Return parameters whose last axes are long enough for 8-bit moments."""
    return {"e": jax.random.normal(KEY, (50, 24)), "u": jax.random.normal(KEY, (WIDTH, 19))}


def wide_embed(others, batch, key):
    return others["e"][batch, :WIDTH].astype(jnp.float32)


def deep():
    return others() | {"a": jnp.eye(WIDTH) * 0.7, "b": jnp.eye(WIDTH) * 0.5, "scale": jnp.ones(8)}


def summed_head(others, x, batch, key):
    """Return the sum of the losses and the number of rows of some tokens."""
    weight = (batch > 3).sum()
    return scaled_head(others, x, batch, key) * weight, weight


def in_bfloat16():
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), with_scalar())


SGD = optax.sgd(0.5, momentum=0.9)  # unlike Adam, it depends on the size of the gradients
ADAM_8BIT = adamw_8bit(1e-2, block_size=3, min_size=1)
STEPS = {
    "tied clipped": {
        "w": {"e": others()["e"]}, "head": tied_head, "fuse_update": False, "clip_norm": 0.1,
        "num_microbatches": 2,
    },
    "clipped by layer, scaled": {
        "tx": SGD, "clip_norm": 0.05, "clip_by": "layer", "fuse_update": False, "loss_scale": 8.0
    },
    "weighted, clipped by previous": {
        "tx": SGD, "clip_norm": 0.1, "clip_by": "previous", "head": summed_head,
        "weighted_loss": True, "num_microbatches": 2,
    },
    "8-bit, clipped": {
        "tx": ADAM_8BIT, "w": wide(), "embed": wide_embed, "head": head, "clip_norm": 0.1,
        "clip_by": "layer", "num_microbatches": 2,
    },
    "bfloat16": {"tx": in_float32(ADAMW), "w": in_bfloat16(), "embed": wide_embed},
    "list clipped": {"layers": [shift] * LAYERS, "fuse_update": False, "clip_norm": 0.1},
    "deep embed, layers on the device": {
        "w": deep(), "embed": deep_embed, "num_microbatches": 2, "params_in": "device"
    },
    "accumulated": {"tx": optax.MultiSteps(ADAMW, 2)},
    "lamb": {"tx": optax.lamb(1e-2)},
    "array": {
        "w": others()["e"], "embed": lambda others, batch, key: others[batch],
        "head": lambda others, x, batch, key: jnp.mean(x**2),
    },
}  # fmt: skip


@vary("name", STEPS)
def test_training_equals_others_on_the_device(name, exact):
    assert_equal_bits(train("host", **STEPS[name]), train("device", **STEPS[name]))


def test_large_parameters_are_updated_in_chunks():
    assert count_chunked(ADAMW) == (3, 0)
    rounded = optax.chain(in_float32(ADAMW), stochastic_rounding(0))
    assert count_chunked(rounded, in_bfloat16()) == (3, 0)
    assert count_chunked(optax.lamb(1e-2)) == (0, 3)
    leaf = row_update.plan_rows(ADAMW, with_scalar()).large[0]
    assert leaf.num_rows // leaf.size >= 2 and leaf.num_rows % leaf.size
    assert leaf.factors == [1, 1, 1]
    assert count_chunked(ADAM_8BIT, wide()) == (2, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tx", "is_chunked"),
    [
        (optax.MultiSteps(ADAMW, 2), True),
        (optax.lion(1e-2), True),
        (SGD, True),
        (optax.sgd(optax.linear_schedule(0.5, 0.1, 3), momentum=0.9), True),
        (optax.lars(1e-2), False),  # norms of whole parameters
        (optax.contrib.muon(1e-2), False),
        (optax.adafactor(1e-2, min_dim_size_to_factor=4), False),
    ],
)  # fmt: skip
def test_optimizers_that_work_element_by_element_are_chunked(tx, is_chunked):
    assert count_chunked(tx) == ((3, 0) if is_chunked else (0, 3))


@pytest.mark.exhaustive
def test_noise_differs_between_chunks():
    """Each chunk has its own key, and the key of the state advances as on the device."""
    tx = optax.chain(optax.identity(), optax.add_noise(1.0, 0.0, 0), optax.sgd(1.0))
    w = {"e": jnp.zeros((13, WIDTH)), "u": jnp.zeros((WIDTH, 17))}
    options = {
        "w": w, "steps": 1, "embed": lambda others, batch, key: others["e"][batch],
        "head": lambda others, x, batch, key: 0.0 * jnp.sum(x),
    }  # fmt: skip
    assert count_chunked(tx, w)[0] == 2
    got, expected = (train(where, tx, **options) for where in ("host", "device"))
    assert_equal_bits(got[3], expected[3])
    assert len(np.unique(got[2]["e"])) == got[2]["e"].size
    assert_equal_bits(got, train("host", tx, **options))


def test_rejects_shared_array():
    init, _ = offload_train_step(embed, shift, scaled_head, ADAMW, others_in="host")
    w = to_host(jnp.ones((LAYERS, WIDTH)))
    with pytest.raises(ValueError, match=r"`others\['e'\]` and `others\['f'\]` are the same array"):
        init({"c": w}, {"e": w, "f": w})


# Planned memory.

VOCABULARY = 32 * plans.WIDTH
TABLE_BYTES = 4 * VOCABULARY * plans.WIDTH


def lookup(others, batch, key):
    return others["table"][batch]


def large_head(others, x, batch, key):
    return linear_cross_entropy(x, others["head"], batch).mean()


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_device_holds_chunks_of_the_state(monkeypatch):
    """The device holds two gradients, and no array is twice in host memory."""
    monkeypatch.undo()  # CHUNK_BYTES
    others = {
        "table": plans.shape(VOCABULARY, plans.WIDTH, host=True),
        "head": plans.shape(plans.WIDTH, VOCABULARY, host=True),
    }
    w, tx = plans.stacked(4), optax.adam(1e-3)

    def place(tree, least_ndim):
        return jax.tree.map(
            lambda a: plans.shape(*a.shape, host=a.ndim >= least_ndim, dtype=a.dtype), tree
        )

    layers_state = place(jax.eval_shape(jax.vmap(tx.init), w), 2)
    state = OffloadState(w, others, layers_state, place(jax.eval_shape(tx.init, others), 1))
    _, step = offload_train_step(
        lookup, plans.layer, large_head, tx, others_in="host", fuse_update=False,
        num_microbatches=4,
    )  # fmt: skip
    tokens = plans.shape(plans.BATCH, dtype="int32")
    program = plan(offload_jit(step), state, tokens, jax.random.key(0))
    assert program.peak_device_bytes <= 2 * TABLE_BYTES + 4 * row_update.CHUNK_BYTES
    state_bytes = 6 * TABLE_BYTES + 12 * plans.LAYER_BYTES
    gradients = 4 * plans.LAYER_BYTES
    assert program.host.total <= state_bytes + gradients + 5 * plans.BOUNDARY_BYTES
    assert program.host.aliased >= 0.99 * state_bytes


@needs_gpu_compiler
def test_initial_state_is_streamed():
    others = {"table": plans.shape(VOCABULARY, plans.WIDTH, host=True)}
    init = lambda w: row_update.init_rows(optax.adam(1e-3), w, w)  # noqa: E731
    program = plan(offload_jit(init, donate=False), others)
    assert program.peak_device_bytes <= 1.01 * TABLE_BYTES
    assert program.host.temporaries == 0


# Several devices.


def train_over(mesh, where, specs, wrap=lambda f: f, mean=lambda x: x, **options):
    init, step = offload_train_step(
        lambda others, batch, key: jax.nn.one_hot(batch, 16) @ others["e"], shift,
        lambda others, x, batch, key: mean(
            optax.softmax_cross_entropy(x @ others["u"], jax.nn.one_hot(batch, 11)).mean()
        ),
        optax.adam(1e-2), others_in=where, **options,
    )  # fmt: skip
    w = {"e": jax.random.normal(KEY, (16, WIDTH)), "u": others()["u"]}
    place = lambda a, spec: jax.device_put(a, on(mesh, spec, where == "host"))  # noqa: E731
    w = {name: place(a, specs[name]) for name, a in w.items()}
    layers = {"c": 0.1 * jnp.ones((2, WIDTH))}
    state = init(jax.device_put(layers, on(mesh, P(), True)), w)
    batch = jax.device_put(jnp.arange(32) % 11, on(mesh, P("i")))
    run = offload_jit(wrap(step))
    for _ in range(2):
        state, loss, *_ = run(state, batch)
    return state, loss, run


CLIPPED = {"fuse_update": False, "clip_norm": 0.1}


@pytest.mark.exhaustive
def test_jit_over_mesh_with_sharded_parameters(exact):
    specs = {"e": P("i"), "u": P(None)}
    mesh = mesh_of((8,), ("i",))
    with jax.set_mesh(mesh):
        got = train_over(mesh, "host", specs, **CLIPPED)
        expected = train_over(mesh, "device", specs, **CLIPPED)
    assert_equal_bits(to_numpy(got[:2]), to_numpy(expected[:2]))
    for a in (got[0].others["e"], got[0].others_state[0].mu["e"]):
        assert a.sharding.is_equivalent_to(on(mesh, specs["e"], True), a.ndim)


@pytest.mark.exhaustive
def test_shard_map(exact):
    mesh, whole = mesh_of((8,), ("i",)), {"e": P(), "u": P()}
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    wrap = functools.partial(jax.shard_map, mesh=mesh, **specs)
    mean = lambda x: lax.pmean(x, "i")  # noqa: E731
    got = train_over(mesh, "host", whole, wrap, mean, num_microbatches=2, **CLIPPED)
    expected = train_over(mesh, "device", whole, wrap, mean, num_microbatches=2, **CLIPPED)
    assert_equal_bits(to_numpy(got[:2]), to_numpy(expected[:2]))
