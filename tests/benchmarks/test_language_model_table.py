"""The planned table of language models: sizes, FLOPs, the choice of rows, and what is published."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import language_model_table as table
from benchmarks.language_model import count_parameters
from effjax import offload_jit, to_device
from effjax.memory import find_rates
from effjax.models import DecoderConfig, decoder_functions, decoder_shapes
from tests.programs import needs_gpu_compiler

PLANNED = pathlib.Path(__file__).parents[2] / "docs" / "measured" / "planned"
RECORDS = [json.loads(path.read_text()) for path in PLANNED.glob("language_model_table_*.json")]
ROWS = [(record, row) for record in RECORDS for row in record["rows"]]
TINY = DecoderConfig("qwen3", 96, 16, 24, 3, 4, 2, 8, dtype="bfloat16")


def test_parameters():
    """The counts are half the `total_size` of each checkpoint's model.safetensors.index.json."""
    total_size = {
        "Qwen3-8B": 16381470720, "Qwen3-14B": 29536614400, "Qwen3-32B": 65524246528,
        "Llama-3.3-70B": 141107412992,
    }  # fmt: skip
    sizes = {name: 2 * count_parameters(config) for name, config in table.MODELS.items()}
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
    assert table.model_flops(TINY, length) == 3 * (products + 3 * scores_and_values)


def test_forms():
    """A form in device memory is planned only where parameters and moments fit there."""
    small, large = table.MODELS["Qwen3-8B"], table.MODELS["Llama-3.3-70B"]
    host, device = table.Form("host", None), table.Form("device", None)
    assert table.list_forms(small, 4096, "8-bit") == [host, device]
    assert table.list_forms(small, 4096, "float32") == [host]
    assert table.list_forms(large, 4096, "8-bit") == [host]
    assert table.list_forms(small, 131072, "8-bit") == [table.Form("host", 4096)]


def test_choice():
    def row(memory, seconds, fits):
        cell = {"gpu": "H100", "tokens": 1, "moments": "8-bit", "memory": memory}
        return cell | {"step_seconds": seconds, "fits_device": fits, "fits_host": True}

    for rows, chosen in (
        ([row("host", 2, True), row("device", 1, True)], 1),
        ([row("host", 2, True), row("device", 1, False)], 0),
        ([row("host", 2, False), row("device", 1, False)], 0),
    ):
        table.mark_chosen(rows)
        assert [r["chosen"] for r in rows] == [i == chosen for i in range(2)]


def test_arguments_of_the_step():
    """All arrays of the layers and their moments are in the memory of the form."""
    for memory, kind in (("host", "pinned_host"), ("device", "device")):
        form = table.Form(memory, None)
        _, state, batch = table.abstract_step(TINY, 8, "float32", form)
        arrays = [*jax.tree.leaves(state.layers), *jax.tree.leaves(state.others)]
        assert {a.sharding.memory_kind for a in arrays} == {kind}
        assert {a.sharding.memory_kind for a in jax.tree.leaves(batch)} == {"device"}
        moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim > 1]
        assert sum(a.size for a in moments) == 2 * sum(a.size for a in state.layers.values())
        assert {(a.sharding.memory_kind, a.dtype.name) for a in moments} == {(kind, "float32")}


@pytest.mark.parametrize(("record", "row"), ROWS, ids=[row["name"] for _, row in ROWS])
def test_published_rows(record, row):
    """Host bytes are those of parameters, moments and inputs; times and shares agree."""
    config = table.MODELS[record["model"]]
    assert DecoderConfig.from_json(record["config"]) == config
    assert row["parameters"] == count_parameters(config)
    on_host = 0
    if row["memory"] == "host":
        on_host = row["parameters"] * table.PARAMETER_BYTES[row["moments"]]
        on_host += config.num_hidden_layers * row["tokens"] * config.hidden_size * 2
    assert row["planned_host_bytes"] == pytest.approx(on_host, rel=0.02)
    assert row["fits_device"] == (row["planned_device_bytes"] <= row["device_limit_bytes"])
    assert row["fits_host"] == (row["planned_host_bytes"] <= row["host_limit_bytes"])
    assert not row["unknown_kernels"]

    flops = table.model_flops(config, row["tokens"])
    (machine,) = (m for m in table.MACHINES if m.name == row["gpu"])
    peak = find_rates(machine.target).flops_of("bf16")
    assert row["peak_share"] == pytest.approx(flops / row["step_seconds"] / peak)
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
    # The forward pass of a layer is computed twice, without its last product the second time. The
    # loss computes its product twice. Attention has two products forward and five backward.
    layers, _ = decoder_shapes(config)
    down = layers["mlp.down_proj.weight"].size
    attention = flops - 6 * row["tokens"] * (
        sum(a.size for a in layers.values() if a.ndim == 3) + config.vocab_size * config.hidden_size
    )
    executed = (flops - attention) * 8 / 6 - 2 * row["tokens"] * down + attention * 9 / 6
    assert row["products_flops"] == pytest.approx(executed, rel=0.02)


def test_published_cells():
    """Each model has one chosen row for each GPU, length and dtype of moments."""
    assert {record["model"] for record in RECORDS} == set(table.MODELS)
    for record in RECORDS:
        chosen = [
            (row["gpu"], row["tokens"], row["moments"]) for row in record["rows"] if row["chosen"]
        ]
        planned = table.PLANNED[record["model"]].items()
        cells = [(length, moments) for moments, lengths in planned for length in lengths]
        assert sorted(chosen) == sorted((m.name, *cell) for m in table.MACHINES for cell in cells)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_plan(tmp_path, monkeypatch):
    """Both GPUs have rows from one program. Here it is a small one; test_plans plans a step."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((2**24,), jnp.float32, sharding=host)
    program = offload_jit(lambda x: jnp.sin(to_device(x)).sum(), donate=False), x
    monkeypatch.setattr(table, "abstract_step", lambda *_: program)
    # These layers do not fit in device memory, so one form is planned.
    config = DecoderConfig("qwen3", 512, 2048, 8192, 250, 2, 1, 64, dtype="bfloat16")
    h100, gh200 = table.plan_model(
        "tiny", config, {"float32": (64,)}, table.MACHINES[1:], tmp_path
    ).rows
    assert len(list(tmp_path.iterdir())) == 1
    assert h100["planned_device_bytes"] == gh200["planned_device_bytes"] >= 4 * x.size
    assert h100["planned_host_bytes"] == gh200["planned_host_bytes"] == 4 * x.size
    assert h100["parameters"] == gh200["parameters"] == count_parameters(config)
    assert gh200["step_seconds"] < h100["step_seconds"]
