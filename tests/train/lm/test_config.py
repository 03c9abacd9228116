import pytest

from effjax.train.errors import TrainError
from effjax.train.lm.config import LMConfig


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("offload (='disk') must be one of", {"offload": "disk"}),
        ("num_microbatches (=2) is of layers that are offloaded or", {"num_microbatches": 2}),
        ("policy (=dots) is of layers that are offloaded or", {"policy": "dots"}),
        ("num_microbatches (=3) must divide", {"num_microbatches": 3, "offload": "all"}),
        ("num_microbatches (=0) must be at least 1", {"num_microbatches": 0}),
        ("remat is what offload and fuse_update do", {"remat": True, "offload": "all"}),
        ("remat is what offload and fuse_update do", {"remat": True, "fuse_update": True}),
    ],
)
def test_options_that_do_not_fit(message, options):
    with pytest.raises(TrainError) as error:
        LMConfig(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        {"context": 0}, {"layers": 0}, {"heads": 0}, {"steps": 0}, {"batch_size": 0},
        {"report_every": 0}, {"width": 12}, {"dropout": 1.0}, {"learning_rate": 0.0},
        {"learning_rate": float("nan")}, {"weight_decay": -1.0}, {"dtype": "float16"}, {"seed": -1},
    ],
)  # fmt: skip
def test_options_out_of_range(option):
    (name,) = option
    with pytest.raises(TrainError, match=rf"^{name} \(="):
        LMConfig(**option)


def test_width_is_suggested():
    with pytest.raises(TrainError, match=r"width \(=30\) must be .* heads \(=4\); use 24"):
        LMConfig(width=30)


def test_options_of_another_command():
    with pytest.raises(TrainError, match="is not of effjax train lm, or of another version"):
        LMConfig.from_json({"depth": 22})
