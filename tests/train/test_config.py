"""Configurations of runs: bounds, options that exclude each other, config.json."""

import dataclasses
import json

import pytest

from effjax.train.config import fingerprint
from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetRunConfig, ResNetRunConfig
from effjax.train.text.config import FinetuneConfig


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (DenseNetRunConfig, {"learning_rate": float("nan")}),
        (DenseNetRunConfig, {"weight_decay": -1.0}),
        (DenseNetRunConfig, {"validation": 1.5}),
        (DenseNetRunConfig, {"momentum": 1.0}),
        (DenseNetRunConfig, {"on_nan": "stmp"}),
        (ResNetRunConfig, {"depth": 20}),
        (FinetuneConfig, {"clip_norm": -1.0}),
        (FinetuneConfig, {"lora": 0}),
    ],
)
def test_rejects_values_out_of_range(config, option):
    (name,) = option
    with pytest.raises(TrainError, match=rf"^`{name}` \(="):
        config(**option)


@pytest.mark.parametrize(
    "config",
    [
        *(DenseNetRunConfig(depth=40, validation=part) for part in (0, 0.0, 0.5, 1, 5000)),
        ResNetRunConfig(depth=50),
        FinetuneConfig(data=["a.jsonl"], lora=2),
    ],
)
def test_json_roundtrip(config):
    stored = json.loads(json.dumps(config.describe("0", {})))
    assert stored["command"] == config.COMMAND
    assert type(config).from_json(stored["options"]) == config


@pytest.mark.parametrize("options", [None, {"depht": 22}, {"learning_rate": -1}])
def test_rejects_config_of_another_version(options):
    with pytest.raises(TrainError, match="effjax train densenet"):
        DenseNetRunConfig.from_json(options)


def test_fingerprint_ignores_the_path_of_the_data():
    options = dataclasses.asdict(DenseNetRunConfig())
    assert fingerprint(options) == fingerprint(options | {"data": "cifar10:elsewhere"})
    assert fingerprint(options) != fingerprint(options | {"momentum": 0.8})
