"""The planned table of language models: sizes, FLOPs, the choice of rows, and what is published."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import language_model_table as table
from benchmarks.language_model import count_parameters
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
        for eqn in jax.make_jaxpr(layer)(one, x).eqns
        if eqn.primitive.name == "dot_general" and len(eqn.invars[1].aval.shape) == 2
    )
    products = 2 * length * (3 * weights + 96 * 16)
    scores_and_values = 2 * 2 * 4 * 8 * sum(range(1, length + 1))
    assert table.model_flops(TINY, length) == 3 * (products + 3 * scores_and_values)


def test_forms():
    """State is planned in device memory only where it can fit."""
    hopper = [m for m in table.MACHINES if m.compiled_for == "h100"]
    small, large = table.MODELS["Qwen3-8B"], table.MODELS["Llama-3.3-70B"]
    assert [f.memory for f in table.list_forms(small, 4096, "8-bit", hopper)] == ["host", "device"]
    assert [f.memory for f in table.list_forms(large, 4096, "8-bit", hopper)] == ["host"]
    (form,) = table.list_forms(small, 4096, "float32", table.MACHINES[:1])
    assert form == table.Form("host", "host", None)
    assert table.list_forms(small, 131072, "float32", table.MACHINES[:1])[0].mlp_chunk_size == 4096


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
        form = table.Form(memory, memory, None)
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
    inputs = config.num_hidden_layers * row["tokens"] * config.hidden_size * 2
    on_host = inputs if row["activations"] == "host" else 0
    if row["memory"] == "host":
        on_host += row["parameters"] * table.PARAMETER_BYTES[row["moments"]]
    assert row["planned_host_bytes"] == pytest.approx(on_host, rel=0.02)
    assert row["fits_device"] == (row["planned_device_bytes"] <= row["device_limit_bytes"])
    assert row["fits_host"] == (row["planned_host_bytes"] <= row["host_limit_bytes"])
    assert not row["unknown_kernels"]

    flops = table.model_flops(config, row["tokens"])
    (machine,) = (m for m in table.MACHINES if m.name == row["gpu"])
    peak = find_rates(machine.target).flops_of("bf16")
    assert row["peak_share"] == pytest.approx(flops / row["step_seconds"] / peak)
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
    # The forward pass is computed twice: between 4/3 of the FLOPs, and no less than all of them.
    assert 1 < row["products_flops"] / flops < 1.5


def test_published_cells():
    """Each model has one chosen row for each GPU, length and dtype of moments."""
    for record in RECORDS:
        chosen = [
            (row["gpu"], row["tokens"], row["moments"]) for row in record["rows"] if row["chosen"]
        ]
        cells = len(table.MACHINES) * len(table.LENGTHS) * len(table.OPTIMIZERS)
        assert len(chosen) == len(set(chosen)) == cells


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_plan(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(table, "OPTIMIZERS", {"8-bit": table.OPTIMIZERS["8-bit"]})
    config = DecoderConfig("qwen3", 4096, 128, 256, 3, 2, 1, 64, dtype="bfloat16")
    hopper = table.MACHINES[1:]
    rows = table.plan_model("tiny", config, (256,), hopper).rows
    assert len(list(tmp_path.iterdir())) == 2  # one program for both GPUs and each form
    h100, gh200, *in_memory = rows
    assert h100["planned_device_bytes"] == gh200["planned_device_bytes"]
    assert h100["planned_host_bytes"] == pytest.approx(
        count_parameters(config) * table.PARAMETER_BYTES["8-bit"], rel=0.2
    )
    assert gh200["step_seconds"] < h100["step_seconds"]
    assert all(row["planned_host_bytes"] == 0 for row in in_memory)
