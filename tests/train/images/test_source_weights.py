"""Runs that start with weights of a file: values, new heads, frozen stages, errors."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax import convert
from effjax.convert import networks
from effjax.models import ResNet, densenet_cifar
from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetRunConfig, ResNetRunConfig
from effjax.train.images.plans import backward_bytes
from effjax.train.images.steps import RESNET8
from effjax.train.images.task import IMAGENET_MEAN, IMAGENET_STD, prepare
from tests.convert.cases import random_array
from tests.tiers import vary
from tests.train import small

SIDE, CLASSES = 8, 5
TABLES = {"resnet": convert.RESNET, "densenet": convert.DENSENET}
CONFIGS = {
    "resnet": functools.partial(ResNetRunConfig, depth=8),
    "densenet": functools.partial(DenseNetRunConfig, depth=10, growth_rate=4),
}
OPTIONS = {"batch_size": 16, "validation": 0, "epochs": 2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_model(kind="resnet", num_classes=7, **options):
    options |= {"num_classes": num_classes, "small_inputs": True, "rngs": nnx.Rngs(1)}
    if kind == "densenet":
        return densenet_cifar(10, 4, **options)
    return ResNet(**RESNET8 | options)


@functools.cache
def make_weights(kind="resnet", num_classes=7):
    """Return random weights and statistics in PyTorch's layout."""
    model = nnx.eval_shape(lambda: make_model(kind, num_classes))
    shapes = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    names = convert.to_torch(zeros, TABLES[kind]).items()
    return {name: random_array(name, array.shape).astype(array.dtype) for name, array in names}


def write_weights(kind="resnet", num_classes=7):
    weights = make_weights(kind, num_classes)
    convert.save_weights("weights.safetensors", weights)
    return weights


def task_of(kind="resnet", init_from="weights.safetensors", channels=3, resume=False, **options):
    config = CONFIGS[kind](**OPTIONS | options, init_from=init_from)
    dataset = small.dataset(size=SIDE, channels=channels, classes=CLASSES)
    return prepare(config, jax.devices()[:1], dataset, resume)


def weights_of(task, state):
    """Return the arrays of a state in PyTorch's layout."""
    model = nnx.merge(task.learner.eval_graphdef, state.params, state.stats)
    return convert.to_torch(model, TABLES["resnet" if isinstance(model, ResNet) else "densenet"])


def assert_loaded(task, weights, new_head=False):
    """Assert that the initial state has all weights, or all but those of the head."""
    got = weights_of(task, task.initial_state())
    assert got.keys() >= weights.keys()
    for name, array in weights.items():
        if not (new_head and name.startswith("fc.")):
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    return got


@vary("kind", TABLES)
def test_same_classes_keep_the_head_and_the_logits(kind):
    weights, task = write_weights(kind, CLASSES), task_of(kind)
    assert_loaded(task, weights)
    state, images = task.initial_state(), task.dataset.test_images[:4]
    model = nnx.merge(task.learner.eval_graphdef, state.params, state.stats)
    expected = convert.from_torch(weights, make_model(kind, CLASSES), TABLES[kind])
    expected.eval()
    run = nnx.jit(lambda model, x: model(x))
    x = (images / np.float32(255) - IMAGENET_MEAN) / IMAGENET_STD
    got = run(model, task.learner.normalize(images))
    np.testing.assert_allclose(got, run(expected, x), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_other_classes_get_a_new_head():
    weights, task = write_weights(), task_of()
    got = assert_loaded(task, weights, new_head=True)
    assert got["fc.weight"].shape == (CLASSES, 64) and np.std(got["fc.weight"]) > 0
    other = weights_of(task, task_of(seed=1).initial_state())
    assert not np.array_equal(got["fc.weight"], other["fc.weight"])
    headless = {name: array for name, array in weights.items() if not name.startswith("fc.")}
    convert.save_weights("weights.safetensors", headless)
    assert task_of().source.num_classes is None


@vary("flavor, to", [("nnx", "folder"), ("linen", "file.safetensors")])
def test_reads_what_convert_writes(monkeypatch, flavor, to):
    from effjax.models.linen import ResNet as LinenResNet

    build = functools.partial(LinenResNet, **RESNET8, small_inputs=True)
    monkeypatch.setitem(networks.NETWORKS, "resnet8", (build, convert.RESNET))
    weights = make_weights()
    variables = networks.network_variables("resnet8", weights, "", {"num_classes": 7})
    variables = networks.as_nnx(variables) if flavor == "nnx" else variables
    networks.write_checkpoint(Path(to), variables)
    assert_loaded(task_of(init_from=to), weights, new_head=True)


def test_layers_that_predict_offsets_may_be_missing():
    weights = write_weights()
    got = assert_loaded(task_of(dcn="v2"), weights, new_head=True)
    assert not np.any(got["layer2.0.conv2.conv_offset.weight"])


def test_records_what_a_resumed_run_needs(tmp_path):
    write_weights()
    config = task_of(freeze_stages=1).config
    assert config.init_from == str(tmp_path / "weights.safetensors")
    assert (config.small_inputs, config.normalize) == (True, "imagenet")
    (tmp_path / "weights.safetensors").unlink()
    task = task_of(**dataclasses.asdict(config), resume=True)
    assert task.describe()["data"]["mean"] == IMAGENET_MEAN.tolist()
    task.shapes()  # is what a checkpoint is restored into
    with pytest.raises(TrainError, match="weights.safetensors"):
        task.initial_state()  # without a checkpoint, the file is needed


def test_normalizes_as_asked():
    write_weights()
    assert task_of().learner.mean.tolist() == IMAGENET_MEAN.tolist()
    task = task_of(normalize="data")
    x = task.learner.normalize(task.dataset.train_images)
    assert x.dtype == jnp.float32
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-5)
    with pytest.raises(TrainError, match="needs RGB images.*1 channel.*--normalize data"):
        task_of(channels=1)


def train_one_step(task):
    state = task.initial_state()
    before = weights_of(task, jax.device_get(state))
    batch = next(task.batches(0))
    state, metrics = task.make_step()(state, batch, jax.random.key(0))
    return before, weights_of(task, jax.device_get(state)), batch, metrics, state


FROZEN = {
    "resnet": ["conv1.", "bn1.", "layer1."],
    "densenet": ["features.conv0.", "features.denseblock1.", "features.transition1."],
}


@vary("kind", FROZEN)
def test_frozen_stages_do_not_change(kind):
    """Neither by gradients, weight decay, momentum nor new statistics."""
    write_weights(kind)
    task = task_of(kind, freeze_stages=1)
    before, after, _, _, state = train_one_step(task)
    for name, array in before.items():
        if not name.endswith("num_batches_tracked"):
            is_frozen = name.startswith(tuple(FROZEN[kind]))
            assert np.array_equal(after[name], array) == is_frozen, name
    trained, total = task.num_params()
    assert 0 < trained < total
    assert trained == sum(a.size for a in jax.tree.leaves(state.opt_state) if a.ndim)
    assert total == sum(a.size for a in jax.tree.leaves(nnx.state(make_model(kind, 5), nnx.Param)))


@pytest.mark.exhaustive
def test_frozen_resnet_learns_as_with_frozen_stages_of_the_model():
    """They are another implementation."""
    start = write_weights(num_classes=CLASSES)
    task = task_of(freeze_stages=1, augment=False, learning_rate=0.1, weight_decay=0.0)
    _, after, batch, metrics, _ = train_one_step(task)
    model = make_model(num_classes=CLASSES, frozen_stages=1)
    convert.from_torch(start, model, convert.RESNET)

    @nnx.jit
    @nnx.value_and_grad
    def loss_and_gradients(model):
        logits = model(task.learner.normalize(batch.images))
        labels = jax.nn.one_hot(batch.labels, CLASSES)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))

    loss, grads = loss_and_gradients(model)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-4)
    got = convert.to_torch(grads, convert.RESNET)
    for name in ("layer2.0.conv1.weight", "layer3.0.bn2.bias", "fc.weight"):
        # The first step of Nesterov momentum is 1.9 gradients.
        expected = start[name] - 0.1 * 1.9 * got[name]
        np.testing.assert_allclose(after[name], expected, rtol=1e-3, atol=1e-4)


@vary("kind", FROZEN)
def test_frozen_stages_keep_nothing_for_the_backward_pass(kind):
    write_weights(kind)
    task = task_of(kind, freeze_stages=1)
    shape = 16, SIDE, SIDE, 3
    configs = [dataclasses.replace(task.config, freeze_stages=n) for n in (None, 0, 1, 3)]
    sizes = [backward_bytes(config, task.build, shape).bytes for config in configs]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 10
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("resnet", {"init_from": "bad.safetensors"}, "bad.safetensors: not a complete"),
        ("resnet", {"init_from": "text.txt"}, "must end in .safetensors"),
        ("resnet", {"init_from": "run"}, "run is a run of effjax train. Give a weight file"),
        ("resnet", {"init_from": "empty"}, "neither a weight file nor a folder that effjax con"),
        ("resnet", {"init_from": "other.safetensors"}, "its names are not those of resnet8"),
        ("resnet", {"init_from": "twice.safetensors"}, "its names are not those of resnet8. Give"),
        ("densenet", {}, "missing: classifier|left over"),
        ("resnet", {"freeze_stages": 4}, r"`freeze_stages` \(=4\) must be at most .* \(=3\)"),
        ("resnet", {"small_inputs": False}, "of another shape: conv1.weight"),
    ],
)  # fmt: skip
def test_errors(tmp_path, kind, options, message):
    write_weights()
    conv = np.zeros((3, 3, 3, 8), np.float32)
    convert.save_weights("other.safetensors", {"conv": conv[0], "conv.kernel": conv})
    convert.save_weights("twice.safetensors", {"conv.scale": conv[0, 0, 0], "conv.kernel": conv})
    for folder in "empty", "run":
        (tmp_path / folder).mkdir()
    for name in "bad.safetensors", "text.txt", "run/config.json":
        (tmp_path / name).write_text("{}")
    with pytest.raises(TrainError, match=message):
        task_of(kind, **options)
