"""Planned steps of decoders, and the options that trade time for memory."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from effjax.train.errors import DataError, TrainError
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, memory_choices, smaller_configs, training_step
from effjax.train.text.tiny import SIZES
from tests.tiers import vary
from tests.train.text.small import finetune_task, tiny_base, write_config

PLACES: dict[str, Any] = dict(policy="recompute", activations_in="device", params_in="host")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a configuration whose checkpoint is a config.json only."""
    file = write_config(tmp_path_factory.mktemp("base"), "qwen3")
    return FinetuneConfig(checkpoint=str(file), max_length=32, batch_size=4)


QUANTIZED = dict(params_in="host", lora=2, quantize="nf4")


@vary("form", [QUANTIZED, *FORMS.values()])
def test_a_step_of_each_form(config, form):
    form = dataclasses.replace(config, **form)
    step, state, batch, key = training_step(form)
    assert {a.shape for a in batch.values()} == {(4, 32)}
    new_state, (loss,) = step.trace(state, batch, key).out_info
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert loss.shape == ()
    layers = state.model.layers
    kind = "pinned_host" if form.params_in == "host" else "device"
    assert {a.sharding.memory_kind for a in layers.values()} == {kind}
    # A quantized step has codes in place of weights.
    codes = [str(a.dtype) for name, a in layers.items() if name.endswith("_proj.weight.codes")]
    weights = [name for name in layers if name.endswith("_proj.weight")]
    assert (codes, len(weights)) == ((["uint8"] * 7, 0) if form.quantize else ([], 7))


def test_a_step_is_that_of_the_run():
    """The arrays of the state and of a batch have the shapes, dtypes and memory of the plan."""
    task = finetune_task(tiny_base(), **FORMS["offload all, fused"])
    _, shapes, batch, _ = training_step(task.config)
    assert batch["tokens"].shape == (4, 16)
    kinds = [
        jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.memory_kind), tree)
        for tree in (shapes, task.initial_state(), batch, next(task.batches(0)))
    ]
    assert kinds[0] == kinds[1] and kinds[2] == kinds[3]


def test_memory_choices(config):
    def change(given=(), chunk=None, count=1, **options):
        choices = memory_choices(dataclasses.replace(config, **options), set(given))
        return choices.change(**PLACES, mlp_chunk_size=chunk, num_microbatches=count)

    chosen = change(count=2)
    assert chosen.fuse_update and chosen.num_microbatches == 2
    assert (chosen.params_in, chosen.activations_in) == ("host", "device")
    _, state, *_ = memory_choices(config, set()).training_step(chosen)
    assert state.model.layers["mlp.up_proj.weight"].sharding.memory_kind == "pinned_host"
    assert change(count=3) is None  # does not divide the batch
    assert change(chunk=1024) is None
    assert not change(on_nan="skip").fuse_update
    assert not change(given=["fuse_update"]).fuse_update
    assert change(given=["mlp_chunk_size"], chunk=8, mlp_chunk_size=8).mlp_chunk_size == 8


def test_experts_have_no_chunks(config, tmp_path):
    write_config(tmp_path, "olmoe", num_experts=4, num_experts_per_tok=2)
    config = dataclasses.replace(config, checkpoint=str(tmp_path))
    assert memory_choices(config, set()).options["mlp_chunk_size"] == (None,)


def test_memory_choices_of_several_devices(config):
    choices = memory_choices(config, set(), num_devices=2)
    chosen = choices.change(**PLACES, num_microbatches=1, mlp_chunk_size=None)
    assert chosen.fuse_update and chosen.activations_in == "device"
    _, state, *_ = choices.training_step(chosen)
    assert {a.sharding.mesh.size for a in jax.tree.leaves(state)} == {2}
    assert choices.change(**PLACES, num_microbatches=2, mlp_chunk_size=None) is None


def test_min_bytes(config):
    size = 2 * 4 * 32 * 32 * 2  # inputs of the layers, in bfloat16
    one, four = (memory_choices(config, set(), n).min_bytes for n in (1, 4))
    assert one is not None and four is not None
    assert one(activations_in="device") == (size, 0)
    assert four(activations_in="device") == (size // 4, 0)
    assert one(activations_in="host") == (0, size)


def test_smaller_configs(config):
    def change(of_state, **options):
        changed = smaller_configs(dataclasses.replace(config, **options).resolve(), of_state)
        return [{k: v for k, v in vars(c).items() if v != vars(config)[k]} for c in changed]

    rate = {"learning_rate": 1e-5}  # that of the whole model; the command finds its own
    state = [{"optimizer": "adamw8bit"}, {"lora": 16}, {"lora": 16, "quantize": "nf4"}]
    assert change(True) == [rate | one for one in state]
    batches = [{"batch_size": 2}, {"batch_size": 1}, {"batch_size": 1, "max_length": 512}]
    fewer = change(False, max_length=1024)
    assert fewer == [rate | {"max_length": 1024} | one for one in [*batches, *state]]
    assert change(True, optimizer="muon")[1]["lora"] == 16  # Muon trains no adapters
    assert "matmul" not in change(True, matmul="fp8")[-1]  # a quantized base has none
    assert not change(True, lora=4, quantize="int8", optimizer="adamw8bit")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"model_type": "gpt2"}, DataError, "{path}: `model_type`"),
        ({"model_type": "llama", **SIZES, "vocab_size": 8, "attention_dropout": 0.1}, TrainError,
         r"`attention_dropout` \(=0.1\) .* Set it to 0"),
        ({"effjax": "0.1.0", "command": "finetune"}, DataError, "a run, not .* Give {path}/model"),
        ({"effjax": "0.1.0", "command": "finetune"}, DataError, "Give the folder of a checkpoint"),
        (None, DataError, "{path}/config.json: not a config.json"),
    ],
)  # fmt: skip
def test_needs_a_configuration(config, tmp_path, content, error, message):
    (tmp_path / "config.json").write_text("{" if content is None else json.dumps(content))
    if "/model" in message:
        (tmp_path / "model").mkdir()
    with pytest.raises(error, match=message.format(path=tmp_path)):
        training_step(dataclasses.replace(config, checkpoint=str(tmp_path)))
