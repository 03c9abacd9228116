"""Plans of one or two small programs of each benchmark: the order of memory and time."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from benchmarks import (
    cross_entropy,
    deform_attention,
    dense_block,
    densenet,
    detector,
    expert_mlp,
    finetune,
    fp8,
    gpu_sampling,
    offload,
    optimizers_memory,
    published,
    resnet,
)
from benchmarks import offload_forms as forms
from effjax.native import is_available
from tests.benchmarks.rows import TINY, by_name
from tests.programs import needs_gpu_compiler

pytestmark = [pytest.mark.exhaustive, needs_gpu_compiler]


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


def test_planned_depth():
    name = "plain autodiff"
    result = dense_block.plan_depth(1, 2, "l4", [name])
    assert result.name == "memory_block_1_l4" and list(by_name(result)) == [name]
    (row,) = result.rows
    assert row["peak_bytes"] > row["temp_bytes"] > 0


@pytest.mark.skipif(not is_available("cuda"), reason="built without CUDA kernels")
def test_modelled_time_of_samplers():
    steps = gpu_sampling.make_steps("small")
    name = next(name for name in steps if "4 groups" in name)
    (result,) = gpu_sampling.plan_samplers({name: steps[name]})
    seconds = {(row["name"], row["passes"]): row["step_seconds"] for row in result.rows}
    assert 0 < seconds["effjax native", "forward"] < seconds["effjax native", "forward+backward"]
    assert not any("unknown_kernels" in row for row in result.rows)


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


def test_planned_experts():
    (row,) = expert_mlp.plan_programs(expert_mlp.SMALL, 64, "l4", ["effjax.expert_mlp"])
    assert row["of"] == "64 tokens, l4" and row["temp_bytes"] > 0
    assert row["product_flops"] == 6 * 64 * 2 * 3 * 256 * 128 < row["flops"]
    assert row["step_seconds"] > row["product_seconds"] > 0


def test_published():
    memory, speed = published.run("small")
    assert [row["planned_host_bytes"] > 0 for row in memory.rows] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert all(row["planned_temporary_bytes"] > 0 for row in memory.rows)
    gpu, few, many = speed.rows
    assert gpu["measured_seconds"] == 16 * 64 / 40e3
    assert gpu["step_seconds"] > gpu["product_seconds"] > 0
    assert 0 < few["ratio"] < many["ratio"] and few["product_seconds"] == many["product_seconds"]
    ratios = [round(row["ratio"], 2) for row in (few, many)]
    factors = speed.config["factors"]
    assert factors["rtx4090"] == [round(gpu["ratio"], 2)] * 3 and factors["v5e"][1:] == ratios


def test_planned_offload():
    (row,) = offload.plan_forms("peers", TINY, [2], [forms.FUSED_IN_MEMORY], "l4").rows
    assert row["layers"] == 2 and row["planned_host_bytes"] == 0 < row["planned_device_bytes"]
    assert row["name"] == forms.FUSED_IN_MEMORY and row["ratio"] == 1
    (row,) = offload.plan_forms("bracket", TINY, (1,), [forms.STATE_MOVED], "gh200").rows
    assert row["layers"] == 1 and row["planned_host_bytes"] > 0


def test_deepest_model_fills_the_host():
    deeper = dataclasses.replace(TINY, width=64, batch_size=8)
    (largest,) = offload.plan_largest({1e-3: deeper}, "gh200").rows
    layer = 3 * 4 * 64 * (4 * 64 + 2 * 12 + 2)
    assert largest["planned_host_bytes"] <= largest["host_bytes"] == 10**6
    assert 10**6 - largest["planned_host_bytes"] < 3 * layer


def test_planned_fine_tuning():
    """All GPUs have rows from one program, in device memory where it fits."""
    rows = list(finetune.plan_model("small", finetune.SMALL, "adamw", finetune.GPUS, 64, 1))
    assert {row["form"] for row in rows} == {finetune.IN_MEMORY}
    assert len({row["planned_device_bytes"] for row in rows}) == 1
    by_gpu = {row["gpu"]: row["step_seconds"] for row in rows}
    assert by_gpu["GH200"] <= by_gpu["H100"] < by_gpu["RTX 4090"]
    row = finetune.plan_adapters("small", finetune.SMALL, "nf4", "RTX 4090", "rtx4090", 64)
    assert row["fits"] and row["options"] == "--lora 16 --quantize nf4 --fuse-update"


def test_planned_8_bit_products():
    """Of a large layer, they are faster; a step of a small model can be planned."""
    layer = partial(fp8.product_step, fp8.TOKENS, True)
    ratios = [row["ratio"] for row in fp8.plan_rows("layer", fp8.TOKENS, layer)]
    assert ratios[::2] == [1, 1] and min(ratios[1::2]) > 1.5
    step = partial(fp8.finetuning_step, finetune.SMALL, fp8.OF_MICROBATCH, 64)
    rows = list(fp8.plan_rows("step", 64 * fp8.OF_MICROBATCH, step))
    assert [(row["gpu"], row["dtype"]) for row in rows] == [
        (gpu, dtype) for gpu in fp8.LLMQ for dtype in fp8.PRODUCTS
    ]
    assert all(row["planned_host_bytes"] > 0 for row in rows)


def test_planned_detector():
    """The forms of effjax need less memory, and all loops have a known length."""
    (result,) = detector.run("small")
    rows = {row["form"]: row for row in result.rows}
    assert rows.keys() == detector.PLANNED.keys()
    plain, *ours = (row["planned_device_bytes"] for row in rows.values())
    assert plain > max(ours)
    for row in rows.values():
        assert row["fits"] and row["unknown_loops"] == 0 < row["images_per_second"]
