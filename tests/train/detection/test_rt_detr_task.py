"""Runs of a small RT-DETR."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax.convert import load_detector
from effjax.train.detection import plans
from effjax.train.detection import task as module
from effjax.train.detection.config import DetectorConfig
from effjax.train.detection.steps import make_adamw
from effjax.train.detection.task import prepare
from effjax.train.errors import PreemptionError, TrainError
from effjax.train.loop import fit
from tests.train import small
from tests.train.detection import coco
from tests.train.text.hub import COMMIT, serve, use

for name in ("PIL", "pycocotools", "matplotlib"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a data set and a model."""
    path = tmp_path_factory.mktemp("detection")
    coco.write_coco(path / "coco")
    coco.write_detector(path / "rtdetr")
    return path


def make_task(folder, devices=8, resume=False, **options):
    """Return a task of four steps of eight images."""
    defaults = dict(data=str(folder / "coco"), weights=str(folder / "rtdetr"), batch_size=8)
    defaults |= dict(image_size=32, steps=4, report_every=2)
    return prepare(DetectorConfig(**defaults | options), jax.devices()[:devices], resume)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Train a run without interruption; return its task, it and its result."""
    task = small.CachedTask(make_task(folder))
    run = small.new_run(tmp_path_factory.mktemp("whole") / "run", task)
    return task, run, fit(task, run)


def test_resumes_with_the_same_bits(whole, folder, tmp_path):
    task, run, _ = whole
    other = small.new_run(tmp_path / "run", task)
    with pytest.raises(PreemptionError):
        fit(task, other, stop=lambda step: step == 3)
    assert other.last_step == 3
    fit(task, other, resume=True)
    small.assert_same_run(task, run, other)


def test_the_number_of_devices_does_not_matter(whole, folder, tmp_path):
    _, run, _ = whole
    task = make_task(folder, devices=1)
    other = small.new_run(tmp_path / "run", task)
    fit(task, other)
    for a, b in zip(small.lines_without_times(run), small.lines_without_times(other), strict=True):
        for name in ("train_loss", "validation_loss", "validation_ap"):
            np.testing.assert_allclose(a.get(name, 0), b.get(name, 0), rtol=1e-4)


def test_export(whole):
    """Of the best parameters, with the names of the categories and the size of the images."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    task, run, result = whole
    found = transformers.RTDetrForObjectDetection.from_pretrained(run.path / result.exported)
    assert found.config.id2label == {0: "red", 1: "blue"}
    settings = json.loads((run.path / "model" / "preprocessor_config.json").read_text())
    assert settings["size"] == {"height": 32, "width": 32}
    images = task.local_batch(1).images[:2] / np.float32(255)
    with torch.no_grad():
        want = found.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    model = load_detector(run.path / "model")
    model.eval()
    np.testing.assert_allclose(model(images).layers[-1].logits, want.logits, atol=1e-3)


def test_norms_of_the_backbone_are_kept(whole):
    task, run, _ = whole
    start, end = load_detector(task.config.weights), load_detector(run.path / "model")
    norms = [model.backbone.stem_norm[0] for model in (start, end)]
    others = [model.encoder.lateral_convs[0].norm.mean[...] for model in (start, end)]
    kernels = [model.backbone.stem_conv[0].kernel[...] for model in (start, end)]
    for name in ("scale", "bias", "mean", "var"):
        np.testing.assert_array_equal(*(getattr(norm, name)[...] for norm in norms))
    assert 1e-6 < abs(kernels[0] - kernels[1]).max() < 1e-4  # four small steps
    assert abs(others[0] - others[1]).max() > 0


def test_padding_of_the_last_batch_does_not_count(whole, folder):
    """The loss of five images is that of them in a batch of eight and in one of five."""
    task, *_ = whole
    state = task.initial_state()
    one = make_task(folder, devices=1, batch_size=5)
    alone = one.make_eval()(jax.device_put(jax.device_get(state), jax.devices()[0]), "validation")
    found = task.make_eval()(state, "validation")
    assert found == pytest.approx(alone, rel=1e-5) and not one.make_eval()(state, "test")


def test_batches_cross_epochs_in_drawn_sizes(folder, monkeypatch):
    task = make_task(folder, devices=2, batch_size=6, num_sizes=3, image_size=96, resume=True)
    calls = []
    monkeypatch.setattr(module, "make_batch", lambda *args: calls.append(args))
    for step in range(1, 9):
        task.local_batch(step)
    names = [image.file.name for images, *_ in calls for image in images]
    epochs = [names[i : i + 8] for i in range(0, 48, 8)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len({*epochs[0]}) == 8
    assert epochs[0] != epochs[1]
    assert {side for _, side, *_ in calls} == {32, 96, 160}
    task.local_batch(3)
    assert calls[-1][:3] == calls[2][:3]
    states = [[rng.bit_generator.state for rng in call[3]] for call in (calls[-1], calls[2])]
    assert states[0] == states[1]


def test_steps_of_the_optimizer():
    """The backbone's are smaller, and norms and biases have no weight decay."""
    config = DetectorConfig(learning_rate=0.1, weight_decay=0.5, backbone_rate=0.25)
    optimizer = make_adamw(config, optax.constant_schedule(config.learning_rate))
    params = {name: {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))} for name in ("backbone", "x")}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    got = [float(u.ravel()[0]) for u in jax.tree.leaves(updates)]
    np.testing.assert_allclose(got, [-0.025, -0.0375, -0.1, -0.15], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "`data` and `weights` must be given"),
        ({"weights": "missing"}, "missing/config.json: cannot be read"),
        ({"image_size": 100}, "`image_size` .=100. must be a multiple of 32"),
        ({"num_sizes": 3}, "`num_sizes` .=3. needs `image_size` .=32. to be at least 96"),
        ({"validation": 8.0, "data": "held"}, "must hold out at least one object and not all"),
        ({"weights": "few"}, r"2.png: 2 objects, more than the queries of .*few .=1."),
        ({"weights": "damaged"}, "damaged.*model.safetensors"),
    ],
)
def test_options_that_do_not_fit(folder, options, message):
    if not (folder / "few").exists():
        coco.write_detector(folder / "few", num_queries=1)
        coco.write_detector(folder / "damaged")
        (folder / "damaged" / "model.safetensors").write_bytes(b"x" * 99)
        coco.write_coco(folder / "held", val=0)
    own = ("held", "few", "damaged")
    paths = {name: str(folder / value) for name, value in options.items() if value in own}
    with pytest.raises(TrainError, match=message):
        make_task(folder, **options | paths)


def test_weights_of_the_hub(folder, tmp_path, monkeypatch):
    """A plan downloads config.json, a run the weights of the commit that its config.json names."""
    name = "effjax-tests/rtdetr"
    with serve(("model", name, folder / "rtdetr")) as server:
        use(server, monkeypatch, tmp_path)
        plans.training_step(DetectorConfig(weights=name, image_size=32))
        assert server.downloaded == ["config.json"]
        task = make_task(folder, weights=name)
        assert task.config.weights == f"{name}@{COMMIT}"
        assert {*server.downloaded} == {"config.json", "model.safetensors"}
        again = make_task(folder, weights=task.config.weights, resume=True)
    local = make_task(folder)
    assert again.describe()["base"] == local.describe()["base"]
    jax.tree.map(np.testing.assert_array_equal, task.start_arrays, local.start_arrays)
    with pytest.raises(TrainError, match="effjax-tests/other: "):
        make_task(folder, weights="effjax-tests/other")


def test_plans(folder):
    """Steps of each form have the largest images, and `--fit` chooses among the forms."""
    config = DetectorConfig(
        weights=str(folder / "rtdetr"), batch_size=4, image_size=96, num_sizes=3
    )
    found = plans.forms(config, (), num_devices=2)
    assert [*found] == ["plain", "effjax conv", "effjax features"]
    form = found["plain"]
    step, state, batch, key = form.training_step(form.config)
    assert batch.images.shape == (4, 160, 160, 3) and batch.boxes.shape == (4, 6, 4)
    new, metrics = jax.eval_shape(step, state, batch, key)
    assert jax.tree.structure(new) == jax.tree.structure(state) and metrics.loss.shape == ()
    assert [*plans.forms(config, {"save"})] == ["as given"]
    choices = plans.memory_choices(config, {"efficient"})
    assert choices.options == {"efficient": (True,), "save": ("conv", "features")}
    assert next(plans.smaller_configs(config, False)).batch_size == 2
