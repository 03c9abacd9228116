"""Direct preference optimization: its loss and gradients, and exact resume."""

import functools
import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

from effjax.models import decoder_functions, decoder_logits
from effjax.train import FinetuneConfig
from effjax.train.errors import TrainError
from effjax.train.run_directory import RunDirectory
from tests.tiers import vary
from tests.train.small import CachedTask, new_run
from tests.train.text.small import check_resume, finetune_task, write_base

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

PAIRS = [
    {"prompt": f"{i}:", "chosen": "ab" * (1 + i % 4), "rejected": "no" * (1 + i % 3)}
    for i in range(24)
]
BETA, LENGTH = 0.5, 32


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("base"), num_hidden_layers=1)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return folder


def dpo_task(base, **options):
    options = {"loss": "dpo", "dpo_beta": BETA, "max_length": LENGTH} | options
    return finetune_task(base, data=str(base / "pairs.jsonl"), **options)


def whole_batches(base, **options):
    """Return a task whose batches have all rows."""
    count = len(dpo_task(base, **options).data.train)
    return CachedTask(dpo_task(base, batch_size=count, keep=3, learning_rate=0.1, **options))


def start(task, folder):
    """Return the initial state, with the references in the rows of the task."""
    state = task.initial_state()
    task.start(new_run(folder, task), state, lambda text: None)
    return state


def forget_references(task):
    """Set the references to NaN, as they are in a new process."""
    for part in (task.data.train, task.data.validation):
        part.references[:] = np.nan


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(learner, layers, others, tokens):
    """Return the logits of each position of sequences that are not packed."""
    embed, layer, _ = decoder_functions(learner.model, lora_scale=learner.config.lora_scale)
    x = embed(others, {"tokens": tokens})
    x, _ = jax.lax.scan(lambda x, params: (layer(params, x), None), x, layers)
    return decoder_logits(learner.model, others, x["hidden"])


def log_probs_by_hand(task, state, part):
    """Return the log probabilities of the answers, float64 [number of pairs, 2]."""
    result = np.zeros((len(part.references), 2))
    for side, packed in enumerate(part.sides):
        sequences = packed.sequences
        bounds = [*itertools.pairwise(sequences.offsets)]
        padded = np.zeros((len(PAIRS), LENGTH), np.int32)
        for row, (first, last) in zip(padded, bounds, strict=False):
            row[: last - first] = sequences.tokens[first:last]
        logits = compute_logits(task.learner, state.model.layers, state.model.others, padded)
        logits = np.asarray(logits, np.float64)
        scores = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        for i, (first, last) in enumerate(bounds):
            of_next = scores[i, np.arange(last - first - 1), sequences.tokens[first + 1 : last]]
            result[i, side] = of_next[sequences.has_loss[first + 1 : last]].sum()
    return result


def loss_by_hand(log_probs, references):
    """Return the loss and the metrics, as TRL defines them."""
    rewards = BETA * (log_probs - references)
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "loss": np.mean(np.log1p(np.exp(-margins))),
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
    }


@vary("options", [dict(lora=2), dict(packing=False)])
def test_loss_and_metrics(base, tmp_path, options):
    """Compare with float64, from logits; at the start, the loss is log 2."""
    task = whole_batches(base, **options)
    state = start(task, tmp_path / "run")
    train, validation = task.data.train, task.data.validation
    assert task.config.packing == (train.pairs_per_row > 1) and len(validation.references) == 2
    references = log_probs_by_hand(task, state, train)
    np.testing.assert_allclose(train.references, references, rtol=1e-5)
    batches, metrics = task.batches(0), []
    for _ in range(3):
        expected = loss_by_hand(log_probs_by_hand(task, state, train), references)
        state, values = task.make_step()(state, next(batches), jax.random.key(0))
        assert task.read(values) == pytest.approx(expected, rel=1e-4, abs=2e-5)
        metrics.append(expected)
    assert metrics[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert metrics[2]["loss"] < 0.6 and metrics[2]["accuracy"] > 0.9
    log_probs = log_probs_by_hand(task, state, validation)
    expected = loss_by_hand(log_probs, np.float64(validation.references))
    assert task.make_eval()(state, "validation") == pytest.approx(expected, rel=1e-4, abs=2e-5)

    # A run that continues reads the references.
    stored, run = train.references.copy(), RunDirectory(tmp_path / "run")
    forget_references(task)
    task.start(run, None, print)
    np.testing.assert_array_equal(train.references, stored)
    assert np.isfinite(validation.references).all()
    np.savez(run.path / "references.npz", train=stored + 1, validation=validation.references)
    with pytest.raises(TrainError, match=r"references.npz: cannot be read \(it has changed\)"):
        task.start(run, None, print)


@pytest.mark.exhaustive
def test_dropout_resumes_exactly(base, tmp_path):
    """The references are those of the first model after an interruption, too."""
    task = whole_batches(base, lora=2, lora_dropout=0.25)
    run, _ = check_resume(task, tmp_path, lambda: forget_references(task))
    records = [line for line in run.read_metrics() if line["kind"] == "step"]
    assert records[0]["validation_loss"] < np.log(2) and records[0]["validation_accuracy"] == 1
    assert records[-1]["train_margin"] > 0 and records[-1]["train_accuracy"] > 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plain", "form"),
    [
        (dict(clip_norm=0), dict(params_in="host", fuse_update=True, num_microbatches=4)),
        (dict(), dict(devices=2, mesh="fsdp=2", policy="everything", mlp_chunk_size=8)),
        (dict(packing=False), dict(activations_in="host")),
    ],
)
def test_forms_of_the_step(base, tmp_path, plain, form):
    """Pairs stay together in microbatches, in stacks and on devices."""

    def run_two_steps(folder, **options):
        task = dpo_task(base, batch_size=8, **options)
        state, metrics = start(task, folder), None
        step, batches = task.make_step(), task.batches(0)
        for _ in range(2):
            state, metrics = step(state, next(batches), jax.random.key(0))
        return task.read(metrics), jax.device_get((state.model.layers, state.model.others))

    metrics, params = run_two_steps(tmp_path / "form", **plain, **form)
    want, want_params = run_two_steps(tmp_path / "plain", **plain)
    assert metrics == pytest.approx(want, rel=1e-4, abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0, 2e-5), params, want_params)


def test_the_planner_has_the_shapes_of_a_batch(base):
    tasks = [dpo_task(base, packing=packing, batch_size=4) for packing in (False, True)]
    single, packed = (next(task.batches(0)) for task in tasks)
    options: dict[str, Any] = {"loss": "dpo", "batch_size": 4, "max_length": LENGTH}
    shapes = {name: (a.shape, str(a.dtype)) for name, a in single.items()}
    assert FinetuneConfig(packing=False, **options).batch_shapes() == shapes
    of_packed = FinetuneConfig(**options).batch_shapes()
    assert of_packed.keys() == packed.keys() and of_packed["tokens"] == shapes["tokens"]
    rows: Any = tasks[1].data.train
    is_used = rows.batch(np.arange(len(rows)))["segment_ids"] > 0
    assert rows.efficiency == pytest.approx(is_used.mean())
