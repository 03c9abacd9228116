"""Plans of one or two small programs of each benchmark: the order of memory and time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    batch_norm_layers,
    cross_entropy,
    deform_attention,
    densenet,
    depth,
    fit,
    gpu_sampling,
    language_model,
    offload,
    offload_peers,
    optimizers_memory,
    optimizers_offload,
    overlap,
    packed_rows,
    planner,
    published,
    published_memory,
    resnet,
)
from benchmarks import offload_forms as forms
from effjax.models import DecoderConfig, decoder_shapes
from effjax.native import is_available
from tests.benchmarks.rows import TINY, by_name
from tests.programs import needs_gpu_compiler

pytestmark = [pytest.mark.exhaustive, needs_gpu_compiler]


def test_batch_norm_layers_save_memory_in_a_loop():
    form = "in lax.scan"
    result = batch_norm_layers.plan_layers(2, (8, 8, 8, 16), "float32", "l4", [form])
    flax, ours = (by_name(result)[f"{name}, {form}"] for name in batch_norm_layers.NORMS)
    assert ours["peak_bytes"] < flax["peak_bytes"] and ours["kept"] < flax["kept"]


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


def test_copies_of_an_offloaded_layer_overlap():
    layers = overlap.Layers(512, 2048, 1024)
    (row,) = overlap.measure_overlap(("h100",), [layers], (4, 6)).rows
    weights = 2 * layers.width * layers.hidden
    # Parameters twice, float32 moments, and the input of the layer.
    assert row["to_device_bytes"] == 2 * 2 * weights + 8 * weights + 2 * 1024 * 512
    assert row["to_host_bytes"] == 2 * weights + 8 * weights + 2 * 1024 * 512
    # One direction after the other would be 1.8.
    assert 1 <= row["ratio"] < 1.2


def test_planned_depths():
    name = "plain autodiff"
    first, second, growth = depth.plan_depths((1, 2), 2, "l4", [name])
    assert first.name == "memory_block_1_l4" and list(by_name(second)) == [name]
    assert [(row["name"], row["layers"]) for row in growth.rows] == [(name, 1), (name, 2)]
    assert all(row["peak_bytes"] > row["temp_bytes"] > 0 for row in growth.rows)
    assert growth.rows[-1]["exponent"] > 0


@pytest.mark.skipif(not is_available("cuda"), reason="built without CUDA kernels")
def test_modelled_time_of_samplers():
    steps = gpu_sampling.make_steps("small")
    name = next(name for name in steps if "4 groups" in name)
    (result,) = gpu_sampling.plan_samplers({name: steps[name]})
    seconds = {(row["name"], row["passes"]): row["step_seconds"] for row in result.rows}
    assert 0 < seconds["effjax native", "forward"] < seconds["effjax native", "forward+backward"]
    assert not any("unknown_kernels" in row for row in result.rows)


def test_packed_rows():
    steps, kernels = packed_rows.run("small")
    plain, packed = steps.rows
    assert packed["name"] == "packed rows" and plain["ratio"] == 1 <= packed["ratio"] < 2
    assert all(0 < row["products_seconds"] < row["compute_seconds"] for row in steps.rows)
    seconds = [row["seconds"] for row in kernels.rows]
    assert seconds == sorted(seconds, reverse=True) and sum(seconds) < kernels.config["all_seconds"]


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


def test_planned_networks(monkeypatch):
    monkeypatch.setitem(resnet.NETWORKS, "tiny", dict(bottleneck=False, stage_sizes=(1,)))
    for name, result in (
        ("effjax features", densenet.plan_network(10, 2, "l4", ["effjax features"])),
        ("Flax", resnet.plan_networks("tiny", 2, 16, 3, target="l4", forms=["Flax"])),
    ):
        (row,) = result.rows
        assert row["name"] == name and row["peak_bytes"] > row["temp_bytes"] > 0


def test_planned_deform_attention():
    case = deform_attention.Case(50, shapes=((4, 5), (2, 3)), heads=2)
    rows = by_name(deform_attention.plan_case(case, "l4"))
    samples = 4 * 50 * 2 * 2 * 4 * 32
    assert rows["the samples alone"]["temp_bytes"] == samples
    assert rows["packed gather"]["temp_bytes"] > max(samples, rows["effjax xla"]["temp_bytes"])


def test_planned_cross_entropy():
    config = dict(num_layers=1, width=16, num_heads=2, vocab_size=512, dtype="bfloat16")
    result = cross_entropy.plan_losses(config, 32, [2], "l4", ["effjax"])
    assert result.name == "cross_entropy_512_l4" and result.notes[0].startswith("Sequences of 32")
    names = [(row["of"], row["name"]) for row in result.rows]
    assert names == [("head", "effjax"), ("model", "effjax")]


def test_planner():
    (row,) = planner.measure_plans((1,), (), "l4").rows
    assert row["layers"] == 1 and row["plan_seconds"] > row["trace_seconds"] > 0
    jax.eval_shape(*planner.language_model_step(2))


def test_published():
    (result,) = published.run("small")
    (row,) = result.rows
    assert row["measured_seconds"] == 16 * 64 / 40e3
    assert row["step_seconds"] > row["product_seconds"] > 0
    assert result.config["factors"] == {"rtx4090": [round(row["ratio"], 2)] * 3}


def test_published_memory():
    (result,) = published_memory.run("small")
    assert [row["planned_host_bytes"] > 0 for row in result.rows] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    assert all(row["planned_temporary_bytes"] > 0 for row in result.rows)


def test_planned_offload():
    (row,) = offload.plan_depths(TINY, [forms.FUSED_IN_MEMORY], [2], "l4").rows
    assert row["layers"] == 2 and row["planned_host_bytes"] == 0 < row["planned_device_bytes"]
    (row,) = offload_peers.plan_peers(TINY, [forms.IN_MEMORY], "l4").rows
    assert row["name"] == forms.IN_MEMORY and row["ratio"] == 1
    (row,) = offload_peers.plan_bracket(TINY, (1,), "gh200", [forms.STATE_MOVED]).rows
    assert row["layers"] == 1 and row["planned_host_bytes"] > 0


def test_deepest_model_fills_the_host():
    deeper = dataclasses.replace(TINY, width=64, batch_size=8)
    (largest,) = offload_peers.plan_largest({1e-3: deeper}, "gh200").rows
    layer = 3 * 4 * 64 * (4 * 64 + 2 * 12 + 2)
    assert largest["planned_host_bytes"] <= largest["host_bytes"] == 10**6
    assert 10**6 - largest["planned_host_bytes"] < 3 * layer


def test_planned_language_model():
    config = DecoderConfig("qwen3", 4096, 64, 128, 1, 2, 1, 32, dtype="bfloat16")
    name = "float32 moments, others on the host"
    (row,) = language_model.plan_ends(config, "h100", (1, 64), [name]).rows
    state = 10 * row["parameters"]  # bytes of parameters and moments
    assert row["name"] == name and row["parameters"] > 2 * 4096 * 64
    assert row["planned_host_bytes"] > 0.95 * state and row["to_host_bytes"] > 0.9 * state
    assert len(row["largest"]) == language_model.LARGEST
