"""Direct preference optimization: its loss and gradients, rows of pairs, and exact resume."""

import datetime
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from effjax.models import decoder_functions, decoder_logits
from effjax.train import FinetuneConfig, finetune
from effjax.train.errors import DataError, PreemptionError, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.packing import pack_pairs
from effjax.train.text.rows import load_rows
from tests.train.small import CachedTask, assert_same_parameters, new_run
from tests.train.text.small import finetune_task, write_base

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

PAIRS = [
    {"prompt": f"{i}:", "chosen": "ab" * (1 + i % 4), "rejected": "no" * (1 + i % 3)}
    for i in range(24)
]
BETA = 0.5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("base"), num_hidden_layers=1)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return folder


def dpo_task(base, **options):
    options = {"loss": "dpo", "dpo_beta": BETA, "max_length": 32} | options
    return finetune_task(base, data=str(base / "pairs.jsonl"), **options)


def start(task, tmp_path):
    """Return the initial state, with the references in the rows of the task."""
    state = task.initial_state()
    task.start(new_run(tmp_path / "start", task), state, lambda text: None)
    return state


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(learner, layers, others, tokens):
    """Return the logits of each position of sequences that are not packed."""
    embed, layer, _ = decoder_functions(learner.model, lora_scale=learner.lora_scale)
    x = embed(others, {"tokens": tokens})
    x, _ = jax.lax.scan(lambda x, params: (layer(params, x), None), x, layers)
    return decoder_logits(learner.model, others, x["hidden"])


def log_probs_by_hand(task, state, part):
    """Return the log probabilities of the answers, float64 [number of pairs, 2]."""
    result = np.zeros((len(part.references), 2))
    for side, packed in enumerate(part.sides):
        sequences = packed.sequences
        bounds = [*zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)]
        tokens = [sequences.tokens[first:last] for first, last in bounds]
        padded = np.zeros((len(PAIRS), task.config.max_length), np.int32)
        for row, ids in zip(padded, tokens, strict=False):
            row[: len(ids)] = ids
        scores = compute_logits(task.learner, state.model.layers, state.model.others, padded)
        scores = log_softmax(np.asarray(scores, np.float64))
        for i, (first, last) in enumerate(bounds):
            of_next = scores[i, np.arange(last - first - 1), tokens[i][1:]]
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


def whole_batches(base, **options):
    """Return a task whose batches have all rows."""
    count = dpo_task(base, **options).data.rows_per_epoch
    return CachedTask(dpo_task(base, batch_size=count, keep=3, learning_rate=0.1, **options))


def check_loss_and_metrics(task, tmp_path):
    """Compare with float64, from logits; at the start, the loss is log 2."""
    state = start(task, tmp_path)
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


def check_resume(task, tmp_path):
    """Check that the references are those of the first model after an interruption, too."""
    whole, stopped = (new_run(tmp_path / name, task) for name in ("whole", "stopped"))
    fit(task, whole)
    records = [line for line in whole.read_metrics() if line["kind"] == "step"]
    assert records[0]["validation_loss"] < np.log(2) and records[0]["validation_accuracy"] == 1
    assert records[-1]["train_margin"] > 0 and records[-1]["train_accuracy"] > 0.5
    with pytest.raises(PreemptionError):
        fit(task, stopped, stop=lambda step: step == 3)
    for part in (task.data.train, task.data.validation):
        part.references[:] = np.nan  # as in a new process
    fit(task, stopped, resume=True)
    assert_same_parameters(task, whole, stopped)


def test_adapters(base, tmp_path):
    """Check the loss, and that a run which continues reads the references."""
    task = whole_batches(base, lora=2)
    check_loss_and_metrics(task, tmp_path)
    parts = task.data.train, task.data.validation
    stored, run = [part.references.copy() for part in parts], RunDirectory(tmp_path / "start")
    for part in parts:
        part.references[:] = np.nan  # as in a new process
    task.start(run, None, print)
    for part, references in zip(parts, stored, strict=True):
        np.testing.assert_array_equal(part.references, references)
    for content in b"PK", (run.path / "references.npz").read_bytes()[:-9]:
        (run.path / "references.npz").write_bytes(content)
        with pytest.raises(TrainError, match=r"references.npz: cannot be read .* Start a new run"):
            task.start(run, None, print)


@pytest.mark.exhaustive
def test_all_parameters_without_packing(base, tmp_path):
    task = whole_batches(base, packing=False)
    check_loss_and_metrics(task, tmp_path)
    check_resume(task, tmp_path)


@pytest.mark.exhaustive
def test_dropout_resumes_exactly(base, tmp_path):
    check_resume(whole_batches(base, lora=2, lora_dropout=0.25), tmp_path)


@pytest.fixture(scope="module")
def two_steps(base, tmp_path_factory):
    return run_two_steps(dpo_task(base, batch_size=8), tmp_path_factory.mktemp("two"))


def run_two_steps(task, tmp_path):
    state, metrics = start(task, tmp_path), None
    step, batches = task.make_step(), task.batches(0)
    for _ in range(2):
        state, metrics = step(state, next(batches), jax.random.key(0))
    return task.read(metrics), jax.device_get((state.model.layers, state.model.others))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "form",
    [
        dict(offload="all", fuse_update=True, clip_norm=0, num_microbatches=4),
        dict(devices=2, mesh="fsdp=2"),
        dict(policy="everything", mlp_chunk_size=8),
        dict(offload="activations", packing=False, batch_size=8),
    ],
)
def test_forms_of_the_step(base, tmp_path, two_steps, form):
    """Pairs stay together in microbatches, in stacks and on devices."""
    if "clip_norm" in form or "packing" in form:
        plain = {name: form[name] for name in ("clip_norm", "packing") if name in form}
        two_steps = run_two_steps(dpo_task(base, **{"batch_size": 8} | plain), tmp_path / "plain")
    metrics, params = run_two_steps(dpo_task(base, **{"batch_size": 8} | form), tmp_path)
    assert metrics == pytest.approx(two_steps[0], rel=1e-4, abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0, 2e-5), params, two_steps[1])


@pytest.fixture(scope="module")
def tokenizer(base):
    return load_tokenizer(base, datetime.date(2026, 1, 31))


USER = {"role": "user", "content": "2 + 3?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("5", "six"))


def read(tmp_path, tokenizer, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_length": 99, "validation": 0, "pairs": True} | options
    return load_rows(path, tokenizer, **options)


def texts(sequences, tokenizer):
    """Return the text of each sequence, and of its tokens with loss."""
    return [
        tuple(
            tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
            for ids in (tokens, tokens[has_loss])
        )
        for tokens, has_loss in (
            (sequences.tokens[first:last], sequences.has_loss[first:last])
            for first, last in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)
        )
    ]


def test_forms_of_rows(tmp_path, tokenizer):
    prompt = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    messages = [(f"{prompt}{answer}<|im_end|>\n",) * 2 for answer in ("5", "six")]
    messages = [(text, text.removeprefix(prompt)) for text, _ in messages]
    for row in (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 + 3?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 2},
    ):
        data = read(tmp_path, tokenizer, row)
        assert texts(data.train, tokenizer) == messages
    assert data.notes == (
        "the prompt is what `chosen` and `rejected` begin with", "unused fields: score_chosen"
    )  # fmt: skip
    row = {"question": "2 + 3 =", "chosen": " 5", "rejected": " six"}
    data = read(tmp_path, tokenizer, row, columns="prompt=question")
    answers = [" 5</s>", " six</s>"]
    assert texts(data.train, tokenizer) == [(f"2 + 3 ={answer}", answer) for answer in answers]
    # A pair is left out if the prompt of one answer fills the sequence.
    long = {"prompt": "2 + 3 =" * 9, "chosen": " 5", "rejected": " six"}
    data = read(tmp_path, tokenizer, row | {"prompt": "a"}, long, max_length=20)
    assert (len(data.train), data.num_skipped, data.num_cut) == (2, 1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "It lacks `rejected`, and has `prompt`, `chosen`"),
        ({"chosen": "a b", "rejected": "a c"}, "must have a `prompt`, unless"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "must begin with the same messages"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "must end with different answers"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "`chosen` must not be empty"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [BAD]}, "`chosen` must have a message"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "`chosen` must be a string, not a number"),
    ],
)
def test_malformed_rows(tmp_path, tokenizer, row, message):
    with pytest.raises(DataError, match="line 1: ") as error:
        read(tmp_path, tokenizer, row)
    assert message in str(error.value)


def test_rows_of_preferences_need_their_loss(base, tokenizer, tmp_path):
    with pytest.raises(DataError, match="--loss dpo trains on `chosen` and `rejected`"):
        read(tmp_path, tokenizer, PAIRS[0], pairs=False)
    with pytest.raises(TrainError, match=r"`dpo_beta` \(=0.5\) needs `loss` \(=dpo\)"):
        dpo_task(base, loss="cross_entropy")
    config = FinetuneConfig(
        checkpoint=str(base), data=[str(base / "pairs.jsonl")], loss="dpo", batch_size=8
    )
    with pytest.raises(TrainError, match="cannot be combined with a function"):
        finetune(config, tmp_path / "run", loss=lambda logits, batch: (logits.sum(), logits.sum()))
    assert (config.resolve().dpo_beta, config.resolve().learning_rate) == (0.1, 1e-6)


def test_packed_pairs(tmp_path, tokenizer):
    """Both answers of a pair are at the same place of the two rows, with its references."""
    data = read(tmp_path, tokenizer, *PAIRS)
    (packed,) = pack_pairs([data.train], 32)
    packed.references[:] = np.arange(len(packed.references) * 2).reshape(-1, 2)
    batch = packed.batch(np.array([*range(len(packed)), -1]))
    seen = []
    for row in range(len(packed)):
        for place in range(int(batch["pairs"][row].sum())):
            pair = int(batch["references"][row, place, 0]) // 2
            seen.append(pair)
            for side in range(2):
                assert batch["references"][row, place, side] == 2 * pair + side
                sequence = packed.sides[side].sequences.select(np.arange(len(PAIRS)) == pair)
                chosen = batch["segment_ids"][row, side] == place + 1
                np.testing.assert_array_equal(batch["tokens"][row, side][chosen], sequence.tokens)
    assert sorted(seen) == list(range(len(PAIRS))) and packed.pairs_per_row > 1
    assert all(not a[-1].any() for a in batch.values())
    assert packed.efficiency == pytest.approx((batch["segment_ids"] > 0)[:-1].mean())
    # The planner has the shapes of a batch without data.
    (single,) = pack_pairs([data.train], 32, packing=False)
    shapes = {name: (a.shape, str(a.dtype)) for name, a in single.batch(np.arange(4)).items()}
    options: dict[str, Any] = {"loss": "dpo", "batch_size": 4, "max_length": 32}
    assert FinetuneConfig(packing=False, **options).batch_shapes() == shapes
    packed_shapes = FinetuneConfig(**options).batch_shapes()
    assert packed_shapes.keys() == batch.keys() and packed_shapes["tokens"] == shapes["tokens"]
