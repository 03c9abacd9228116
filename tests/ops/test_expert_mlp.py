"""expert_mlp: numerics against a loop over experts, matrices that are made, and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import expert_mlp
from effjax.ops.expert_mlp import Adapted, mix_experts
from effjax.ops.quantize import Quantized, dequantize, quantize
from tests import oracles
from tests.contexts import assert_trees_close, mesh_of
from tests.ops.subjects import make_experts
from tests.tiers import vary

MATRICES = "gate", "up", "down"


def results(function, params, batch, **options):
    """Return y and the gradients of x, the weights and the parameters."""

    @jax.jit
    def run(params, batch):
        def apply(x, weights, params):
            return function(x, batch["experts"], weights, **params, **options)

        y, backward = jax.vjp(apply, batch["x"], batch["weights"], params)
        return y, *backward(jnp.asarray(batch["w"], y.dtype))

    return run(params, batch)


def check(params, batch, tolerance=1e-12, **options):
    got = results(expert_mlp, params, batch, **options)
    assert_trees_close(got, results(oracles.expert_mlp, params, batch, **options), tolerance)


@vary(
    "num_tokens, k, num_experts",
    [(100, 3, 5), (7, 1, 4), (1, 2, 9), (33, 4, 1), (500, 2, 3), (3, 9, 2)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes(num_tokens, k, num_experts, transposed, x64):
    """Numbers of choices below, at and above multiples of a block; one expert has no token."""
    check(*make_experts(num_tokens, k, num_experts, transposed=transposed), transposed=transposed)


@pytest.mark.parametrize("expert", [0, 2, 4])
def test_one_expert_has_all_tokens(expert, x64):
    params, batch = make_experts(90, 1)
    check(params, batch | {"experts": np.full((90, 1), expert)})


def test_tokens_that_name_an_expert_repeatedly(x64):
    params, batch = make_experts(40, 4)
    batch["experts"][:3] = [[1, 1, 1, 1], [2, 0, 2, 0], [3, 0, 0, 3]]
    check(params, batch)


@vary("dtype", ["int8", "uint32", "int32"])
def test_choices_out_of_range(dtype, x64):
    """Within jit they add nothing, and have no gradient; outside they are an error."""
    params, batch = make_experts(20, 2)
    known = batch["experts"] < 2
    experts = np.where(known, batch["experts"], 99).astype(dtype)
    got = results(expert_mlp, params, batch | {"experts": experts})
    weights = np.where(known, batch["weights"], 0)
    y, dx, dweights, dparams = results(oracles.expert_mlp, params, batch | {"weights": weights})
    assert_trees_close(got, (y, dx, np.where(known, dweights, 0), dparams), 1e-12)
    with pytest.raises(ValueError, match="`experts` has 99, but must be in"):
        expert_mlp(batch["x"], experts, batch["weights"], **params)


def test_choices_are_data():
    params, batch = make_experts(64, 2)
    run = jax.jit(functools.partial(expert_mlp, **params))
    for seed in range(3):
        experts = np.random.default_rng(seed).integers(0, 1 + 2 * seed, (64, 2))
        run(batch["x"], experts, batch["weights"])
    assert run._cache_size() == 1


@pytest.mark.parametrize("shape", [{"num_tokens": 0}, {"k": 0}, {"hidden": 0}, {"width": 0}])
def test_empty(shape):
    params, batch = make_experts(**shape)
    found = results(expert_mlp, params, batch)
    assert not any(np.any(a) for a in jax.tree.leaves(found))
    shapes = batch["x"], batch["x"], batch["weights"], params
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)


@vary("dtype, tolerance", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 2e-6)])
@vary("kept", [None, "float32"])
def test_dtypes(dtype, tolerance, kept):
    """Sums over experts and over blocks are in float32, whatever the dtype of the parameters."""
    params, batch = make_experts(400, 4, num_experts=6, width=32, hidden=48)
    params = jax.tree.map(lambda a: jnp.asarray(a / 6, dtype).astype(kept or dtype), params)
    batch |= {name: jnp.asarray(batch[name], dtype) for name in "xw"}
    batch["weights"] = jnp.asarray(batch["weights"], "float32")
    with jax.numpy_dtype_promotion("strict"):
        got = results(expert_mlp, params, batch)
    assert got[0].dtype == got[1].dtype == dtype and got[2].dtype == "float32"
    assert {a.dtype for a in got[3].values()} == {jnp.dtype(kept or dtype)}
    with jax.enable_x64(True):
        wide = [
            {name: np.asarray(a, "i4" if name == "experts" else "f8") for name, a in tree.items()}
            for tree in (params, batch)
        ]
        assert_trees_close(got, results(oracles.expert_mlp, *wide), tolerance)


def test_activation_as_a_function(x64):
    params, batch = make_experts()
    got = results(expert_mlp, params, batch, activation=jax.nn.silu)
    assert_trees_close(got, results(expert_mlp, params, batch), 0)


def make_adapted(entry):
    """Return the matrices of an expert: of 8 bits, frozen, and pairs of adapters but for up."""
    matrices = []
    for name in MATRICES:
        size = entry[name, "a"].shape[1]
        weight = dequantize(Quantized(*entry[name, "w"]), size, jnp.float32)
        pair = entry[name, "a"], entry[name, "b"]
        matrices.append(weight if name == "up" else Adapted(weight, *pair))
    return tuple(matrices)


def add_adapters(entry):
    """Return the sums of these matrices and the products of their adapters."""
    return tuple(m.weight + m.b @ m.a if isinstance(m, Adapted) else m for m in make_adapted(entry))


def test_quantized_matrices_with_adapters():
    """Only the adapters and x have gradients."""
    params, batch = make_experts(60, 2, width=8, hidden=6, transposed=True)
    rng = np.random.default_rng(1)
    frozen = {
        (name, "w"): tuple(quantize(jnp.asarray(a, "f4"), "int8")) for name, a in params.items()
    }
    pairs = {}
    for name, a in params.items():
        e, outputs, inputs = a.shape
        pairs[name, "a"] = rng.normal(size=(e, 2, inputs)).astype("f4")
        pairs[name, "b"] = rng.normal(size=(e, outputs, 2)).astype("f4")
    batch = {n: a if n == "experts" else np.asarray(a, "f4") for n, a in batch.items()}
    rest = batch["experts"], batch["weights"]

    def apply(x, pairs):
        return mix_experts(x, *rest, frozen | pairs, make_adapted, transposed=True)

    def definition(x, pairs):
        matrices = jax.vmap(add_adapters)(frozen | pairs)
        named = dict(zip(MATRICES, matrices, strict=True))
        return oracles.expert_mlp(x, *rest, **named, transposed=True)

    got, want = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.vdot(f(*args), batch["w"]), (0, 1)))(
            batch["x"], pairs
        )
        for f in (apply, definition)
    )
    assert_trees_close(got, want, 1e-5)


def test_adapters_below_the_rounding_of_16_bits(x64):
    """The sum of the matrix and the adapter would round to the matrix."""
    params, batch = make_experts(40, 2, width=8, hidden=6)
    rng = np.random.default_rng(1)
    signs = np.tile([1.0, -1.0], (40, 4))
    pairs = {"a": np.tile([[1.0], [0.0]], (5, 4, 1)), "b": 2**-9 * rng.uniform(1, 2, (5, 1, 6))}
    experts = batch["experts"]

    def apply(dtype, make, pairs, weights):
        x, dy = (jnp.asarray(a, dtype) for a in (signs, batch["w"]))
        down = jnp.asarray(params["down"], dtype)
        ones = jnp.ones(params["gate"].shape, dtype)  # x @ ones = 0

        def mix(pairs, weights):
            return mix_experts(x, experts, weights, (ones, down, pairs), make)

        y, pull_back = jax.vjp(mix, pairs, jnp.asarray(weights, dtype))
        return y, *pull_back(dy)

    def make(entry):
        matrix = Adapted(entry[0], entry[2]["a"], entry[2]["b"])
        return matrix, matrix, entry[1]

    def add(entry):
        matrix = entry[0] + entry[2]["a"] @ entry[2]["b"]
        return matrix, matrix, entry[1]

    got = apply("bfloat16", make, jax.tree.map(jnp.float32, pairs), batch["weights"])
    want = apply("float64", add, pairs, batch["weights"])
    assert_trees_close(got, want, 2e-2)


def test_a_mesh_that_does_not_divide_the_tokens():
    params, batch = make_experts(num_tokens=9)
    arguments = (batch[name] for name in ("x", "experts", "weights"))
    with pytest.raises(ValueError, match=r"`mesh` of 8 devices must divide the tokens of `x` .9, "):
        expert_mlp(*arguments, **params, mesh=mesh_of((8,), ("i",)))
