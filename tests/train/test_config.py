"""Configurations of runs: bounds, options that exclude each other, config.json."""

import dataclasses
import json
import typing

import pytest

from effjax.train.config import command_line, fingerprint
from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetRunConfig, ResNetRunConfig
from effjax.train.text.config import FinetuneConfig
from tests.convert.decoders import WRONG_NUMBERS


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (DenseNetRunConfig, {"learning_rate": float("nan")}),
        (DenseNetRunConfig, {"weight_decay": -1.0}),
        (DenseNetRunConfig, {"validation": 1.5}),
        (DenseNetRunConfig, {"momentum": 1.0}),
        (DenseNetRunConfig, {"on_nan": "stmp"}),
        (ResNetRunConfig, {"depth": 20}),
        (FinetuneConfig, {"lora": 0}),
    ],
)
def test_rejects_values_out_of_range(config, option):
    (name,) = option
    with pytest.raises(TrainError, match=rf"^`{name}` \(="):
        config(**option)


@pytest.mark.parametrize("config", [DenseNetRunConfig, ResNetRunConfig, FinetuneConfig])
def test_values_of_another_kind_are_refused_by_name(config):
    """The options in config.json of a run may come from anybody."""
    for name, hint in typing.get_type_hints(config).items():
        kinds = typing.get_args(hint) or (hint,)
        wrong = [*WRONG_NUMBERS] if {int, float} & {*kinds} else [1e300, {}, [1]]
        wrong += [] if type(None) in kinds else [None]
        for value in wrong if typing.get_origin(hint) is not typing.ClassVar else ():
            with pytest.raises(TrainError, match=f"`{name}`"):
                config.from_json({name: value})


@pytest.mark.parametrize(
    "config",
    [
        *(DenseNetRunConfig(depth=40, validation=part) for part in (0, 0.0, 0.5, 1, 5000)),
        ResNetRunConfig(depth=50),
        FinetuneConfig(data=["a.jsonl"], lora=2, mlp_chunk_size=8),
    ],
)
def test_json_roundtrip(config):
    stored = json.loads(json.dumps(config.describe("0", {})))
    assert stored["command"] == config.COMMAND
    assert type(config).from_json(stored["options"]) == config


@pytest.mark.parametrize(
    ("config", "options"),
    [
        *((DenseNetRunConfig, options) for options in (None, {"depht": 22}, {"learning_rate": -1})),
        (FinetuneConfig, {"layers": 3}),
    ],
)
def test_rejects_config_of_another_version(config, options):
    with pytest.raises(TrainError, match=f"is not that of {command_line(config.COMMAND)}"):
        config.from_json(options)


def test_fingerprint_ignores_the_path_of_the_data():
    options = dataclasses.asdict(DenseNetRunConfig())
    assert fingerprint(options) == fingerprint(options | {"data": "cifar10:elsewhere"})
    assert fingerprint(options) != fingerprint(options | {"momentum": 0.8})
    first, moved = (
        FinetuneConfig(checkpoint=checkpoint, data=data, validation_data=other).describe("1", {})
        for checkpoint, data, other in (("base", "data", None), ("b", "c", "d"))
    )
    assert first["fingerprint"] == moved["fingerprint"]
