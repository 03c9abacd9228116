"""Published plans of fine-tuning: sizes and FLOPs of the models, and what follows from them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import finetune
from benchmarks.pages import read
from effjax.memory import find_rates
from effjax.models import DecoderConfig, decoder_functions, decoder_shapes

ROWS = read("planned/finetune.json")["rows"]
TINY = DecoderConfig("qwen3", 96, 16, 24, 3, 4, 2, 8, dtype="bfloat16")
# Bytes of a parameter in bfloat16 and of its moments; 8-bit ones have float32 scales of 256 values.
PARAMETER_BYTES = {"adamw": 2 + 8, "adamw8bit": 2 + 2 + 8 / 256}


def test_parameters():
    """The counts are half the `total_size` of each checkpoint's model.safetensors.index.json."""
    total_size = {
        "Qwen3-8B": 16381470720, "Qwen3-14B": 29536614400, "Qwen3-32B": 65524246528,
        "Llama-3.3-70B": 141107412992, "Qwen3-30B-A3B": 61064245248,
    }  # fmt: skip
    sizes = {
        name: 2 * finetune.count_parameters(config) for name, config in finetune.MODELS.items()
    }
    assert sizes == total_size


def equations(jaxpr):
    """Yield the equations of a program and of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if hasattr(value, "eqns"):
                yield from equations(value)


def test_model_flops():
    """The FLOPs are three times those of the matrix products in the traced forward pass."""
    length = 16
    embed, layer, _ = decoder_functions(TINY, attention="xla")
    layers, others = decoder_shapes(TINY)
    one = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in layers.items()}
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    x = jax.eval_shape(embed, others, batch)
    weights = sum(
        eqn.invars[1].aval.size
        for eqn in equations(jax.make_jaxpr(layer)(one, x))
        if eqn.primitive.name == "dot_general" and len(eqn.invars[1].aval.shape) == 2
    )
    products = 2 * length * (3 * weights + 96 * 16)
    scores_and_values = 2 * 2 * 4 * 8 * sum(range(1, length + 1))
    assert finetune.model_flops(TINY, length) == 3 * (products + 3 * scores_and_values)


def test_model_flops_of_experts():
    """They are those of an MLP as wide as the experts of a token, and of the router."""
    options = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    experts = dataclasses.replace(TINY, model_type="qwen3_moe", router_aux_loss_coef=0.0, **options)
    router = 6 * 3 * 4 * 16 * 10
    assert finetune.model_flops(experts, 10) == finetune.model_flops(TINY, 10) + router


def test_published_rows():
    """Host bytes are those of parameters, moments and inputs; times and shares agree."""
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        config = finetune.MODELS[row["model"]]
        tokens, on_host = row["batch_size"] * row["length"], 0
        if row["form"] == finetune.OFFLOADED:
            on_host = finetune.count_parameters(config) * PARAMETER_BYTES[row["optimizer"]]
            on_host += config.num_hidden_layers * tokens * config.hidden_size * 2
        assert row["planned_host_bytes"] == pytest.approx(on_host, rel=0.02)
        assert row["fits"] == (row["planned_device_bytes"] <= row["device_limit_bytes"])
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_seconds"])
        peak = find_rates(finetune.GPUS[row["gpu"]]).flops_of("bf16")
        flops = row["batch_size"] * finetune.model_flops(config, row["length"])
        assert row["peak_share"] == pytest.approx(flops / row["step_seconds"] / peak)


def test_published_cells():
    """Each planned step has rows, in order."""
    cells = ((row["model"], row["optimizer"], (row["length"], row["batch_size"])) for row in ROWS)
    assert [*dict.fromkeys(cells)] == [
        (name, optimizer, step)
        for name, planned in finetune.PLANNED.items()
        for optimizer, steps in planned.items()
        for step in steps
    ]
