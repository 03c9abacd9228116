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
ADAPTER = {
    "q.lora_A.weight": jnp.ones((1, 2, 8)),
    "q.lora_B.weight": jnp.ones((1, 8, 2)),
}
PARAMS = {"w": np.ones((2, 3), np.float32)}
BATCH = jnp.ones((2, 3))
NO_TREES = [0, "text", [1], (object(), 2), {"a": object()}, object(), len]
WRONG = [*NO_TREES, None, np.ones(2)]  # some functions take None or an array for a tree


def layer(params: Any, x: Any, key: Any) -> Any:
    return x * params["w"]


def embed(others: Any, batch: Any, key: Any) -> Any:
    return batch * others["b"]


def head(others: Any, x: Any, batch: Any, key: Any) -> Any:
    return x.mean()


def init(layers: Any = PARAMS, others: Any = OTHERS, tx: Any = TX) -> Any:
    return effjax.offload_train_step(embed, layer, head, tx, params_in="device").init(
        layers, others
    )


def step(state: Any) -> Any:
    return effjax.offload_train_step(embed, layer, head, TX).step(state, BATCH)


def update(state: Any = None, tx: Any = TX) -> Any:
    return effjax.stream_update(tx).update(PARAMS, state, PARAMS)


def sequential(layers: Any) -> Any:
    return effjax.offload_sequential(layers, [PARAMS], BATCH, params_in="device")


def optimizer(tx: Any) -> Any:
    return effjax.nnx.OffloadOptimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx)


def train_state(tx: Any) -> Any:
    return effjax.linen.OffloadTrainState.create(apply_fn=None, params={"w": BATCH}, tx=tx)


def generate(config: Any = CONFIG, layers: Any = LAYERS, others: Any = OTHERS) -> Any:
    return models.generate(config, layers, others, jnp.ones((1, 2), int), max_new_tokens=1)


def logits(config: Any = CONFIG, others: Any = OTHERS) -> Any:
    return models.decoder_logits(config, others, jnp.ones((1, 2, 8)))


def save(layers: Any = LAYERS, others: Any = OTHERS, config: Any = SETTINGS) -> Any:
    convert.save_checkpoint("checkpoint", layers, others, config)


def load(layers: Any = LAYERS, others: Any = OTHERS) -> Any:
    save()
    convert.load_checkpoint("checkpoint", layers, others)


def load_adapter(layers: Any) -> Any:
    convert.save_adapter("adapter", ADAPTER, 1.0)
    convert.load_adapter("adapter", layers)


CALLS: Mapping[str, tuple[Callable[..., Any], str]] = {
    f"{name}-{argument}": (call, argument)
    for name, call, *arguments in [
        ("decoder_functions", models.decoder_functions, "config"),
        ("decoder_shapes", models.decoder_shapes, "config"),
        ("init_decoder", functools.partial(models.init_decoder, key=KEY), "config"),
        ("init_decoder_layer", functools.partial(models.init_decoder_layer, key=KEY), "config"),
        ("init_decoder_others", functools.partial(models.init_decoder_others, key=KEY), "config"),
        ("decoder_layer_keys", functools.partial(models.decoder_layer_keys, key=KEY), "config"),
        ("Decoder", functools.partial(models.Decoder, rngs=nnx.Rngs(0)), "config"),
        ("decoder_logits", logits, "config", "others"),
        ("generate", generate, "config", "layers", "others"),
        ("init", init, "layers", "others", "tx"),
        ("step", step, "state"),
        ("stream_update", update, "state", "tx"),
        ("offload_sequential", sequential, "layers"),
        ("nnx.OffloadModel", effjax.nnx.OffloadModel, "layers"),
        ("linen.OffloadModel", effjax.linen.OffloadModel, "layers"),
        ("OffloadOptimizer", optimizer, "tx"),
        ("OffloadTrainState", train_state, "tx"),
        ("save_checkpoint", save, "layers", "others", "config"),
        ("load_checkpoint", load, "layers", "others"),
        ("save_adapter", functools.partial(convert.save_adapter, "adapter", scale=1.0), "layers"),
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


Q, IMAGE, BOXES = jnp.ones((1, 4, 1, 8)), jnp.ones((1, 8, 8, 2)), jnp.ones((1, 3, 4))
FLAGS: Mapping[str, Callable[..., Any]] = {
    "causal": functools.partial(effjax.dot_product_attention, Q, Q, Q),
    "deterministic": functools.partial(effjax.roi_align, IMAGE, BOXES, output_size=2),
    "aligned": functools.partial(effjax.roi_align, IMAGE, BOXES, output_size=2),
    "tie_word_embeddings": functools.partial(dataclasses.replace, CONFIG),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    for value in ("False", 1, None, np.ones(2, bool)):
        with pytest.raises(TypeError, match=f"`{name}` must be a bool, not"):
            FLAGS[name](**{name: value})


def test_configuration_converts_numpy_scalars():
    config = dataclasses.replace(
        CONFIG, tie_word_embeddings=np.bool_(True), hidden_size=np.int64(8),
        rope_theta=np.float32(500),
    )  # fmt: skip
    assert json.loads(json.dumps(config.to_json()))["rope_theta"] == 500
    assert config == dataclasses.replace(CONFIG, tie_word_embeddings=True, rope_theta=500)


@pytest.mark.parametrize("value", [{"factor": 8.0}, "llama3", 8.0])
def test_rope_scaling_is_a_rope_scaling(value):
    with pytest.raises(TypeError, match="`rope_scaling` must be a Llama3RopeScaling, .* not"):
        dataclasses.replace(CONFIG, rope_scaling=value)


def test_missing_parameters_are_named():
    with pytest.raises(ValueError, match="`others` lacks 'model.norm.weight'"):
        logits(others={"lm_head.weight": jnp.ones((8, 8))})
    with pytest.raises(ValueError, match="`layers` lacks 'self_attn.q_proj.weight', one of"):
        generate(layers={"a": jnp.ones((1, 8))})
