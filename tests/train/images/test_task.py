import jax
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetRunConfig
from effjax.train.images.task import prepare
from tests.train import small


def test_no_device(monkeypatch):
    def fail():
        raise RuntimeError("no backend")

    monkeypatch.setattr("jax.devices", fail)
    with pytest.raises(TrainError, match=r"JAX finds no device \(no backend\)\. Run effjax doctor"):
        prepare(DenseNetRunConfig(), dataset=small.dataset())


def test_batches_depend_on_seed_and_epoch_only():
    task = small.image_task()
    first = list(task.local_batches(1))
    assert len(first) == 4 and first[0].images.shape == (16, 8, 8, 1)
    for a, b in zip(first, task.local_batches(1), strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)
    assert not np.array_equal(first[0].labels, next(task.local_batches(2)).labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 128}, r"larger than the train set \(=65 images\)"),
        ({"depth": 11}, "must be 6n . 4"),
        ({"mesh": "data=1,fsdp=2", "parallel": "pmap"}, "`mesh` .*`parallel`"),
        ({"depth": 10, "small_inputs": False}, "height and width of at least 13"),
    ],
)
def test_options_that_do_not_fit(options, message):
    config = DenseNetRunConfig(**{"batch_size": 16} | options)
    with pytest.raises(TrainError, match=message):
        prepare(config, jax.devices()[:2], small.dataset())


def test_padding_of_the_last_batch_does_not_count():
    task = small.image_task(devices=8)
    state = task.initial_state()
    tested = task.make_eval()(state, "test")

    model = nnx.merge(task.learner.eval_graphdef, state.params, state.stats)
    logits = model(task.learner.normalize(task.dataset.test_images))
    labels = task.dataset.test_labels
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(tested["loss"], losses.mean(), rtol=1e-6)
    assert tested["accuracy"] == np.mean(np.asarray(logits).argmax(-1) == labels)


def test_the_curve_has_the_losses_of_both_sets():
    figure = pytest.importorskip("matplotlib.figure")
    measured = {"loss": 1.0, "accuracy": 0.5}

    def draw(task, validated):
        """Return the axes, and the labels of the lines of each."""
        picture = figure.Figure()
        task.draw(picture.subplots(), [task.record(1, measured, validated, 9.0)])
        return picture.axes, [[str(a.get_label()) for a in axes.lines] for axes in picture.axes]

    axes, labels = draw(small.image_task(), measured)
    assert axes[1].get_ylim() == (0, 100)  # percent, whatever the values are
    assert labels == [["train loss", "validation loss"], ["validation accuracy"]]
    assert draw(small.image_task(validation=0), {})[1] == [["train loss"]]
