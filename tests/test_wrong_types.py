"""Arguments of wrong types: the error names the argument, for every public function that has it."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from effjax import convert, models

KEY = jax.random.key(0)
TX = optax.sgd(0.1)
CONFIG = models.DecoderConfig("qwen3", 8, 8, 8, 1, 1, 1, 8)
SETTINGS = CONFIG.to_json()
LAYERS, OTHERS = models.init_decoder(CONFIG, KEY)
ADAPTER = {"q.lora_A.weight": jnp.ones((1, 2, 8)), "q.lora_B.weight": jnp.ones((1, 8, 2))}
PARAMS = {"w": np.ones((2, 3), np.float32)}
BATCH = jnp.ones((2, 3))
NO_TREES = [0, "text", [1], (object(), 2), {"a": object()}, object(), len]
WRONG = [*NO_TREES, None, np.ones(2)]  # some functions take None or an array for a tree


def train_step(tx: Any = TX) -> Any:
    return effjax.offload_train_step(
        lambda others, batch, key: batch * others["b"], lambda params, x, key: x * params["w"],
        lambda others, x, batch, key: x.mean(), tx, params_in="device",
    )  # fmt: skip


def init(layers: Any = PARAMS, others: Any = OTHERS, tx: Any = TX) -> Any:
    return train_step(tx).init(layers, others)


def update(state: Any = None, tx: Any = TX) -> Any:
    return effjax.stream_update(tx).update(PARAMS, state, PARAMS)


def load(layers: Any = LAYERS, others: Any = OTHERS) -> Any:
    save(layers=LAYERS, others=OTHERS)
    convert.load_checkpoint("checkpoint", layers, others)


def load_adapter(layers: Any) -> Any:
    convert.save_adapter("adapter", ADAPTER, 1.0)
    convert.load_adapter("adapter", layers)


# Calls with valid arguments, of which one is replaced.
with_valid: Any = functools.partial
decoder: Any = dict(config=CONFIG, others=OTHERS)
generate = with_valid(
    models.generate, **decoder, layers=LAYERS, tokens=jnp.ones((1, 2), int), max_new_tokens=1
)
logits = with_valid(models.decoder_logits, **decoder, hidden=jnp.ones((1, 2, 8)))
sequential = with_valid(effjax.offload_sequential, params=[PARAMS], x=BATCH, params_in="device")
optimizer = with_valid(effjax.nnx.OffloadOptimizer, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
state = with_valid(effjax.linen.OffloadTrainState.create, apply_fn=None, params={"w": BATCH})
save = with_valid(
    convert.save_checkpoint, "checkpoint", layers=LAYERS, others=OTHERS, config=SETTINGS
)
CALLS: Mapping[str, tuple[Callable[..., Any], str]] = {
    f"{name}-{argument}": (call, argument)
    for name, call, *arguments in [
        ("decoder_functions", models.decoder_functions, "config"),
        ("decoder_shapes", models.decoder_shapes, "config"),
        ("init_decoder", with_valid(models.init_decoder, key=KEY), "config"),
        ("Decoder", with_valid(models.Decoder, rngs=nnx.Rngs(0)), "config"),
        ("decoder_logits", logits, "config", "others"),
        ("generate", generate, "config", "layers", "others"),
        ("init", init, "layers", "others", "tx"),
        ("step", lambda state: train_step().step(state, BATCH), "state"),
        ("stream_update", update, "state", "tx"),
        ("offload_sequential", sequential, "layers"),
        ("nnx.OffloadModel", effjax.nnx.OffloadModel, "layers"),
        ("linen.OffloadModel", effjax.linen.OffloadModel, "layers"),
        ("OffloadOptimizer", optimizer, "tx"),
        ("OffloadTrainState", state, "tx"),
        ("save_checkpoint", save, "layers", "others", "config"),
        ("load_checkpoint", load, "layers", "others"),
        ("save_adapter", with_valid(convert.save_adapter, "adapter", scale=1.0), "layers"),
        ("load_adapter", load_adapter, "layers"),
    ]
    for argument in arguments
}


@pytest.mark.parametrize(("call", "argument"), CALLS.values(), ids=CALLS.keys())
def test_error_names_the_argument(call, argument, tmp_path, monkeypatch):
    for i, value in enumerate(NO_TREES if argument in ("layers", "others") else WRONG):
        (folder := tmp_path / str(i)).mkdir()
        monkeypatch.chdir(folder)
        with pytest.raises((TypeError, ValueError)) as error:
            call(**{argument: value})
        assert re.search(rf"`{argument}\b", str(error.value)), str(error.value)
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_flags_of_a_configuration_are_bools():
    for value in ("False", 1, None, np.ones(2, bool)):
        with pytest.raises(TypeError, match="`tie_word_embeddings` must be a bool"):
            dataclasses.replace(CONFIG, tie_word_embeddings=value)


def test_configuration_converts_numpy_scalars():
    config = dataclasses.replace(
        CONFIG, tie_word_embeddings=np.bool_(True), hidden_size=np.int64(8),
        rope_theta=np.float32(500),
    )  # fmt: skip
    assert json.loads(json.dumps(config.to_json()))["rope_theta"] == 500
    assert config == dataclasses.replace(CONFIG, tie_word_embeddings=True, rope_theta=500)


def test_rope_scaling_is_a_rope_scaling():
    for value in {"factor": 8.0}, "llama3", 8.0:
        with pytest.raises(TypeError, match="`rope_scaling` must be a Llama3RopeScaling"):
            dataclasses.replace(CONFIG, rope_scaling=value)


def test_missing_parameters_are_named():
    with pytest.raises(ValueError, match="`others` lacks 'model.norm.weight'"):
        logits(others={"lm_head.weight": jnp.ones((8, 8))})
    with pytest.raises(ValueError, match="`layers` lacks 'self_attn.q_proj.weight', one of"):
        generate(layers={"a": jnp.ones((1, 8))})
