import pytest

from effjax.train.errors import TrainError
from effjax.train.images.config import Config


@pytest.mark.parametrize(
    "option",
    [
        {"epochs": 0}, {"batch_size": 0}, {"growth_rate": 0}, {"learning_rate": 0.0},
        {"learning_rate": float("nan")}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"seed": -1},
        {"parallel": "pjit"}, {"dtype": "float16"}, {"schedule": "linear"}, {"save": "all"},
    ],
)  # fmt: skip
def test_options_out_of_range(option):
    (name,) = option
    with pytest.raises(TrainError, match=rf"^{name} \(="):
        Config(**option)


def test_options_of_another_version():
    with pytest.raises(TrainError, match="another version"):
        Config.from_json({"depht": 22})
    with pytest.raises(TrainError, match="another version"):
        Config.from_json(None)
