"""`effjax train --init-from`, from a weight file to the end of a resumed run."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from effjax import convert
from effjax.train.checkpoint import Checkpoints
from effjax.train.images.config import ResNetRunConfig
from effjax.train.images.task import prepare
from tests.train.images import archives
from tests.train.images.test_source_weights import FROZEN, make_weights


@pytest.mark.exhaustive
def test_fine_tunes_and_resumes_without_the_file(run, tmp_path):
    archives.write_images(tmp_path / "flowers", dict(daisy=10, rose=10, tulip=10), size=(8, 8))
    weights = make_weights()
    convert.save_weights("in.safetensors", weights)
    options = "--depth", "8", "--freeze-stages", "1", "--init-from", "in.safetensors"
    code, out, err = run(
        "train", "resnet", *options, "--data", "folder:flowers", "--batch-size", "8",
        "--validation", "0", "--epochs", "1", "--out", "here",
    )  # fmt: skip
    assert (code, err) == (0, "")
    for line in (
        f"weights: those of {tmp_path / 'in.safetensors'}",
        "new head of 3 classes; the file has 7 classes",
        "pixels are normalized by ImageNet's mean and standard deviation",
        "frozen: the stem and 1 stage; ",
    ):
        assert line in out
    config = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert config["init_from"] == str(tmp_path / "in.safetensors") and config["freeze_stages"] == 1

    (tmp_path / "in.safetensors").unlink()
    code, out, err = run("train", "resnet", "--resume", "here", "--epochs", "2")
    assert (code, err) == (0, "") and "epoch 2/2" in out and "frozen: the stem" in out
    task = prepare(ResNetRunConfig(**config), jax.devices()[:1], resume=True)
    with Checkpoints(tmp_path / "here" / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(task.shapes(), checkpoints.steps[-1])
    model = nnx.merge(task.learner.eval_graphdef, state.params, state.stats)
    trained = convert.to_torch(model, convert.RESNET)
    for name, array in weights.items():
        if not name.endswith("num_batches_tracked") and not name.startswith("fc."):
            is_frozen = name.startswith(tuple(FROZEN["resnet"]))
            assert np.array_equal(trained[name], array) == is_frozen, name
