import dataclasses
import functools
import json
import math
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.models import scan_layers
from effjax.train.checkpoint import Checkpoints
from effjax.train.data.text import split_text
from effjax.train.errors import TrainError
from effjax.train.images.steps import data_mesh
from effjax.train.lm.config import LMConfig
from effjax.train.lm.job import build, initial_state, prepare
from effjax.train.lm.loop import LMProgress, fit, report_steps
from effjax.train.lm.offloaded import OffloadedState
from effjax.train.lm.steps import (
    lm_loss,
    lm_parts,
    make_lm_optimizer,
    make_lm_schedule,
    make_lm_step,
)
from effjax.train.run_directory import RunDirectory

pytest.importorskip("matplotlib")

TEXT = split_text("fox", b"The quick brown fox jumps over the lazy dog.\n" * 40)
TINY: dict[str, Any] = dict(
    layers=2, width=16, heads=2, context=12, batch_size=4, steps=5, report_every=2, dropout=0.1
)  # fmt: skip


def job(devices=2, **options):
    return prepare(LMConfig(**TINY | options), jax.devices()[:devices], TEXT)


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def new_run(path, job):
    return RunDirectory.create(path, job.describe(), overwrite=False)


def lines(run):
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    timing = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in r.items() if k not in timing} for r in records]


class Interrupt(LMProgress):
    """Ctrl-C in the middle."""

    def __init__(self, at):
        self.at = at

    def step(self, step, loss, tokens_per_second):
        if step == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run, and what it came to."""
    run = new_run(tmp_path_factory.mktemp("whole") / "run", job())
    return run, fit(job(), run)


def test_a_run_and_its_files(whole):
    run, result = whole
    records = lines(run)
    assert [r["kind"] for r in records] == ["step"] * 3 + ["final"]
    assert [r["step"] for r in records[:-1]] == [2, 4, 5]
    assert records[2]["train_loss"] < records[0]["train_loss"] < math.log(256) + 0.1
    assert result.test_loss == records[2]["test_loss"]
    np.testing.assert_allclose(result.test_bits_per_byte, result.test_loss / math.log(2))
    assert result.best_test_loss == min(r["test_loss"] for r in records[:-1])
    assert result.num_params == 2 * 256 * 16 + 16 + 2 * (12 * 16**2 + 2 * 16)
    assert 3 < result.unigram_bits < 5 and result.tokens_per_second > 0
    assert {p.name for p in run.path.iterdir()} == {
        "config.json", "metrics.jsonl", "curve.png", "checkpoints"
    }  # fmt: skip
    assert {int(p.name) for p in run.checkpoints.iterdir()} == {5, result.best_step}


def test_resuming_after_ctrl_c_ends_with_the_same_bits(tmp_path, whole):
    run = new_run(tmp_path / "run", job())
    with pytest.raises(KeyboardInterrupt):
        fit(job(), run, Interrupt(at=3))
    assert [r["kind"] for r in lines(run)] == ["step", "interrupted"]
    assert (run.path / "curve.png").exists()
    fit(job(), RunDirectory.open(run.path), resume=True)
    assert lines(run) == lines(whole[0])
    like = initial_state(job())
    with Checkpoints(run.checkpoints) as a, Checkpoints(whole[0].checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(like, 5)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_resume_needs_the_same_text(tmp_path):
    run = new_run(tmp_path / "run", job())
    other = dataclasses.replace(job(), text=split_text("dog", b"a lazy dog. " * 99))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(other, run, resume=True)


def test_a_finished_run_without_its_metrics(tmp_path, whole):
    run = new_run(tmp_path / "run", job())
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save(4, initial_state(job()), best_epoch=4)
    with pytest.raises(TrainError, match=r"metrics\.jsonl: step 2 is missing, .*of step 4; put"):
        fit(job(), run, resume=True)


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    wild = job(learning_rate=1e38, steps=4)
    with pytest.raises(TrainError, match=r"the train loss is .* at step \d; use a learning_rate b"):
        fit(wild, new_run(tmp_path / "run", wild))


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    run = new_run(tmp_path / "run", job())
    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(TrainError, match=r"run: cannot be written to \(No space left.*then resume"):
        fit(job(), run)


def test_reports_come_at_the_end_too():
    steps = [report_steps(job(steps=s, report_every=e)) for s, e in ((4, 2), (5, 2), (3, 9))]
    assert steps == [[2, 4], [2, 4, 5], [3]]


def test_the_loss_is_that_of_the_next_byte():
    one = job()
    params = initial_state(one).params
    tokens = np.arange(24).reshape(2, 12)
    logits = np.asarray(nnx.merge(one.graphdef, params)(tokens[:, :-1]), np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    want = -np.mean(np.take_along_axis(logs, tokens[:, 1:, None], -1))
    np.testing.assert_allclose(lm_loss(one.graphdef, params, tokens, None), want, rtol=1e-5)


@pytest.mark.parametrize("abstract", [True, False])
def test_the_loss_in_parts(abstract):
    one = job()
    params = initial_state(one).params
    model: Any = one.model if abstract else nnx.merge(one.graphdef, params)
    parts = lm_parts(model)
    others = {name: value for name, value in params.items() if name != "blocks"}
    tokens, key = np.arange(26).reshape(2, 13), jax.random.key(3)
    x = scan_layers(parts.layer, params["blocks"], parts.embed(others, tokens, key), key)
    want = lm_loss(one.graphdef, params, tokens, key)
    np.testing.assert_allclose(parts.head(others, x, tokens, key), want, rtol=1e-6)


def test_one_step_of_any_layers_on_any_devices():
    """Two devices with recomputed layers, in a function of one's own, take the same step."""
    tokens, key = np.arange(52).reshape(4, 13) % 256, jax.random.key(3)
    seen = []

    def mine(layer, params, x, key):
        seen.append(x.shape)
        return job(remat=True).apply_layers(layer, params, x, key)

    def step(one, apply_layers):
        run = make_lm_step(one.graphdef, one.optimizer, data_mesh(one.devices), apply_layers)
        state, loss = run(initial_state(job()), tokens, key)
        assert int(state.step) == 1
        return jax.tree.map(np.asarray, (state.params, loss))

    got, want = step(job(2), mine), step(job(1), scan_layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    assert seen == [(4, 12, 16)]


MODES = {
    "activations": dict(offload="activations"),
    "params": dict(offload="params"),
    "all": dict(offload="all"),
    "fused": dict(offload="all", fuse_update=True),
}


@pytest.fixture(scope="module")
def whole_on_one(tmp_path_factory):
    run = new_run(tmp_path_factory.mktemp("one") / "run", job(1))
    fit(job(1), run)
    return lines(run)


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_the_losses_are_the_same(mode, tmp_path, whole_on_one):
    one = job(1, **MODES[mode])
    run = new_run(tmp_path / "run", one)
    fit(one, run)
    for got, want in zip(lines(run), whole_on_one, strict=True):
        np.testing.assert_allclose(got["test_loss"], want["test_loss"], rtol=1e-5)
        np.testing.assert_allclose(got["train_loss"], want["train_loss"], rtol=1e-5)


def test_offloaded_resuming_ends_with_the_same_bits(tmp_path):
    """On two devices, with layers on the host of both."""
    one = job(2, offload="all", fuse_update=True)
    runs = [new_run(tmp_path / name, one) for name in ("whole", "parts")]
    fit(one, runs[0])
    with pytest.raises(KeyboardInterrupt):
        fit(one, runs[1], Interrupt(at=3))
    fit(one, RunDirectory.open(runs[1].path), resume=True)
    assert lines(runs[1])[-3:] == lines(runs[0])[-3:]
    state = initial_state(one)
    with Checkpoints(runs[0].checkpoints) as a, Checkpoints(runs[1].checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(state, 5)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)
    assert isinstance(state, OffloadedState)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state.model.layers)}
    assert kinds == {"pinned_host"}
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, state.params, initial_state(job(2)).params)


@pytest.mark.parametrize("mode", ["activations", "fused"])
def test_microbatches(mode, tmp_path):
    one = job(1, num_microbatches=2, dropout=0.0, **MODES[mode])
    plain = job(1, dropout=0.0)
    found = [fit(j, new_run(tmp_path / str(i), j)) for i, j in enumerate((one, plain))]
    np.testing.assert_allclose(found[0].test_loss, found[1].test_loss, rtol=1e-5)
    with pytest.raises(TrainError, match=r"num_microbatches \(=2\) is for one device, but .* 2"):
        job(2, num_microbatches=2, **MODES[mode])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("offload (='disk') must be one of", {"offload": "disk"}),
        ("fuse_update is for parameters on the host", {"fuse_update": True}),
        ("fuse_update is for", {"fuse_update": True, "offload": "activations"}),
        ("num_microbatches (=2) is of layers that are offloaded", {"num_microbatches": 2}),
        ("num_microbatches (=3) must divide", {"num_microbatches": 3, "offload": "all"}),
        ("num_microbatches (=0) must be at least 1", {"num_microbatches": 0}),
        ("remat is what offload does anyway", {"remat": True, "offload": "all"}),
    ],
)
def test_options_that_do_not_fit(message, options):
    with pytest.raises(TrainError) as error:
        LMConfig(**options)
    assert message in str(error.value)


def test_weight_decay_is_of_kernels_only():
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build(LMConfig(bias=True)))))
    ones = jax.tree.map(lambda p: jnp.ones(p.shape[:1]), params)
    optimizer = make_lm_optimizer(lambda _: 1.0, 0.5)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    leaves = jax.tree.leaves_with_path(updates)
    moved = {jax.tree_util.keystr(path): float(update[0]) for path, update in leaves}
    assert {v for k, v in moved.items() if "kernel" in k} == {-0.5}
    assert {v for k, v in moved.items() if "kernel" not in k} == {0.0}


def test_the_optimizer_works_leaf_by_leaf():
    """The update of a parameter does not depend on the others."""
    optimizer = make_lm_optimizer(optax.constant_schedule(0.1), 0.1)
    params = {"a": {"kernel": jnp.ones(3)}, "b": {"scale": jnp.ones(2)}}

    def first(params, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    whole: Any = first(params, params)
    part: Any = first({"a": params["a"]}, {"a": params["a"]})
    np.testing.assert_array_equal(whole["a"]["kernel"], part["a"]["kernel"])


def test_schedule():
    schedule: Any = make_lm_schedule(1.0, 100)
    rates = [float(schedule(s)) for s in (0, 10, 100)]
    np.testing.assert_allclose(rates, [0.1, 1, 0.1], atol=1e-6)
    assert np.isfinite(float(make_lm_schedule(1.0, 1)(0)))


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


def test_a_batch_that_does_not_fit_the_devices():
    with pytest.raises(TrainError, match=r"batch_size \(=5\) is not divisible .* \(=2\); use 4"):
        job(batch_size=5)
    with pytest.raises(TrainError, match=r"bytes are too few for context \(=200\)"):
        job(context=200)


def test_options_of_another_command():
    with pytest.raises(TrainError, match="is not of effjax train lm, or of another version"):
        LMConfig.from_json({"depth": 22})
