"""optax transformations for low-precision parameters and optimizer state."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.ops.offload.optimizer import apply_optimizer
from effjax.optimizers import (
    _join_24_bits,
    _split_24_bits,
    adamw_8bit,
    get_hyperparams,
    in_24_bits,
    in_float32,
    scale_by_adam_8bit,
    set_hyperparams,
    split_matrices,
    stochastic_rounding,
    with_matmul_precision,
)
from tests.ops.offload.stacks import LAYERS, assert_equal_bits, layer, params
from tests.ops.offload.steps import TOKENS, embed, head, others
from tests.tiers import vary

KEY = jax.random.key(3)
BLOCK = 32
HALF = jnp.bfloat16, jnp.float16
small_blocks = functools.partial(scale_by_adam_8bit, block_size=BLOCK, min_size=0)
SMALL_BLOCKS = small_blocks()
EIGHT_BIT = adamw_8bit(1e-2, block_size=8, min_size=0)
ROUNDED = optax.chain(in_float32(optax.adamw(1e-2)), stochastic_rounding(5))
BOTH = optax.chain(EIGHT_BIT, stochastic_rounding(5))
MASTER = in_24_bits(EIGHT_BIT)
ROUNDING = stochastic_rounding(1)


def normal(shape, i=0, dtype=jnp.float32, decades=0):
    """Return normal numbers; with `decades`, of magnitudes over so many powers of ten."""
    a, b = jax.random.split(jax.random.fold_in(KEY, i))
    exponent = jax.random.uniform(b, shape, minval=-decades, maxval=0)
    return (jax.random.normal(a, shape) * 10**exponent).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def first_update(tx, updates, params):
    return tx.update(updates, tx.init(params), params)


def first_step(tx, updates, params):
    """Return new parameters."""
    return optax.apply_updates(params, first_update(tx, updates, params)[0])


def take_steps(tx, p, number=3):
    """Return the updates and the state after steps with the parameters as gradients."""
    state, update = tx.init(p), jax.jit(tx.update)
    for _ in range(number):
        updates, state = update(p, state, p)
    return updates, state


@pytest.mark.parametrize("decades", [0, 6])
def test_quantization_error(decades):
    """Compare with float64 moments: the documented bounds hold for sizes of every kind."""
    tx = small_blocks(b1=0.9, b2=0.99)

    @jax.jit
    def run():
        shapes = (3, 64), (2, 3, 70), (20,), (5, 33), (1, 32)
        gradients = [normal(shape, decades=decades) for shape in shapes]
        return [(g, tx.update(g, tx.init(g))[1]) for g in gradients]

    for g, state in run():
        mu, nu, a, s = (np.asarray(x, np.float64) for x in state[1:])
        a, s = (np.repeat(x, BLOCK, -1)[..., : mu.shape[-1]] for x in (a, s))
        m, v = a * np.sign(mu) * (mu / 127) ** 2, (s * (nu / 255) ** 2) ** 2
        wide = np.asarray(g, np.float64)
        for got, want, scale, n in (
            (np.abs(m), 0.1 * np.abs(wide), a, 127),
            (np.sqrt(v), 0.1 * np.abs(wide), s, 255),
        ):
            half = 1 / (2 * n)
            bound = scale * half * (2 * np.sqrt(want / scale) + half) + 1e-5 * want
            smallest = scale * (1 / n) ** 2 if n == 255 else 0.0  # rounded up to code 1
            assert (np.abs(got - want) <= np.maximum(bound, smallest)).all()
        assert (v > 0).all() and (np.sign(m) * np.sign(wide) >= 0).all()
        # The largest value of a block is kept.
        np.testing.assert_allclose(np.abs(m).max(), 0.1 * np.abs(wide).max(), rtol=1e-6)


def test_update_follows_float32_adam():
    """The first update is that of Adam; later ones stay close to it."""
    gradients = jnp.stack([normal((16, 96), i) + 0.5 * normal((16, 96), 100) for i in range(30)])

    @functools.partial(jax.jit, static_argnums=0)
    def updates(tx):
        step = lambda state, g: tx.update(g, state)[::-1]  # noqa: E731
        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    got, want = updates(small_blocks()), updates(optax.scale_by_adam())
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    error = np.sqrt(np.mean((got[-1] - want[-1]) ** 2) / np.mean(want[-1] ** 2))
    assert 1e-6 < error < 0.03


def test_small_parameters_have_unrounded_moments():
    p = {
        "scalar": jnp.ones((), jnp.float32),
        "empty": jnp.ones((0, 64), jnp.float32),
        "bias": normal((64,), 1, jnp.float16),
        "narrow": normal((4096, 3), 2, jnp.bfloat16),
    }
    updates, state = take_steps(adamw_8bit(1e-2), p)
    assert state[0].mu_scale == dict.fromkeys(p)
    chex.assert_trees_all_close(updates, take_steps(in_float32(optax.adamw(1e-2)), p)[0], rtol=1e-5)
    assert {a.dtype for a in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


def test_bytes_per_parameter():
    p = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    for tx, want in (
        (adamw_8bit(1e-3), 2 + 8 / 256),
        (in_float32(optax.adamw(1e-3)), 8),
        (optax.adamw(1e-3, mu_dtype=jnp.float32), 6),  # nu is bfloat16
        (stochastic_rounding(0), 0),
        (in_24_bits(adamw_8bit(1e-3)), 3 + 8 / 256),
    ):
        arrays = [a for a in jax.tree.leaves(jax.eval_shape(tx.init, p)) if a.ndim]
        assert sum(a.size * a.dtype.itemsize for a in arrays) == want * p.size


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_nonfinite_gradient_shows_in_its_block_only(bad):
    g = normal((2, 64))
    u, state = first_update(SMALL_BLOCKS, g.at[0, 40].set(bad), g)
    assert np.isnan(u[0, 40]) and np.isfinite(u).sum() == g.size - 1
    u, _ = jax.jit(SMALL_BLOCKS.update)(g, state)
    block = np.zeros(g.shape, bool)
    block[0, 32:] = True
    np.testing.assert_array_equal(np.isnan(u), block)


def test_zero_gradients():
    """Later gradients move all parameters."""
    g = jnp.zeros((2, 64))
    u, state = first_update(SMALL_BLOCKS, g, g)
    assert_equal_bits(u, g)
    u, _ = jax.jit(SMALL_BLOCKS.update)(normal(g.shape), state)
    assert np.isfinite(u).all() and (u != 0).all()


def test_errors():
    for error, match, options in (
        (ValueError, "`block_size` must be an int.*static_args", dict(block_size=jnp.asarray(8))),
        (ValueError, "`min_size` must be an int", dict(min_size=jnp.asarray(8))),
        (ValueError, r"`block_size` \(=0\)", dict(block_size=0)),
    ):
        with pytest.raises(error, match=match):
            adamw_8bit(1e-3, **options)
    for tx, dtype in (
        (adamw_8bit(1e-3), "complex64"), (adamw_8bit(1e-3), "int32"), (MASTER, "float16"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"params\['a'\] must be .* not {dtype}"):
            tx.init({"a": np.ones((64, 64), dtype)})
    p = jnp.ones(3, jnp.bfloat16)
    for tx in ROUNDING, MASTER:
        with pytest.raises(ValueError, match="`params` must be passed"):
            tx.update(p, tx.init(p))


# Stochastic rounding


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_reaches_the_neighbours_exactly(dtype):
    """Check p + u for all pairs of magnitudes; p - u cancels in part."""
    tx = stochastic_rounding(0)

    @jax.jit
    def run():
        p = normal((4000,), 1, dtype, decades=6)
        u = normal((4000,), 2, decades=8)
        u = jnp.concatenate([u, -p.astype(jnp.float32) * (1 + normal((4000,), 3, decades=8))])
        p = jnp.concatenate([p, p])
        rounded, _ = tx.update(u, tx.init(p), p)
        new = optax.apply_updates(p, rounded)
        by_offload, _ = apply_optimizer(tx, p, tx.init(p), u)
        return p, u, rounded, new, by_offload

    p, u, rounded, new, by_offload = map(np.asarray, run())
    target = p.astype(np.float32) + rounded
    total = p.astype(np.float32) + u
    nearest = total.astype(dtype)
    neighbours = nearest, *(np.nextafter(nearest, dtype(sign * np.inf)) for sign in (1, -1))
    assert new.dtype == dtype
    assert np.any([new == n for n in neighbours], 0).all()
    # The rounded number is on the other side of the sum, or equal, and less than a step away.
    np.testing.assert_array_equal(new, target.astype(dtype))
    exact = total == nearest.astype(np.float32)
    assert exact.any()
    np.testing.assert_array_equal(new[exact], nearest[exact])
    assert_equal_bits(by_offload, new)


@pytest.mark.parametrize(
    ("dtype", "p", "fraction"),
    [
        (jnp.bfloat16, 1.0, 0.1),
        (jnp.bfloat16, -0.7, -0.25),
        (jnp.float16, 1.0, 0.5),
        (jnp.float16, 3e-6, 0.1),
    ],
)
def test_rounding_is_unbiased(dtype, p, fraction):
    """The mean over many draws is the sum, within five standard errors."""
    n = 1 << 18
    p = np.full(n, p, dtype)
    step = np.abs(np.nextafter(p[0], dtype(np.inf)) - p[0]).astype(np.float32)
    u = np.full(n, fraction * step, np.float32)
    total = np.float64(p[0]) + np.float64(u[0])
    values = np.asarray(first_step(ROUNDING, u, p), np.float64)
    assert len(np.unique(values)) == 2
    assert abs(values.mean() - total) < 5 * values.std() / np.sqrt(n) + float(step) * 2**-13


def test_rounding_keeps_infinity_nan_and_other_dtypes():
    wide = np.ones(3, np.float32) / 3
    p = {"half": np.array([1, 1, 1, 3e38], jnp.bfloat16), "wide": wide}
    u = {"half": np.array([np.inf, -np.inf, np.nan, np.inf], np.float32), "wide": wide}
    new = first_step(ROUNDING, u, p)
    np.testing.assert_array_equal(np.float32(new["half"]), [np.inf, -np.inf, np.nan, np.inf])
    assert_equal_bits(new["wide"], wide + wide)


def test_random_numbers_differ_by_leaf_and_step_and_are_reproducible():
    p = {"a": jnp.ones(64, jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}
    u = jax.tree.map(lambda a: jnp.full(a.shape, 2.0**-9), p)
    tx = stochastic_rounding(0)
    update = jax.jit(tx.update)
    first, state = update(u, tx.init(p), p)
    second, _ = update(u, state, p)
    draws = [np.asarray(a) for a in (first["a"], first["b"], second["a"], second["b"])]
    assert not any((x == y).all() for i, x in enumerate(draws) for y in draws[:i])
    assert_equal_bits(update(u, tx.init(p), p)[0], first)
    same = stochastic_rounding(jax.random.key(0))
    assert_equal_bits(update(u, same.init(p), p)[0], first)


# float32 state


def test_in_float32_equals_the_inner_one_on_float32_copies():
    """LAMB consists of Adam, weight decay and a ratio of norms."""
    half = {"a": normal((8, 8), 1, jnp.bfloat16), "b": normal((8,), 2)}
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    inner = optax.lamb(1e-2)
    got, want = take_steps(in_float32(inner), half), take_steps(inner, wide)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_in_float32_passes_extra_arguments():
    tx = in_float32(optax.polyak_sgd())
    p = jnp.ones(3, jnp.bfloat16)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, value=jnp.float32(1)), p)
    assert updates.dtype == jnp.float32


# 24 bits


@pytest.mark.parametrize("sign", [1, -1])
def test_24_bits_hold_numbers_of_all_exponents(sign):
    """Half a unit of 16 bits of magnitude at most is lost, and p is the nearest bfloat16 number."""
    low = jax.random.bits(KEY, (255, 300), jnp.uint32) >> 9
    low = low.at[:, :2].set(jnp.uint32([0, 2**23 - 1]))
    bits = (jnp.arange(255, dtype=jnp.uint32)[:, None] << 23) | low
    x = sign * np.asarray(bits).view(np.float32).astype(np.float64)
    new, correction = jax.jit(_split_24_bits)(x.astype(np.float32))
    p = new.astype(jnp.bfloat16)
    assert_equal_bits(p.astype(jnp.float32), new)
    got = np.asarray(jax.jit(_join_24_bits)(p, correction), np.float64)
    spacing = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-149))), -126)
    largest = float(jnp.finfo(jnp.bfloat16).max) * (1 + 2.0**-9)  # with the largest correction
    within = np.abs(x) < largest
    assert (np.abs(got - x) <= 2.0**-16 * spacing)[within].all()
    assert (np.abs(np.float64(new) - x) <= (2.0**-8 + 2.0**-16) * spacing)[within].all()
    assert np.isfinite(got).all() and (sign * got >= 0).all()


def test_24_bits_keep_small_updates():
    """Updates of 2⁻¹² are lost in bfloat16; the master copy adds them up."""
    tx = in_24_bits(optax.identity())
    half = jnp.ones((3,), jnp.bfloat16)
    p = {"half": half, "wide": jnp.ones(3)}
    u = jax.tree.map(lambda a: jnp.full(a.shape, 2.0**-12), p)
    state, update = tx.init(p), jax.jit(tx.update)
    for _ in range(24):
        updates, state = update(u, state, p)
        p = optax.apply_updates(p, updates)
    assert state.correction["wide"] is None and p["half"].dtype == jnp.bfloat16
    master = _join_24_bits(p["half"], state.correction["half"])
    np.testing.assert_array_equal(master, 1 + 24 * 2.0**-12)
    np.testing.assert_array_equal(p["half"], master.astype(jnp.bfloat16))
    for bad in jnp.inf, jnp.nan:
        updates, new = update({**u, "half": u["half"].at[1].set(bad)}, state, p)
        np.testing.assert_array_equal(np.isfinite(p["half"] + updates["half"]), [True, False, True])
        assert new.correction["half"][1] == 0


# Composition and transformations

TRANSFORMATIONS = {
    "8 bits": EIGHT_BIT, "stochastic rounding": ROUNDED, "both": BOTH, "24 bits": MASTER
}  # fmt: skip


def test_muon_in_bfloat16(x64):
    """XLA for CPUs rounds the operands of products in float64. Extreme gradients are finite."""
    muon = optax.contrib.muon(1e-2)
    in_bfloat16 = with_matmul_precision(muon, "BF16_BF16_F32")
    g = normal((12, 20)).astype(jnp.float64)
    want, got = (first_update(tx, g, g)[0] for tx in (muon, in_bfloat16))
    error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    assert 1e-4 < error < 0.03
    for size in 1e25, 1e-40:
        g = jnp.ones((2, 64), jnp.float32).at[0, 3].set(size)
        assert (abs(first_update(in_bfloat16, g, g)[0]) < 0.1).all()


@vary("axis", [-1, -2])
def test_matrices_of_one_array_are_updated_by_themselves(axis):
    """With the state of whole arrays, also in two steps and where others have another optimizer."""
    sizes, shape = (8, 4, 4), [12, 12]
    parts = []
    for i, size in enumerate(sizes):
        shape[axis] = size
        parts.append(normal(tuple(shape), i))
    whole, bias = jnp.concatenate(parts, axis), normal((5,), 3)
    tx = optax.contrib.muon(1e-2, weight_decay=0.1)
    split = split_matrices(tx, {"qkv.kernel": sizes}, axis)

    def two_updates(tx, p):
        state = tx.init(p)
        for _ in range(2):
            updates, new = tx.update(p, state, p)
            chex.assert_trees_all_equal_shapes(state, new)
            state = new
        return updates["attn"]

    want = two_updates(tx, {"attn": {"q": parts, "bias": bias}})
    tree = {"attn": {"qkv": {"kernel": whole}, "bias": bias}}
    got, fused = two_updates(split, tree), two_updates(tx, tree)
    np.testing.assert_allclose(got["qkv"]["kernel"], jnp.concatenate(want["q"], axis), atol=1e-7)
    np.testing.assert_array_equal(got["bias"], want["bias"])
    assert abs(fused["qkv"]["kernel"] - got["qkv"]["kernel"]).max() > 1e-3
    wrong = split_matrices(tx, {"kernel": (8, 4)}, axis)
    with pytest.raises(ValueError, match=r"kernel \(=\(8, 4\)\) must add up"):
        two_updates(wrong, tree)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("size", [1e25, 3.4e38, 1e-40])
def test_extreme_gradients_make_finite_updates(name, size):
    """A gradient whose square overflows moves its parameter at most as others."""
    tx, p = TRANSFORMATIONS[name], jnp.ones((2, 64), jnp.bfloat16)
    state, update = tx.init(p), jax.jit(tx.update)
    g = jnp.ones(p.shape)
    for now in g.at[0, 3].set(size).at[1, 40].set(-size), g, g:
        updates, state = update(now, state, p)
        p = optax.apply_updates(p, updates)
    assert (abs(p - 1) < 0.05).all()
    # optax keeps the infinite square.
    finite = [np.isfinite(a).all() for a in jax.tree.leaves(bits(state)) if a.dtype == jnp.float32]
    assert all(finite) or name == "stochastic rounding"


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_does_not_overflow(dtype):
    """Sums up to the largest number stay finite, and above it round to the nearest."""
    largest = float(jnp.finfo(dtype).max)
    p = jnp.full(1000, largest, dtype)
    step = largest - float(jnp.nextafter(p[0], dtype(0)))
    for u, want in (0.0, largest), (0.4 * step, largest), (0.6 * step, np.inf):
        new = first_step(ROUNDING, np.full(p.shape, u, np.float32), p)
        assert (new.astype(jnp.float32) == want).all()


half = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
TREE = {"a": normal((16, 64), 1), "b": normal((3, 70), 2)}


def train(tx, p):
    """Minimize the sum of squares in two steps."""
    state = tx.init(p)
    for _ in range(2):
        updates, state = tx.update(p, state, p)
        p = optax.apply_updates(p, updates)
    return p, state


train_both = jax.jit(functools.partial(train, BOTH))


def bits(tree):
    """Return the arrays with keys as numbers."""
    return jax.tree.map(
        lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a,
        tree,
    )


COMPOSED = {
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "sgd": optax.sgd(0.1)}, {"a": "ours", "b": "sgd"}
    ),
}


@vary("how", COMPOSED)
def test_composition(how):
    p = half(TREE)
    new, _ = jax.jit(functools.partial(train, COMPOSED[how](BOTH)))(p)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, p)
    norms = [optax.tree.norm(jax.tree.map(jnp.float32, t)) for t in (new, p)]
    assert norms[0] < norms[1] or how == "masked"
    assert (new["a"] != p["a"]).mean() > 0.3


def test_hyperparams_of_an_offloaded_state():
    """They are read and set in all layers; names that do nothing are errors."""
    tx = optax.inject_hyperparams(optax.sgd)(1e-2, momentum=optax.constant_schedule(0.5))
    init, step = effjax.offload_train_step(embed, layer, head, tx)
    state = set_hyperparams(init(effjax.to_host(params()), others()), learning_rate=0.0)
    assert get_hyperparams(state) == {"learning_rate": 0.0, "momentum": 0.5}
    new, *_ = effjax.offload_jit(step)(state, TOKENS, None)
    assert_equal_bits((effjax.to_device(new.layers), new.others), (params(), others()))
    with pytest.raises(ValueError, match=r"`rate` .* one of .*: learning_rate, momentum"):
        set_hyperparams(new, rate=1.0)
    with pytest.raises(ValueError, match=r"`momentum` \(=1.0\) must not be a schedule"):
        set_hyperparams(new, momentum=1.0)


def test_inject_hyperparams():
    make = optax.inject_hyperparams(adamw_8bit, static_args=("block_size", "min_size"))
    tx = make(optax.linear_schedule(1e-2, 0, 10), block_size=8, min_size=0)
    got, state = jax.jit(functools.partial(train, tx))(TREE["b"])
    assert "learning_rate" in state.hyperparams and "block_size" not in state.hyperparams
    tx = adamw_8bit(optax.linear_schedule(1e-2, 0, 10), block_size=8, min_size=0)
    want, _ = jax.jit(functools.partial(train, tx))(TREE["b"])
    # Hyperparameters are arrays instead of constants, so that some moments round to other codes.
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-5)


@vary("tx", [BOTH, MASTER], ids=["both", "24 bits"])
def test_transformations(tx):
    """jit, scan and vmap compute the same as steps one by one."""
    p = half(TREE)
    want, want_state = jax.jit(functools.partial(train, tx))(p)

    def body(carry, _):
        p, state = carry
        updates, state = tx.update(p, state, p)
        return (optax.apply_updates(p, updates), state), None

    scanned = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), None, length=2)[0])(p)
    many = jax.tree.map(lambda a: jnp.stack([a, a]), p)
    mapped, _ = jax.jit(jax.vmap(functools.partial(train, tx)))(many)
    for got in scanned[0], jax.tree.map(lambda a: a[1], mapped):
        chex.assert_trees_all_close(got, want, rtol=2e-2, atol=1e-5)
    assert jax.tree.structure(scanned[1]) == jax.tree.structure(want_state)


@pytest.mark.parametrize(
    ("axis_type", "spec"), [(AxisType.Auto, P("x", "y")), (AxisType.Explicit, P(None, "x"))]
)
def test_sharded_parameters(axis_type, spec):
    """Codes are sharded like the parameters, without communication, and the numbers are equal."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:8])
    p = normal((16, 64), 1, jnp.bfloat16)
    want, _ = train_both(p)
    with jax.set_mesh(mesh):
        placed = jax.device_put(p, NamedSharding(mesh, spec))
        step = train_both.lower(placed).compile()
        new, state = step(placed)
    np.testing.assert_allclose(np.float32(new), np.float32(want), rtol=2e-2)
    assert new.sharding.is_equivalent_to(placed.sharding, 2)
    assert state[0][0].mu.sharding.is_equivalent_to(placed.sharding, 2)
    assert not effjax.memory.collectives(step.as_text())


def test_shard_map_and_pmap():
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    p = normal((16, 64), 1)
    run = functools.partial(train, EIGHT_BIT)
    want, _ = jax.jit(run)(p)
    mapped = jax.shard_map(lambda p: run(p)[0], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(jax.jit(mapped)(p), want, rtol=1e-4, atol=1e-5)
    got = jax.pmap(lambda p: run(p)[0])(p.reshape(4, 4, 64))
    np.testing.assert_allclose(got.reshape(p.shape), want, rtol=1e-4, atol=1e-5)


def test_checkpoint(tmp_path):
    """A run that is saved and restored continues with the same numbers."""
    tx = optax.chain(EIGHT_BIT, stochastic_rounding(jax.random.PRNGKey(5)))
    p, update = half(TREE), jax.jit(tx.update)
    _, state = update(p, tx.init(p), p)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (p, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", (p, state))
    assert_equal_bits(restored, (p, state))
    assert_equal_bits(update(p, restored[1], restored[0]), update(p, state, p))


# Offload


def embed_half(others, batch, key):
    return embed(others, batch, key).astype(jnp.bfloat16)


def head_half(others, x, batch, key):
    return head(others, x, batch, key).astype(jnp.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tx", [BOTH, MASTER], ids=["both", "24 bits"])
def test_offloaded_step_equals_the_one_in_device_memory(tx):
    def run(params_in, fuse_update):
        init, step = effjax.offload_train_step(
            embed_half, layer, head_half, tx, params_in=params_in, fuse_update=fuse_update
        )
        weights = half(params())
        state = init(effjax.to_host(weights) if params_in == "host" else weights, half(others()))
        run = effjax.offload_jit(step)
        for i in range(3):
            state, *_ = run(state, TOKENS, jax.random.key(i))
        return effjax.to_device((state.layers, state.layers_state))

    assert_equal_bits(bits(run("host", True)), bits(run("device", False)))


@pytest.mark.exhaustive
def test_layers_do_not_share_blocks_or_random_numbers():
    stacked = half(params())
    factors = 1 + jnp.arange(LAYERS)
    grads = half(jax.tree.map(lambda a: jnp.einsum("l,l...->l...", factors, a), stacked))
    stream = effjax.stream_update(BOTH)
    before = stream.init(stacked)
    new, state = stream.update(grads, before, stacked)
    update_layer = jax.jit(functools.partial(apply_optimizer, BOTH))
    for i in range(LAYERS):
        w, own, g, *got = jax.tree.map(lambda a, i=i: a[i], (stacked, before, grads, new, state))
        assert_equal_bits(bits(tuple(got)), bits(update_layer(w, own, g)))
    keys = jax.random.key_data(state[1].key)
    assert len(np.unique(keys, axis=0)) == LAYERS
