"""A tiny run of each benchmark: equal results, the columns of its tables, and the order of memory.

The peers of a subject are compared with effjax, or traced. One or two of its programs are planned.
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
    batch_norm_layers,
    clipping,
    cross_entropy,
    deform_attention,
    deform_conv,
    dense_block,
    densenet,
    depth,
    fit,
    gpu_sampling,
    import_time,
    language_model,
    offload,
    offload_peers,
    optimizers,
    optimizers_memory,
    optimizers_offload,
    overlap,
    packed_rows,
    planner,
    published,
    published_memory,
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
from effjax.models import DecoderConfig, decoder_shapes
from effjax.native import is_available
from tests.programs import needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary

TINY = forms.Setting(
    layers=2, width=8, heads=2, context=4, batch_size=2, dropout=0.0, vocab_size=16, mlp_width=12
)
NATIVE = {"effjax native"} if is_available("cpu") else set()


def by_name(result):
    return {row["name"]: row for row in result.rows}


def test_batch_norm():
    rows = by_name(batch_norm.measure_norms((2, 4, 4, 4), "float32", rounds=1))
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_batch_norm_layers_save_memory_in_a_loop():
    form = "in lax.scan"
    result = batch_norm_layers.plan_layers(2, (8, 8, 8, 16), "float32", "l4", [form])
    flax, ours = (by_name(result)[f"{name}, {form}"] for name in batch_norm_layers.NORMS)
    assert ours["peak_bytes"] < flax["peak_bytes"] and ours["kept"] < flax["kept"]


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
@needs_gpu_compiler
def test_update_of_a_matrix():
    shape = 4096, 512
    names = [f"effjax {name} moments" for name in ("float32", "8-bit")]
    wide, narrow = optimizers_memory.plan_matrix(shape, names).rows
    peak, temporary = (
        (wide[name] - narrow[name]) / np.prod(shape) for name in ("peak_bytes", "temp_bytes")
    )
    # The arrays of the state have 6 bytes per parameter less, but for the scales; the update of
    # 8-bit moments needs 4 more while it runs.
    assert 5 < peak - temporary < 6.5 and 1.5 < peak < 2.5
    assert max(row["temp_bytes_per_parameter"] for row in (wide, narrow)) < 8


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_muon_keeps_one_moment_of_a_matrix_on_the_host(tmp_path):
    config = DecoderConfig("qwen3", 4096, 64, 128, 1, 2, 1, 32, dtype="bfloat16")
    case = optimizers_offload.Case("small", config, "Muon", 64, "H100")
    (row,) = optimizers_offload.plan_cases([case], tmp_path).rows
    layers, _ = decoder_shapes(config)
    matrices = sum(a.size for a in layers.values() if a.ndim == 3)
    inputs = 2 * 64 * 64  # of the layer, for 64 tokens
    state = 10 * row["parameters"] - 4 * matrices  # bfloat16, two float32 moments
    assert row["planned_host_bytes"] == pytest.approx(state + inputs, rel=0.01)
    assert row["host_bytes_per_parameter"] == pytest.approx(
        row["planned_host_bytes"] / row["parameters"], abs=1e-3
    )


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_copies_of_an_offloaded_layer_overlap():
    layers = overlap.Layers(512, 2048, 1024)
    (row,) = overlap.measure_overlap(("h100",), [layers], (4, 6)).rows
    weights = 2 * layers.width * layers.hidden
    # Parameters twice, float32 moments, and the input of the layer.
    assert row["to_device_bytes"] == 2 * 2 * weights + 8 * weights + 2 * 1024 * 512
    assert row["to_host_bytes"] == 2 * weights + 8 * weights + 2 * 1024 * 512
    # One direction after the other would be 1.8.
    assert 1 <= row["ratio"] < 1.2


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
@needs_gpu_compiler
def test_planned_depths():
    name = "plain autodiff"
    first, second, growth = depth.plan_depths((1, 2), 2, "l4", [name])
    assert first.name == "memory_block_1_l4" and list(by_name(second)) == [name]
    assert [(row["name"], row["layers"]) for row in growth.rows] == [(name, 1), (name, 2)]
    assert all(row["peak_bytes"] > row["temp_bytes"] > 0 for row in growth.rows)
    assert growth.rows[-1]["exponent"] > 0


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.skipif(not is_available("cuda"), reason="built without CUDA kernels")
def test_modelled_time_of_samplers():
    steps = gpu_sampling.make_steps("small")
    name = next(name for name in steps if "4 groups" in name)
    (result,) = gpu_sampling.plan_samplers({name: steps[name]})
    seconds = {(row["name"], row["passes"]): row["step_seconds"] for row in result.rows}
    assert 0 < seconds["effjax native", "forward"] < seconds["effjax native", "forward+backward"]
    assert not any("unknown_kernels" in row for row in result.rows)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_packed_rows():
    steps, kernels = packed_rows.run("small")
    plain, packed = steps.rows
    assert packed["name"] == "packed rows" and plain["ratio"] == 1 <= packed["ratio"] < 2
    assert all(0 < row["products_seconds"] < row["compute_seconds"] for row in steps.rows)
    seconds = [row["seconds"] for row in kernels.rows]
    assert seconds == sorted(seconds, reverse=True) and sum(seconds) < kernels.config["all_seconds"]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_fit(tmp_path):
    """Recompute where memory is short only; one setting for all budgets recomputes always."""

    def make_step(recompute):
        def layer(x, w):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        body = jax.checkpoint(layer) if recompute else layer
        w = jax.ShapeDtypeStruct((4, 2048, 2048), jnp.float32)
        x = jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
        return jax.grad(lambda w, x: jax.lax.scan(body, x, w)[0].sum()), w, x

    model = fit.Model("net", "net", {"recompute": [False, True]}, make_step, (4, 1))
    result = fit.fit_budgets(model, cache=tmp_path)
    assert result.name == "fit_net_h200"
    small, large = result.rows
    assert (small["name"], large["name"]) == ("1 GB", "4 GB")
    assert small["options"] == {"recompute": True} == result.config["setting_for_all_budgets"]
    assert large["options"] == {"recompute": False}
    assert small["ratio"] == 1 > large["ratio"] > 0
    assert small["planned_device_bytes"] < 1e9 < large["planned_device_bytes"]
    (network,) = fit.MODELS["small"]
    options = {name: values[0] for name, values in network.options.items()}
    jax.eval_shape(*network.make_step(**options))


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_networks(monkeypatch):
    monkeypatch.setitem(resnet.NETWORKS, "tiny", dict(bottleneck=False, stage_sizes=(1,)))
    for name, result in (
        ("effjax features", densenet.plan_network(10, 2, "l4", ["effjax features"])),
        ("Flax", resnet.plan_networks("tiny", 2, 16, 3, target="l4", forms=["Flax"])),
    ):
        (row,) = result.rows
        assert row["name"] == name and row["peak_bytes"] > row["temp_bytes"] > 0


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
@needs_gpu_compiler
def test_planned_deform_attention():
    case = deform_attention.Case(50, shapes=((4, 5), (2, 3)), heads=2)
    rows = by_name(deform_attention.plan_case(case, "l4"))
    samples = 4 * 50 * 2 * 2 * 4 * 32
    assert rows["the samples alone"]["temp_bytes"] == samples
    assert rows["packed gather"]["temp_bytes"] > max(samples, rows["effjax xla"]["temp_bytes"])


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_cross_entropy():
    config = dict(num_layers=1, width=16, num_heads=2, vocab_size=512, dtype="bfloat16")
    result = cross_entropy.plan_losses(config, 32, [2], "l4", ["effjax"])
    assert result.name == "cross_entropy_512_l4" and result.notes[0].startswith("Sequences of 32")
    names = [(row["of"], row["name"]) for row in result.rows]
    assert names == [("head", "effjax"), ("model", "effjax")]


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


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planner():
    (row,) = planner.measure_plans((1,), (), "l4").rows
    assert row["layers"] == 1 and row["plan_seconds"] > row["trace_seconds"] > 0
    jax.eval_shape(*planner.language_model_step(2))


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_published():
    (result,) = published.run("small")
    (row,) = result.rows
    assert row["measured_seconds"] == 16 * 64 / 40e3
    assert row["step_seconds"] > row["product_seconds"] > 0
    assert result.config["factors"] == {"rtx4090": [round(row["ratio"], 2)] * 3}


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_published_memory():
    (result,) = published_memory.run("small")
    assert [row["planned_host_bytes"] > 0 for row in result.rows] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    assert all(row["planned_temporary_bytes"] > 0 for row in result.rows)


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


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_offload():
    (row,) = offload.plan_depths(TINY, [forms.FUSED_IN_MEMORY], [2], "l4").rows
    assert row["layers"] == 2 and row["planned_host_bytes"] == 0 < row["planned_device_bytes"]
    (row,) = offload_peers.plan_peers(TINY, [forms.IN_MEMORY], "l4").rows
    assert row["name"] == forms.IN_MEMORY and row["ratio"] == 1
    (row,) = offload_peers.plan_bracket(TINY, (1,), "gh200", [forms.STATE_MOVED]).rows
    assert row["layers"] == 1 and row["planned_host_bytes"] > 0


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_deepest_model_fills_the_host():
    deeper = dataclasses.replace(TINY, width=64, batch_size=8)
    (largest,) = offload_peers.plan_largest({1e-3: deeper}, "gh200").rows
    layer = 3 * 4 * 64 * (4 * 64 + 2 * 12 + 2)
    assert largest["planned_host_bytes"] <= largest["host_bytes"] == 10**6
    assert 10**6 - largest["planned_host_bytes"] < 3 * layer


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_language_model():
    config = DecoderConfig("qwen3", 4096, 64, 128, 1, 2, 1, 32, dtype="bfloat16")
    name = "float32 moments, others on the host"
    (row,) = language_model.plan_ends(config, "h100", (1, 64), [name]).rows
    state = 10 * row["parameters"]  # bytes of parameters and moments
    assert row["name"] == name and row["parameters"] > 2 * 4096 * 64
    assert row["planned_host_bytes"] > 0.95 * state and row["to_host_bytes"] > 0.9 * state
    assert len(row["largest"]) == language_model.LARGEST
