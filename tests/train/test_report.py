"""What a run shows on a terminal, and elsewhere."""

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from effjax.train.images import report as images
from effjax.train.lm import report as lm
from tests.train.small import image_task, lm_task

TASKS = {"images": (images, image_task), "lm": (lm, lm_task)}
TRAIN, TEST = {"loss": 1.5, "accuracy": 0.25}, {"loss": 1.75, "accuracy": 0.5}
LINES = {
    "images": "epoch 1/3  loss 1.5000  accuracy 25.00%  test loss 1.7500  test accuracy 50.00%  "
    "90 images/s\n",
    "lm": "step 2/5  loss 1.5000  test loss 1.7500  test bits/byte 2.525  90 tokens/s\n",
}
BARS = {
    "images": "epoch 1  loss 1.500  accuracy 25.0%  90 images/s",
    "lm": "loss 1.500  90 tokens/s",
}


def shown(name, terminal):
    """What is written in a run's first steps."""
    report, make = TASKS[name]
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150)
    task = make()
    progress = report.make_progress(console, task)
    progress.start(task.numbers[-1] * task.steps_each, 0)
    progress.step(1, TRAIN, 90.0)
    progress.report(task.record(task.numbers[0], TRAIN, TEST, 90.0))
    progress.stop()
    return file.getvalue()


@pytest.mark.parametrize("name", TASKS)
def test_lines_and_no_bar_in_a_file(name):
    assert shown(name, terminal=False) == LINES[name]


@pytest.mark.parametrize("name", TASKS)
def test_a_bar_below_the_lines_on_a_terminal(name):
    text = shown(name, terminal=True)
    assert LINES[name].rstrip() in text and BARS[name] in text
