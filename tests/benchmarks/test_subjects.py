"""A tiny run of each benchmark: equal results, and the expected order of memory."""

import dataclasses
import functools
import types

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
    cross_entropy,
    deform_attention,
    deform_conv,
    dense_block,
    densenet,
    depth,
    fit,
    import_time,
    language_model,
    offload,
    offload_disk,
    offload_peers,
    optimizers,
    optimizers_memory,
    overlap,
    planner,
    pytorch,
    resnet,
    roi,
    sync_batch_norm,
    tpu,
    tpu_offload,
    tpu_sampling,
)
from benchmarks.offload_forms import (
    FORMS,
    FUSED,
    IN_MEMORY,
    OFFLOADED,
    PEERS,
    REMAT,
    STATE_MOVED,
    Setting,
    make_params,
    step_of,
)
from benchmarks.transformer import TransformerLM
from effjax.memory import MaxBatch, plan
from effjax.models import DecoderConfig, init_decoder
from effjax.native import is_available
from effjax.ops.offload import row_update
from effjax.train.images.forms import training_steps
from tests.programs import needs_gpu_compiler, needs_tpu_compiler

TINY = Setting(
    layers=2,
    width=8,
    heads=2,
    context=4,
    batch_size=2,
    dropout=0.0,
    vocab_size=16,
    mlp_width=12,
)


def by_name(result):
    return {row["name"]: row for row in result.rows}


def test_batch_norm():
    rows = by_name(batch_norm.measure_norms((2, 4, 4, 4), "float32", rounds=1))
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_batch_norm_layers_save_memory_in_a_loop():
    (result,) = batch_norm_layers.run("small")
    rows = by_name(result)
    forms = batch_norm_layers.FORMS
    peak, kept = (
        {(n, f): rows[f"{n}, {f}"][key] for n in batch_norm_layers.NORMS for f in forms}
        for key in ("peak_bytes", "kept")
    )
    flax, ours = batch_norm_layers.NORMS
    assert peak[ours, "in lax.scan"] < peak[flax, "in lax.scan"]
    assert kept[ours, "one after the other"] < kept[flax, "one after the other"]
    assert kept[ours, "in jax.checkpoint"] == kept[flax, "in jax.checkpoint"]


@pytest.mark.exhaustive
def test_sync_batch_norm(monkeypatch):
    monkeypatch.setitem(sync_batch_norm.SHAPES, "small", (16, 2, 2, 4))
    monkeypatch.setattr(sync_batch_norm, "ROUNDS", 1)
    gradients, errors = sync_batch_norm.run("small")  # in a process with eight devices
    assert {row["devices"] for row in gradients.rows} == {1, 2, 4, 8}
    assert all(row["difference"] < 1e-4 for row in gradients.rows)
    flax, _, ours, _ = gradients.rows[-4:]
    assert 1 <= ours["all_reduces"] <= flax["all_reduces"] and ours["kept"] < flax["kept"]
    error = {(row["name"], row["mean"]): row["variance_error"] for row in errors.rows}
    assert error["Flax linen.BatchNorm", 1e4] > 0.1 > 1e-3 > error["effjax.nnx.BatchNorm", 1e4]


@pytest.mark.exhaustive
def test_dense_block():
    result = dense_block.measure_block(1, 2, 6, growth_rate=2, channels=3, rounds=1)
    rows = by_name(result)
    assert rows.keys() >= set(dense_block.BLOCKS)
    assert rows["plain autodiff"]["ratio"] == 1
    assert all(row["difference"] < 1e-4 for row in rows.values())


def test_kept_bytes_grow_slower_than_plain_autodiff(monkeypatch):
    monkeypatch.setattr(pytorch, "missing", lambda name: "Without torch.")
    result = depth.count_kept((2, 4, 8), 2)
    assert result.notes[-1] == "Without torch."
    exponents = {row["name"]: row["exponent"] for row in result.rows if "exponent" in row}
    assert set(exponents) == set(depth.BLOCKS)
    assert exponents['effjax save="features"'] < 1 < exponents["plain autodiff"]
    kept = {(row["name"], row["layers"]): row["kept_bytes"] for row in result.rows}
    assert kept['effjax save="features"', 8] < kept["jax.checkpoint a layer", 8]


@pytest.mark.exhaustive
def test_optimizers():
    setting = optimizers.Setting(width=16, context=8, batch_size=2, steps=3, seeds=2)
    rows = by_name(optimizers.compare_losses(setting))
    assert rows.keys() == optimizers.VARIANTS.keys()
    for row in rows.values():
        first, second = row["losses"]
        assert 4 < first < 6 and 4 < second < 6 and first != second


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_update_of_a_matrix():
    shape = 4096, 512
    rows = by_name(optimizers_memory.plan_matrix(shape))
    wide, narrow = (rows[f"effjax {n} moments"] for n in ("float32", "8-bit"))
    saved = {
        name: (wide[name] - narrow[name]) / np.prod(shape) for name in ("peak_bytes", "temp_bytes")
    }
    # The arrays of the state have 6 bytes per parameter less, but for the scales; the update of
    # 8-bit moments needs 4 more while it runs.
    assert 5 < saved["peak_bytes"] - saved["temp_bytes"] < 6.5
    assert 1.5 < saved["peak_bytes"] < 2.5
    assert all(row["temp_bytes_per_parameter"] < 8 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_optimizer_state_on_disk():
    decoder = offload_disk.Decoder(12, 256, 512, 64)
    streamed, on_disk = by_name(offload_disk.plan_update(decoder)).values()
    moments = 8 * on_disk["parameters"]
    # Headers, counts and padding.
    assert moments < on_disk["disk_bytes"] < 1.1 * moments + 12 * 20 * 4096
    saved = streamed["planned_host_bytes"] - on_disk["planned_host_bytes"]
    assert saved == pytest.approx(8 / 12 * moments, rel=0.01)  # four of twelve layers are left
    assert on_disk["planned_device_bytes"] < 4 * (2 * 2 + 8) * on_disk["parameters"] / 12


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
@needs_gpu_compiler
def test_planned_depths(monkeypatch):
    names = "plain autodiff", 'effjax save="features"'
    monkeypatch.setattr(depth, "BLOCKS", {name: depth.BLOCKS[name] for name in names})
    first, second, growth = depth.plan_depths((1, 2), 2, "l4")
    assert first.name == "memory_block_1_l4" and first.rows[0]["ratio"] == 1
    assert tuple(by_name(second)) == names
    expected = [(name, layers) for name in names for layers in (1, 2)]
    assert [(row["name"], row["layers"]) for row in growth.rows] == expected
    assert all(row["peak_bytes"] > row["temp_bytes"] > 0 for row in growth.rows)


def test_fit(monkeypatch):
    chosen = {1e9: ("none", 2.0), 2e9: ("all", 1.0)}

    def choose_options(make_step, options, *, budget, **_):
        keep, seconds = chosen[budget]
        sizes = dict(peak_device_bytes=int(budget), peak_host_bytes=0, step_seconds=seconds)
        return types.SimpleNamespace(
            options={"keep": keep}, plan=types.SimpleNamespace(**sizes), trials=(1, 2, 3),
            num_compiled=2, is_complete=True,
        )  # fmt: skip

    monkeypatch.setattr(fit, "choose_options", choose_options)
    model = fit.Model("net", "net", {"keep": ["all", "none"]}, lambda keep: None, (2, 1))
    result = fit.fit_budgets(model)
    assert result.name == "fit_net_h200"
    assert [(row["name"], row["ratio"]) for row in result.rows] == [("1 GB", 1), ("2 GB", 0.5)]
    assert result.config["setting_for_all_budgets"] == {"keep": "none"}
    assert result.config["mean_ratio"] == 0.75


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_fit_small_model(tmp_path, monkeypatch):
    monkeypatch.setattr("effjax.memory.budget.default_folder", lambda: tmp_path)
    result = next(fit.run("small"))
    assert result.rows[0]["ratio"] == 1 >= result.rows[-1]["ratio"]
    assert all(row["compiled"] <= 12 for row in result.rows)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_densenet(monkeypatch):
    name = "effjax features"

    def one_step(*args, **options):
        steps = training_steps(*args, **options)
        return lambda batch_size: {name: steps(batch_size)[name]}

    monkeypatch.setattr(densenet, "training_steps", one_step)
    (row,) = densenet.plan_network(10, 2, "l4").rows
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


def test_deform_conv():
    case = deform_conv.Case(2, 4, 5, 6, 2)
    rows = by_name(deform_conv.measure_case(case, backward=True, rounds=1))
    assert rows.pop("matrix products alone")["difference"] is None
    native = {"effjax native"} if is_available("cpu") else set()
    assert rows.keys() >= {"plain XLA", "effjax xla"} | native
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.exhaustive
def test_deform_attention():
    case = deform_attention.Case(5, shapes=((4, 5), (2, 3)), heads=2, channels=3, points=2, batch=2)
    rows = by_name(deform_attention.measure_case(case, backward=True, rounds=1))
    native = {"effjax native"} if is_available("cpu") else set()
    assert rows.keys() == {"packed gather", "effjax xla"} | native
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_deform_attention():
    case = deform_attention.Case(50, shapes=((4, 5), (2, 3)), heads=2)
    rows = by_name(deform_attention.plan_case(case, "l4"))
    samples = 4 * 50 * 2 * 2 * 4 * 32
    assert rows["the samples alone"]["temp_bytes"] == samples
    assert rows["packed gather"]["temp_bytes"] > samples


@pytest.mark.exhaustive
def test_roi():
    case = roi.Case(2, boxes=4, channels=2, height=64, width=96)
    rows = by_name(roi.measure_case(case, backward=True, rounds=1))
    assert "effjax xla" in rows
    assert all(row["difference"] < 1e-4 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_cross_entropy(monkeypatch):
    losses = {name: cross_entropy.LOSSES[name] for name in ("plain", "effjax")}
    monkeypatch.setattr(cross_entropy, "LOSSES", losses)
    config = dict(num_layers=1, width=16, num_heads=2, vocab_size=512, dtype="bfloat16")
    result = cross_entropy.plan_losses(config, 32, [2], "l4")
    assert result.name == "cross_entropy_512_l4" and result.notes[0].startswith("Sequences of 32")
    names = [(row["of"], row["name"]) for row in result.rows]
    assert names == [(part, name) for part in ("head", "model") for name in losses]


@pytest.mark.exhaustive
def test_losses_of_cross_entropy_agree():
    model = TransformerLM(vocab_size=9, num_layers=1, width=8, num_heads=2, rngs=nnx.Rngs(0))
    gradients = []
    for losses in cross_entropy.LOSSES.values():
        fn, params, _ = cross_entropy.gradient_steps(model, losses, 2, 32)["model"]
        gradients.append(jax.jit(fn)(params, jnp.ones((2, 33), int)))
    for actual in gradients[1:]:
        close = functools.partial(np.testing.assert_allclose, atol=1e-6)
        jax.tree.map(close, actual, gradients[0])


@pytest.mark.exhaustive
def test_import_time(monkeypatch):
    monkeypatch.setattr(import_time, "IMPORTS", ("jax", "effjax"))
    alone, added = import_time.measure_imports(rounds=1).rows
    assert (alone["name"], added["name"]) == ("import jax", "import effjax, after jax")
    assert added["modules"] < alone["modules"] / 3 and added["seconds_quartiles"][0] > 0


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_resnet(monkeypatch):
    monkeypatch.setitem(resnet.NETWORKS, "tiny", dict(bottleneck=False, stage_sizes=(1,)))
    networks = resnet.make_networks("tiny", 3, jnp.bfloat16)
    two = {name: networks[name] for name in ("Flax", 'effjax save="features"')}
    monkeypatch.setattr(resnet, "make_networks", lambda *_: two)
    rows = by_name(resnet.plan_networks("tiny", 2, 16, 3, target="l4"))
    assert list(rows) == list(two) and rows["Flax"]["ratio"] == 1


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
    flax_params = {
        "Conv_0": params["stem_conv"],
        "BatchNorm_0": params["stem_norm"],
        "Dense_0": params["classifier"],
    }
    for i, name in enumerate(k for k in params if k.startswith("stages")):
        block, count = params[name], 3 if bottleneck else 2
        flax_block = {f"Conv_{k}": block[f"conv{k + 1}"] for k in range(count)}
        flax_block |= {f"BatchNorm_{k}": block[f"norm{k + 1}"] for k in range(count)}
        if "shortcut" in block:
            flax_block[f"Conv_{count}"] = block["shortcut"]
            flax_block[f"BatchNorm_{count}"] = block["shortcut_norm"]
        flax_params[f"FlaxBlock_{i}"] = flax_block
    assert jax.tree.map(np.shape, flax_params) == jax.tree.map(np.shape, shapes["params"])
    actual = flax.apply({"params": flax_params}, x, mutable=["batch_stats"])[0]
    expected = ours.apply(variables, x, train=True, mutable=["batch_stats"])[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_plain_roi_align():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 7, 3)).astype(np.float32)
    boxes = rng.uniform(-2, 8, (2, 5, 4)).astype(np.float32)
    want = effjax.roi_align(x, boxes, output_size=3, sampling_ratio=2)
    np.testing.assert_allclose(tpu_sampling.plain_roi_align(x, boxes, 3, 2), want, atol=1e-5)


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
    collectives, memory = tpu.run("small")
    ours = {
        row["passes"]: row["all_reduces"] for row in collectives.rows if row["name"] == "effjax"
    }
    assert ours == {"forward": 1, "forward+backward": 2}
    assert len({row["of"] for row in memory.rows}) == 3
    assert all(row["fits"] and row["peak_bytes"] > row["temp_bytes"] for row in memory.rows)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu_sampling():
    traffic, memory = tpu_sampling.run("small")
    least = {(r["of"], r["passes"]): r["traffic_bytes"] for r in traffic.rows[::4]}
    assert len(least) == 6
    assert all(least[row["of"], row["passes"]] <= row["traffic_bytes"] for row in traffic.rows)
    assert len(memory.rows) == 6 and all(row["temp_bytes"] > 0 for row in memory.rows)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu_offload():
    (result,) = tpu_offload.run("small")
    assert [row["planned_host_bytes"] > 0 for row in result.rows] == [False, False, True]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planner():
    result = planner.measure_plans((1,), (2,), "l4")
    assert [row["layers"] for row in result.rows] == [1, 2]
    assert all(row["plan_seconds"] > row["trace_seconds"] > 0 for row in result.rows)


@pytest.mark.exhaustive
def test_offload_steps():
    names = [IN_MEMORY, "in memory, remat, inputs offloaded", FUSED]
    result = offload.measure_steps(TINY, names, rounds=1)
    assert result.name == "offload_step_2x8_float32" and result.config["ours"] == names[2:]
    rows = by_name(result)
    assert list(rows) == names and rows[IN_MEMORY]["ratio"] == 1
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.exhaustive
def test_offload_gradients_are_bit_identical_to_remat(optimized):
    rows = by_name(offload.measure_gradients(TINY, [IN_MEMORY, REMAT, OFFLOADED], rounds=1))
    assert rows[OFFLOADED]["bit_identical_to_remat"] is True
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_offload():
    result = offload.plan_depths(TINY, [FUSED], [2], "l4")
    (row,) = result.rows
    assert row["layers"] == 2 and row["planned_host_bytes"] > 3 * 4 * 2 * (4 * 8**2 + 2 * 8 * 12)


def train_three_steps(name):
    init, step = step_of(TINY, FORMS[name])
    step = effjax.offload_jit(step)
    state, losses = init(*make_params(TINY, FORMS[name].layers)), []
    for _ in range(3):
        state, loss = step(state, TINY.make_batch(), jax.random.key(0))
        losses.append(float(loss))
    return losses


@functools.cache
def losses_in_memory():
    return train_three_steps(IN_MEMORY)


# Forms of effjax differ in options of `offload_train_step`, which its own tests compare.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*(name for name in PEERS if name != IN_MEMORY), FUSED])
def test_forms_train_alike(name):
    losses = train_three_steps(name)
    np.testing.assert_allclose(losses, losses_in_memory(), rtol=1e-5)
    assert losses[0] > losses[2]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_peers_of_offload(monkeypatch):
    names = [IN_MEMORY, STATE_MOVED, FUSED]
    rows = by_name(offload_peers.plan_peers(TINY, names, "l4"))
    assert list(rows) == names and rows[IN_MEMORY]["ratio"] == 1
    assert rows[STATE_MOVED]["planned_host_bytes"] > 0
    monkeypatch.setattr(offload_peers, "BRACKET_FORMS", (FUSED,))
    bracket = offload_peers.plan_bracket(TINY, (1,), "gh200")
    assert all(row["layers"] == 1 for row in bracket.rows)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_deepest_model_fills_the_host(monkeypatch):
    deeper = dataclasses.replace(TINY, width=64, batch_size=8)
    starts = []

    def search(step, *, start, **options):  # the search itself is tested in tests/memory
        starts.append(start)
        fun, *args = step(start - 1)
        options = {k: options[k] for k in ("target", "host_memory_bytes")}
        return MaxBatch(start - 1, plan(fun, *args, **options), {})

    monkeypatch.setattr(offload_peers, "max_batch_size", search)
    (largest,) = offload_peers.plan_largest({1e-3: deeper}, "gh200").rows
    layer = 3 * 4 * 64 * (4 * 64 + 2 * 12 + 2)
    assert largest["layers"] == starts[0] - 1
    assert largest["planned_host_bytes"] <= largest["host_bytes"] == 10**6
    assert 10**6 - largest["planned_host_bytes"] < 3 * layer


@pytest.mark.exhaustive
def test_decoder_of_the_language_model_trains(monkeypatch):
    """Embedding and head have the same losses in both memories."""
    config = DecoderConfig("llama", 48, 16, 24, 2, 4, 2, 4)
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 2048)
    layers, others = init_decoder(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 48)
    losses = {}
    for where in language_model.MEMORIES:
        tx = optax.adamw(1e-3)
        init, step = language_model.make_step(config, tx, others_in=where)
        w = effjax.to_host(others) if where == "host" else others
        state, step = init(effjax.to_host(layers), w), effjax.offload_jit(step)
        losses[where] = []
        for _ in range(2):
            state, loss = step(state, {"tokens": tokens, "labels": tokens})
            losses[where].append(float(loss))
    np.testing.assert_allclose(losses["host"], losses["device"], rtol=1e-5)
    assert losses["host"][1] < losses["host"][0]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planned_language_model(monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 2**20)
    (name, make), *_ = language_model.OPTIMIZERS.items()
    monkeypatch.setattr(language_model, "OPTIMIZERS", {name: make})
    config = DecoderConfig("qwen3", 65536, 128, 256, 2, 2, 1, 64, dtype="bfloat16")
    rows = by_name(language_model.plan_ends(config, "h100", (1, 256)))
    device, host, small = (
        rows[f"float32 moments, {form}"]
        for form in ("others on the device", "others on the host", "a vocabulary of 256")
    )
    table = 2 * 65536 * 128  # bytes; with its moments five times as many
    assert device["planned_device_bytes"] - host["planned_device_bytes"] > 8 * table
    assert host["planned_host_bytes"] - device["planned_host_bytes"] >= 10 * table
    assert host["to_host_bytes"] - small["to_host_bytes"] >= 9.9 * table
