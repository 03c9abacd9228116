"""A tiny run of each benchmark: equal results, and the columns of its tables.

The peers of a subject are compared with effjax, or traced. `test_plans` plans some programs.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import effjax
from benchmarks import (
    batch_norm,
    clipping,
    cross_entropy,
    deform_attention,
    deform_conv,
    dense_block,
    depth,
    import_time,
    offload,
    optimizers,
    pytorch,
    resnet,
    roi,
    sync_batch_norm,
    tpu,
    tpu_offload,
    tpu_sampling,
)
from benchmarks import offload_forms as forms
from benchmarks.transformer import TransformerLM
from effjax.native import is_available
from tests.benchmarks.rows import TINY, by_name
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

NATIVE = {"effjax native"} if is_available("cpu") else set()


def test_batch_norm():
    rows = by_name(batch_norm.measure_norms((2, 4, 4, 4), "float32", rounds=1))
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@pytest.mark.exhaustive
def test_sync_batch_norm():
    gradients, errors = sync_batch_norm.run("small", devices=[8])  # in a process of its own
    assert {row["devices"] for row in gradients.rows} == {8}
    assert all(row["difference"] < 1e-4 for row in gradients.rows)
    flax, _, ours, _ = gradients.rows
    assert 1 <= ours["all_reduces"] <= flax["all_reduces"] and ours["kept"] < flax["kept"]
    error = {(row["name"], row["mean"]): row["variance_error"] for row in errors.rows}
    assert error["Flax linen.BatchNorm", 1e4] > 0.1 > 1e-3 > error["effjax.nnx.BatchNorm", 1e4]


ATTENTION = deform_attention.Case(
    5, shapes=((4, 5), (2, 3)), heads=2, channels=3, points=2, batch=2
)
BOXES = roi.Case(2, boxes=4, channels=2, height=64, width=96)


@vary(
    "measure, names, tolerance",
    [
        (
            partial(deform_conv.measure_case, deform_conv.Case(2, 4, 5, 6, 2), backward=True),
            {"plain XLA", "effjax xla", "matrix products alone"} | NATIVE,
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
    differences = {name: row["difference"] for name, row in rows.items()}
    assert differences.pop("matrix products alone", None) is None
    assert max(differences.values()) < tolerance


def test_kept_bytes_grow_slower_than_plain_autodiff():
    result = depth.count_kept((2, 6), 2)
    exponents = {row["name"]: row["exponent"] for row in result.rows if "exponent" in row}
    assert exponents.keys() >= set(depth.BLOCKS)
    assert exponents['effjax save="features"'] < 1 < exponents["plain autodiff"]
    kept = {(row["name"], row["layers"]): row["kept_bytes"] for row in result.rows}
    assert kept['effjax save="features"', 6] < kept["jax.checkpoint a layer", 6]


@pytest.mark.exhaustive
def test_optimizers():
    setting = optimizers.Setting(layers=1, width=16, batch_size=2, steps=3, seeds=2)
    names = list(optimizers.VARIANTS)[-1:]
    (row,) = optimizers.compare_losses(setting, names).rows
    first, second = row["losses"]
    assert 4 < first < 6 and 4 < second < 6 and first != second


@pytest.mark.exhaustive
def test_a_delayed_update_is_that_of_the_second_loop():
    def layer(w, x, key):
        return x + jnp.tanh(x @ w["a"]) @ w["b"]

    functions = (
        lambda others, batch, key: others["e"][batch],
        layer,
        lambda others, x, batch, key: (jnp.sum((x - others["t"]) ** 2), x.shape[0]),
    )
    rng, tx = np.random.default_rng(0), optax.adamw(1e-2)
    shapes = {"a": (3, 4, 8), "b": (3, 8, 4)}, {"e": (16, 4), "t": (4,)}
    layers, others = (
        {name: jnp.float32(rng.standard_normal(shape)) for name, shape in tree.items()}
        for tree in shapes
    )
    init, step = effjax.offload_train_step(
        *functions, tx, fuse_update=False, clip_norm=0.5, weighted_loss=True, others_in="host"
    )
    state, same = (init(*effjax.to_host((layers, others))) for _ in range(2))
    grads, exists = effjax.to_host(layers), jnp.bool_(False)
    delayed = clipping.DelayedState(same, grads, jnp.float32(1), exists)
    step = effjax.offload_jit(step)
    delayed_step = effjax.offload_jit(clipping.make_delayed_step(*functions, tx, 0.5))
    # XLA fuses the update in another way, which changes last bits.
    close = partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-7)
    for _ in range(3):
        before = jax.device_get((state.layers, state.layers_state))
        state, loss, *_ = step(state, jnp.arange(8))
        delayed, delayed_loss = delayed_step(delayed, jnp.arange(8))
        close(delayed_loss, loss)
        got = delayed.state.layers, delayed.state.layers_state
        jax.tree.map(close, jax.device_get(got), before)
        jax.tree.map(close, delayed.state.others, state.others)
    assert delayed.norm > 0.5  # the gradients were clipped


@pytest.mark.exhaustive
def test_pytorch_computes_the_same_block():
    pytest.importorskip("torch")
    args = dense_block.make_arrays(2, 2, 5, 3, 4)
    expected = jax.jit(dense_block.train_step(dense_block.plain))(*args)
    for step in pytorch.block_steps(*args).values():
        for a, b in zip(jax.tree.leaves(step()), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    params, x, _ = dense_block.step_shapes(8, 2)
    plain, efficient = (count(params, x) for count in pytorch.KEPT_BYTES.values())
    assert efficient < plain


@pytest.mark.exhaustive
def test_losses_of_cross_entropy_agree():
    model = TransformerLM(vocab_size=9, num_layers=1, width=8, num_heads=2, rngs=nnx.Rngs(0))
    gradients = []
    for losses in cross_entropy.LOSSES.values():
        fn, params, _ = cross_entropy.gradient_steps(model, losses, 2, 32)["model"]
        gradients.append(jax.jit(fn)(params, jnp.ones((2, 33), int)))
    for actual in gradients[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), actual, gradients[0])


@pytest.mark.exhaustive
def test_import_time():
    alone, added = import_time.measure_imports(1, ("jax", "effjax")).rows
    assert (alone["name"], added["name"]) == ("import jax", "import effjax, after jax")
    assert added["modules"] < alone["modules"] / 3 and added["seconds_quartiles"][0] > 0


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


def test_plain_roi_align():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 7, 3)).astype(np.float32)
    boxes = rng.uniform(-2, 8, (2, 5, 4)).astype(np.float32)

    @jax.jit
    def align(x, boxes):
        expected = effjax.roi_align(x, boxes, output_size=3, sampling_ratio=2)
        return tpu_sampling.plain_roi_align(x, boxes, 3, 2), expected

    actual, expected = align(x, boxes)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_bytes_of_sampling_kernels():
    sampler = tpu_sampling.deform_conv_sampler(deform_conv.Case(2, 8, 4, 5))
    positions = 2 * 4 * 5
    x, pixels = 4 * positions * 8, positions * 9 * 4 * (4 * 8)
    arrays = x + 4 * positions * (18 + 9) + 4 * 9 * 8 * 8  # offsets, masks and the kernel
    assert sampler.least_bytes(backward=False) == arrays + x
    assert sampler.least_bytes(backward=True) == 2 * (arrays + x)
    assert sampler.copied_bytes(backward=False) == arrays + pixels
    assert sampler.copied_bytes(backward=True) == 2 * (arrays + x) - x + 4 * pixels
    boxes = tpu_sampling.roi_align_sampler(tpu_sampling.Boxes(1, 4, 5, 8, boxes=3, bins=2))
    pixels = 3 * 2**2 * 2**2 * 4 * (4 * 8)
    assert boxes.copied_bytes(backward=False) == 4 * 3 * (4 + 2**2 * 8) + pixels


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu():
    plain, ours = tpu.plan_collectives((8, 8, 8, 128), all_passes=["forward+backward"]).rows
    assert plain["name"] == "plain JAX" and plain["all_reduces"] >= ours["all_reduces"] == 2
    programs = tpu.make_programs("small")
    assert len(programs) == 3
    for steps in programs.values():
        for step in steps.values():
            jax.eval_shape(*step)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu_sampling():
    samplers = tpu_sampling.make_samplers("small")
    for sampler in samplers.values():
        for step in sampler.steps(backward=True).values():
            jax.eval_shape(*step)
    one = {"roi_align": samplers["roi_align"]}
    traffic, memory = tpu_sampling.plan_samplers(one, all_passes=["forward"])
    least, copied, *programs = traffic.rows
    assert least["traffic_bytes"] < copied["traffic_bytes"]
    assert [row["name"] for row in programs] == [row["name"] for row in memory.rows]
    assert all(row["traffic_bytes"] >= least["traffic_bytes"] for row in programs)
    assert all(row["temp_bytes"] > 0 for row in memory.rows)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu_offload():
    setting = dataclasses.replace(tpu_offload.SETTINGS["small"], vocab_size=128)
    (row,) = tpu_offload.plan_step(setting, ["plain JAX"]).rows  # tests/ops/offload plans others
    assert row["of"] == "training step of 2 layers" and row["ratio"] == 1 and row["fits"]
    assert row["peak_bytes"] > row["temp_bytes"] > row["planned_host_bytes"] == 0


# The test below has `REMAT`. The other forms of effjax differ in options of `offload_train_step`,
# which its own tests compare.
@pytest.mark.exhaustive
def test_steps_of_offload_train_alike():
    names = [name for name in forms.PEERS if name not in (forms.REMAT, forms.STATE_MOVED)]
    names.append(forms.FUSED)
    result = offload.measure_steps(TINY, names, rounds=1)
    assert result.name == "offload_step_2x8_float32" and result.config["ours"] == [forms.FUSED]
    rows = by_name(result)
    assert list(rows) == names and rows[forms.IN_MEMORY]["ratio"] == 1
    assert all(row["difference"] < 1e-5 for row in rows.values())
    assert all(row["losses"][0] > row["losses"][2] for row in rows.values())


@pytest.mark.exhaustive
def test_offload_gradients_are_bit_identical_to_remat(optimized):
    rows = by_name(offload.measure_gradients(TINY, [forms.REMAT, forms.OFFLOADED], rounds=1))
    assert rows[forms.OFFLOADED]["bit_identical_to_remat"] is True
    assert all(row["difference"] < 1e-5 for row in rows.values())


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
