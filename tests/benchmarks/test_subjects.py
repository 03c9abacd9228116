"""A tiny run of each benchmark: equal results, and the columns of its tables.

The peers of a subject are compared with effjax, or traced. `test_plans` plans some programs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
from benchmarks import (
    cross_entropy,
    deform_attention,
    deform_conv,
    dense_block,
    expert_mlp,
    fp8,
    pytorch,
    resnet,
    roi,
    sync_batch_norm,
    tpu,
)
from benchmarks import offload_forms as forms
from benchmarks.transformer import TransformerLM
from effjax.native import is_available
from tests.benchmarks.rows import TINY, by_name
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

NATIVE = {"effjax native"} if is_available("cpu") else set()


def test_batch_norm():
    rows = by_name(sync_batch_norm.measure_norms((2, 4, 4, 4), "float32", rounds=1))
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@pytest.mark.exhaustive
def test_sync_batch_norm():
    shape = sync_batch_norm.SHARDED["small"]
    rows = sync_batch_norm.measure_devices(shape, [8]).rows  # in a process of its own
    assert {row["devices"] for row in rows} == {8}
    assert all(row["difference"] < 1e-4 for row in rows)
    flax, _, ours, _ = rows
    assert 1 <= ours["all_reduces"] <= flax["all_reduces"] and ours["kept"] < flax["kept"]


ATTENTION = deform_attention.Case(
    5, shapes=((4, 5), (2, 3)), heads=2, channels=3, points=2, batch=2
)
BOXES = roi.Case(2, boxes=4, channels=2, height=64, width=96)


@vary(
    "measure, names, tolerance",
    [
        (
            partial(deform_conv.measure_case, deform_conv.Case(2, 4, 5, 6, 2), backward=True),
            {"plain XLA", "effjax xla"} | NATIVE,
            1e-5,
        ),
        (
            partial(deform_attention.measure_case, ATTENTION, backward=True),
            {"packed gather", "effjax xla"} | NATIVE,
            1e-5,
        ),
        (partial(roi.measure_case, BOXES, backward=True), {"effjax xla"}, 1e-4),
        (
            partial(dense_block.measure_block, 1, 2, 6, growth_rate=2, channels=3),
            set(dense_block.BLOCKS),
            1e-4,
        ),
    ],
)
def test_programs_compute_the_same(measure, names, tolerance):
    rows = by_name(measure(rounds=1))
    assert rows.keys() >= names
    assert max(row["difference"] for row in rows.values()) < tolerance


@pytest.mark.exhaustive
def test_pytorch_computes_the_same_block():
    pytest.importorskip("torch")
    args = dense_block.make_arrays(2, 2, 5, 3, 4)
    expected = jax.jit(dense_block.train_step(dense_block.plain))(*args)
    for step in pytorch.block_steps(*args).values():
        for a, b in zip(jax.tree.leaves(step()), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
def test_losses_of_cross_entropy_agree():
    model = TransformerLM(vocab_size=9, num_layers=1, width=8, num_heads=2, rngs=nnx.Rngs(0))
    gradients = []
    for losses in cross_entropy.LOSSES.values():
        fn, params, _ = cross_entropy.gradient_steps(model, losses, 2, 32)["model"]
        gradients.append(jax.jit(fn)(params, jnp.ones((2, 33), int)))
    for actual in gradients[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), actual, gradients[0])


def test_gradients_of_experts_agree():
    rng = np.random.default_rng(0)
    layer = dict(zip(expert_mlp.SMALL, (3, 2, 4, 6), strict=True))
    gradients = []
    for program in expert_mlp.PROGRAMS.values():
        step, experts, *shapes = expert_mlp.gradient_step(program, layer, 20)
        if not gradients:
            arrays = [rng.normal(size=a.shape).astype("f4") for a in shapes]
            chosen = np.argsort(rng.random((20, 3)))[:, :2].astype(experts.dtype)
        gradients.append(jax.jit(step)(chosen, *arrays))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), *gradients)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bottleneck", [False, True])
def test_flax_resnet_computes_the_same_logits(monkeypatch, bottleneck):
    sizes = dict(bottleneck=bottleneck, stage_sizes=(1, 1))
    monkeypatch.setitem(resnet.NETWORKS, "tiny", sizes)
    flax, _, ours, *_ = resnet.make_networks("tiny", 3, jnp.float32).values()
    x = jax.random.normal(jax.random.key(0), (2, 17, 16, 3))
    shapes, variables = (jax.eval_shape(m.init, jax.random.key(0), x) for m in (flax, ours))
    variables = jax.tree.map(
        lambda a: np.random.default_rng(a.size).normal(size=a.shape).astype(a.dtype), variables
    )
    params = variables["params"]
    stem = {"Conv_0": "stem_conv", "BatchNorm_0": "stem_norm", "Dense_0": "classifier"}
    flax_params = {flax: params[name] for flax, name in stem.items()}
    for i, name in enumerate(k for k in params if k.startswith("stages")):
        block, count = params[name], 3 if bottleneck else 2
        names = {f"Conv_{k}": f"conv{k + 1}" for k in range(count)}
        names |= {f"BatchNorm_{k}": f"norm{k + 1}" for k in range(count)}
        names |= {f"Conv_{count}": "shortcut", f"BatchNorm_{count}": "shortcut_norm"}
        flax_block = {flax: block[ours] for flax, ours in names.items() if ours in block}
        flax_params[f"FlaxBlock_{i}"] = flax_block
    assert jax.tree.map(np.shape, flax_params) == jax.tree.map(np.shape, shapes["params"])

    @jax.jit
    def apply(flax_params, variables, x):
        actual = flax.apply({"params": flax_params}, x, mutable=["batch_stats"])[0]
        return actual, ours.apply(variables, x, train=True, mutable=["batch_stats"])[0]

    actual, expected = apply(flax_params, variables, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu():
    programs = tpu.make_programs("small")
    assert len(programs) == 5
    for steps in programs.values():
        for step in steps.values():
            jax.eval_shape(*step)
    name = "training step of 2 layers"  # tests/ops/offload plans other forms
    (row,) = tpu.plan_programs({name: {tpu.PLAIN: programs[name][tpu.PLAIN]}}).rows
    assert row["of"] == name and row["ratio"] == 1 and row["fits"]
    assert row["peak_bytes"] > row["temp_bytes"] > row["planned_host_bytes"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*forms.PEERS, forms.FUSED])
def test_steps_of_offload_train_alike(name):
    """The peers of the planned step train as it does; tests/ops/offload compares its options."""
    model, form = TINY.abstract_model, forms.FORMS[name]
    layers = effjax.host_init(model.init_layer, model.layer_keys(jax.random.key(0)))
    others = forms.split_params(TINY.make_model(1))[1]
    tokens = jax.random.randint(jax.random.key(1), TINY.tokens.shape, 0, TINY.vocab_size)

    def train(form):
        init, step = forms.step_of(TINY, form)
        params = effjax.to_device(layers) if form.layers == "device" else layers
        state, step, losses = init(params, others), effjax.offload_jit(step, donate=False), []
        for _ in range(3):
            state, loss, *_ = step(state, tokens)
            losses.append(float(loss))
        return losses

    losses = train(form)
    np.testing.assert_allclose(losses, train(forms.FORMS[forms.IN_MEMORY]), rtol=1e-5)
    assert losses[0] > losses[2]


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block_in_numpy(p, x, num_heads):
    """Compute the block in float64."""
    n, t, width = x.shape
    d = width // num_heads

    def turn(v):  # pairs as complex numbers
        angles = np.arange(t)[:, None, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
        pairs = (v[..., : d // 2] + 1j * v[..., d // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)

    qkv = norm(x, p["norm1"]["scale"]) @ p["qkv"]["kernel"]
    q, k, v = (part.reshape(n, t, num_heads, d) for part in np.split(qkv, 3, -1))
    scores = np.einsum("nqhd,nkhd->nhqk", turn(q), turn(k)) / np.sqrt(d)
    weights = np.exp(scores) * np.tri(t)
    attended = np.einsum("nhqk,nkhd->nqhd", weights / weights.sum(-1, keepdims=True), v)
    x = x + attended.reshape(n, t, width) @ p["out"]["kernel"]
    h = norm(x, p["norm2"]["scale"]) @ p["up"]["kernel"]
    h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
    return x + h @ p["down"]["kernel"]


@pytest.mark.exhaustive
def test_language_model_matches_numpy():
    model = TransformerLM(
        vocab_size=11, num_layers=2, width=12, num_heads=3, mlp_width=20, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype("f4"), params)
    tokens = rng.integers(0, 11, (2, 5))
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x = wide["embed"]["embedding"][tokens]
    for i in range(2):
        x = block_in_numpy(jax.tree.map(lambda p, i=i: p[i], wide["blocks"]), x, 3)
    logits = norm(x, wide["norm"]["scale"]) @ wide["head"]["kernel"]
    got = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(tokens)))(params)
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "sparse"])
def test_errors_of_8_bit_products(kind):
    wide, narrow = fp8.measure_errors(kind)
    for name, most in {"y": 0.04, "dx": 0.08, "dkernel": 0.08}.items():
        assert 0 < wide[name] < 0.004 < most / 2 < narrow[name] < most
