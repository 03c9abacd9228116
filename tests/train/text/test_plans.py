"""Planned steps of decoders, and the options that trade time for memory."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import pytest

from effjax.models import DecoderConfig
from effjax.train.errors import DataError, TrainError
from effjax.train.text.config import FinetuneConfig, LMConfig
from effjax.train.text.plans import FORMS, memory_choices, smaller_states, training_step
from effjax.train.text.tiny import SIZES
from tests.tiers import vary
from tests.train.small import lm_task

LM = LMConfig(layers=2, width=16, heads=2, context=12, batch_size=4)
PLACES: dict[str, Any] = dict(policy="recompute", activations="device", params="host")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a configuration whose checkpoint is a config.json only."""
    file = tmp_path_factory.mktemp("base") / "config.json"
    model = DecoderConfig.from_json({"model_type": "qwen3", "vocab_size": 384, **SIZES})
    file.write_text(json.dumps(model.to_json()))
    return FinetuneConfig(checkpoint=str(file), max_length=32, batch_size=4)


@vary("name", [*FORMS][::-1])
def test_a_step_of_each_form(config, name):
    form = dataclasses.replace(config, **FORMS[name])
    step, state, batch, key = training_step(form)
    assert {a.shape for a in batch.values()} == {(4, 32)}
    new_state, (loss,) = step.trace(state, batch, key).out_info
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert loss.shape == ()
    kinds = {a.sharding.memory_kind for a in state.model.layers.values()}
    assert kinds == {"pinned_host" if form.offload in ("params", "all") else "device"}


def test_a_step_is_that_of_the_run():
    fused = dataclasses.replace(LM, **FORMS["offload all, fused"])
    _, shapes, batch, _ = training_step(fused)
    assert {name: a.shape for name, a in batch.items()} == {"tokens": (4, 12), "labels": (4, 12)}
    task = lm_task(1, offload="all", fuse_update=True)
    kinds = [
        jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.memory_kind), tree)
        for tree in (shapes, task.initial_state(), batch, next(task.batches(0)))
    ]
    assert kinds[0] == kinds[1] and kinds[2] == kinds[3]


def test_memory_choices(config):
    choices = memory_choices(config, set())
    places = PLACES | {"mlp_chunk_size": None}
    chosen = choices.change(**places, num_microbatches=2)
    assert chosen.fuse_update and (chosen.offload, chosen.num_microbatches) == ("params", 2)
    _, state, *_ = choices.training_step(chosen)
    assert state.model.layers["mlp.up_proj.weight"].sharding.memory_kind == "pinned_host"
    assert choices.change(**places, num_microbatches=3) is None  # does not divide the batch
    assert choices.change(**PLACES, mlp_chunk_size=1024, num_microbatches=1) is None
    skips = memory_choices(dataclasses.replace(config, on_nan="skip"), set())
    assert not skips.change(**places, num_microbatches=1).fuse_update
    given = memory_choices(config, {"fuse_update"})
    assert not given.change(**places, num_microbatches=1).fuse_update
    chunked = memory_choices(dataclasses.replace(config, mlp_chunk_size=8), {"mlp_chunk_size"})
    assert chunked.options["mlp_chunk_size"] == (8,)
    assert chunked.change(**PLACES, num_microbatches=1, mlp_chunk_size=8).mlp_chunk_size == 8


def test_all_combinations_differ():
    choices = memory_choices(LM, set())
    values = itertools.product(*choices.options.values())
    found = [choices.change(**dict(zip(choices.options, v, strict=True))) for v in values]
    assert len({repr(one) for one in found if one is not None}) == 3 * 2 * 2 * 3


def test_memory_choices_of_several_devices():
    choices = memory_choices(LM, set(), num_devices=2)
    chosen = choices.change(**PLACES, num_microbatches=1)
    assert chosen.fuse_update and chosen.offload == "params"
    _, state, *_ = choices.training_step(chosen)
    assert {a.sharding.mesh.size for a in jax.tree.leaves(state)} == {2}
    assert choices.change(**PLACES, num_microbatches=2) is None


def test_min_bytes():
    size = 2 * 4 * 12 * 16 * 2  # inputs of the layers
    config = dataclasses.replace(LM, dtype="bfloat16")
    one, four = (memory_choices(config, set(), n).min_bytes for n in (1, 4))
    assert one is not None and four is not None
    assert one(activations="device") == (size, 0)
    assert four(activations="device") == (size // 4, 0)
    assert one(activations="host") == (0, size)


def test_a_quantized_step(config):
    """It has codes in place of weights, in host memory as these."""
    config = dataclasses.replace(config, offload="all", lora=2, quantize="nf4")
    step, state, batch, key = training_step(config)
    new_state, _ = step.trace(state, batch, key).out_info
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    layers = state.model.layers
    assert {a.sharding.memory_kind for a in layers.values()} == {"pinned_host"}
    codes = [a for name, a in layers.items() if name.endswith("_proj.weight.codes")]
    assert len(codes) == 7 and {str(a.dtype) for a in codes} == {"uint8"}
    assert not [name for name in layers if name.endswith("_proj.weight")]


def test_smaller_states(config):
    changes = [
        (changed.optimizer, changed.lora, changed.quantize)
        for changed in smaller_states(config.resolve())
    ]
    assert changes == [("adamw8bit", None, None), ("adamw", 16, None), ("adamw", 16, "nf4")]
    quantized = dataclasses.replace(config, lora=4, quantize="int8", optimizer="adamw8bit")
    assert not [*smaller_states(quantized.resolve())]


def test_needs_a_configuration(config, tmp_path):
    def plan(path):
        return training_step(dataclasses.replace(config, checkpoint=str(path)))

    with pytest.raises(DataError, match="nowhere: not found"):
        plan("nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DataError, match=f"{tmp_path}: `model_type`"):
        plan(tmp_path)
    model = {"model_type": "llama", **SIZES, "vocab_size": 8, "attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(TrainError, match=r"`attention_dropout` \(=0.1\) .* Set it to 0"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text('{"effjax": "0.1.0", "command": "finetune"}')
    for remedy in ("Give the folder of a checkpoint", f"Give {tmp_path}/model"):
        with pytest.raises(DataError, match=f"a run, not a checkpoint. {remedy}"):
            plan(tmp_path)
        (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=f"^{tmp_path}/config.json: not a config.json"):
        plan(tmp_path)
