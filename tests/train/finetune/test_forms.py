import dataclasses
import json
from typing import Any

import jax
import pytest

from effjax.models import DecoderConfig
from effjax.train.decoder_forms import FORMS
from effjax.train.errors import DataError
from effjax.train.finetune.config import FinetuneConfig
from effjax.train.finetune.forms import (
    finetune_steps,
    read_model,
    training_step,
    with_memory_options,
)
from effjax.train.finetune.tiny import SIZES
from tests.tiers import vary

PLACES: dict[str, Any] = dict(
    policy="recompute", activations="device", params="host", mlp_chunk_size=None
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a configuration whose checkpoint is a config.json only."""
    file = tmp_path_factory.mktemp("base") / "config.json"
    model = DecoderConfig.from_json({"model_type": "qwen3", "vocab_size": 384, **SIZES})
    file.write_text(json.dumps(model.to_json()))
    return FinetuneConfig(checkpoint=str(file), data="", max_length=32, batch_size=4)


@pytest.fixture(scope="module")
def steps(config):
    return finetune_steps(config)(4)


@vary("name", [*FORMS][::-1])
def test_a_step_of_each_form(steps, name):
    step, state, batch, key = steps[name]
    assert {a.shape for a in batch.values()} == {(4, 32)}
    new_state, (loss,) = step.trace(state, batch, key).out_info
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert loss.shape == ()
    kinds = {a.sharding.memory_kind for a in state.model.layers.values()}
    on_host = FORMS[name].get("offload") in ("params", "all")
    assert kinds == {"pinned_host" if on_host else "device"}


def test_memory_options(config):
    chosen = with_memory_options(config, **PLACES, num_microbatches=2)
    assert chosen is not None and chosen.fuse_update
    assert (chosen.offload, chosen.num_microbatches) == ("params", 2)
    _, state, *_ = training_step(chosen, read_model(config))
    assert state.model.layers["mlp.up_proj.weight"].sharding.memory_kind == "pinned_host"
    assert with_memory_options(config, 2, **PLACES, num_microbatches=2) is None
    assert with_memory_options(config, **PLACES, num_microbatches=3) is None
    long: dict[str, Any] = PLACES | {"mlp_chunk_size": 1024}
    assert with_memory_options(config, **long, num_microbatches=1) is None
    skips = dataclasses.replace(config, on_nan="skip")
    chosen = with_memory_options(skips, **PLACES, num_microbatches=1)
    assert chosen is not None and not chosen.fuse_update


def test_needs_a_configuration(config, tmp_path):
    with pytest.raises(DataError, match="nowhere: not found"):
        finetune_steps(dataclasses.replace(config, checkpoint="nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DataError, match=f"{tmp_path}: `model_type`"):
        finetune_steps(dataclasses.replace(config, checkpoint=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"effjax": "0.1.0", "command": "finetune"}')
    for remedy in ("Give the folder of a checkpoint", f"Give {tmp_path}/model"):
        with pytest.raises(DataError, match=f"a run, not a checkpoint. {remedy}"):
            finetune_steps(dataclasses.replace(config, checkpoint=str(tmp_path)))
        (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=f"^{tmp_path}/config.json: not a config.json"):
        finetune_steps(dataclasses.replace(config, checkpoint=str(tmp_path)))
