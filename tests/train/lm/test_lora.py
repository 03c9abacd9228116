"""Low-rank adapters, trained on top of the frozen weights of another run."""

import functools
import json
import re
import shutil
from typing import Any

import jax
import numpy as np
import optax
import pytest

from effjax.memory import plan
from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import TrainError
from effjax.train.lm.config import LMConfig
from effjax.train.lm.forms import lm_training_step
from effjax.train.lm.steps import lm_loss, make_lm_optimizer
from effjax.train.lm.task import prepare
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress
from tests.programs import needs_gpu_compiler
from tests.tiers import plainly
from tests.train import small
from tests.train.small import (
    TEXT,
    CachedTask,
    InterruptAt,
    assert_same_parameters,
    lines_without_times,
    new_run,
)

pytest.importorskip("matplotlib")

RANK, KEY = 2, jax.random.key(0)
BATCHES = TEXT.train[np.arange(8).reshape(2, 4, 1) * 5 + np.arange(13)].astype(np.int32)
FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "activations": dict(offload="activations"),
    "all": dict(offload="all", policy="dots"),
    "fused": dict(offload="all", fuse_update=True),
}
lm_task = functools.partial(small.lm_task, devices=1, bias=True)


@functools.cache
def first_state():
    return jax.device_get(lm_task().initial_state())


def weights(step):
    """Return the weights of the other run after a step."""
    return jax.tree.map(lambda a: a + np.float32(0.01 * step), first_state().params)


def base_run(path, *losses, best=1):
    """Write a run with a checkpoint for each loss, and return its path."""
    run = new_run(path, lm_task())
    with Checkpoints(run.checkpoints) as checkpoints:
        for step, loss in enumerate(losses, 1):
            run.append({"kind": "step", "step": step} | loss)
            state = first_state().with_params(weights(step))
            checkpoints.save(step, state, score=(float(step == best),))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a run in which the first step is the best one."""
    folder = tmp_path_factory.mktemp("base")
    return base_run(folder / "run", {"validation_loss": 1.0}, {"validation_loss": 2.0})


def adapters_of(params):
    return {name: half["lora"] for name, half in params["blocks"].items() if "lora" in half}


def without_adapters(params):
    blocks = params["blocks"].items()
    kept = {name: {k: a for k, a in half.items() if k != "lora"} for name, half in blocks}
    return {**params, "blocks": kept}


@pytest.fixture(scope="module")
def by_hand(base):
    """Return adapters and losses after steps on kernels to which the products are added."""
    task, params = lm_task(), weights(1)
    adapters = adapters_of(lm_task(lora=RANK, init_from=base).initial_state().params)
    learner, schedule = task.learner, task.schedule
    tx = make_lm_optimizer(schedule, task.config.weight_decay)  # type: ignore[arg-type]

    @jax.jit
    @jax.value_and_grad
    def run(adapters, tokens, key):
        blocks = dict(params["blocks"])
        for name, low in adapters.items():
            product = low["lora_a"] @ low["lora_b"]
            blocks[name] = blocks[name] | {"kernel": blocks[name]["kernel"] + product}
        return lm_loss(learner.graphdef, params | {"blocks": blocks}, tokens, key)

    state, losses = tx.init(adapters), []
    for i, tokens in enumerate(BATCHES):
        loss, grads = run(adapters, tokens, jax.random.fold_in(KEY, i))
        updates, state = tx.update(grads, state, adapters)
        adapters = optax.apply_updates(adapters, updates)
        losses.append(float(loss))
    return adapters, losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMS)
def test_steps_on_frozen_weights(name, base, by_hand):
    task = lm_task(lora=RANK, init_from=base, **FORMS[name])
    state: Any = task.initial_state()
    np.testing.assert_array_equal(adapters_of(state.params)["up"]["lora_b"], 0)
    states = state.opt_state if hasattr(state, "opt_state") else state.model[2:4]
    moments = [leaf.shape for leaf in jax.tree.leaves(states) if leaf.ndim > 1]
    shapes = [leaf.shape for leaf in jax.tree.leaves(adapters_of(state.params))]
    assert sorted(moments) == sorted(2 * shapes)

    step, losses = task.make_step(), []
    for tokens in BATCHES:
        state, loss = step(state, tokens, KEY)
        losses.append(float(loss))
    adapters, want = by_hand
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, adapters_of(state.params), adapters)
    assert np.any(adapters_of(state.params)["out"]["lora_b"])
    jax.tree.map(np.testing.assert_array_equal, without_adapters(state.params), weights(1))
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state.params["blocks"])}
    assert kinds == {"pinned_host" if task.config.offload == "all" else "device"}


@pytest.mark.parametrize("name", plainly("plain", of=["plain", "fused"]))
def test_all_weights_of_another_run(name, base):
    task = lm_task(init_from=base, **FORMS[name])
    state: Any = task.initial_state()
    jax.tree.map(np.testing.assert_array_equal, state.params, weights(1))
    assert task.learner.num_trained == task.learner.num_params


def test_without_validation_the_last_step_is_the_best(tmp_path):
    task: Any = lm_task(init_from=base_run(tmp_path / "run", {}, {}, best=2))
    assert task.source.step == 2


@pytest.mark.exhaustive
def test_resumes_exactly_on_two_devices(base, tmp_path):
    options = FORMS["fused"] | dict(lora=RANK, init_from=base)
    task: Any = CachedTask(lm_task(devices=2, **options))
    whole, parts = (new_run(tmp_path / name, task) for name in ("whole", "parts"))
    fit(task, whole)
    with pytest.raises(KeyboardInterrupt):
        fit(task, parts, InterruptAt(3))
    assert LMConfig.from_json(parts.read_config()["options"]) == task.config
    fit(task, RunDirectory.open(parts.path), Progress(), resume=True)
    assert lines_without_times(parts)[-3:] == lines_without_times(whole)[-3:]
    assert_same_parameters(task, whole, parts)
    with Checkpoints(whole.checkpoints) as checkpoints:
        params = checkpoints.restore(task.shapes(), 5).params
    jax.tree.map(np.testing.assert_array_equal, without_adapters(params), weights(1))


BAD = {
    "no run to begin with": (dict(init_from=None), r"`lora` \(=2\) needs `init_from`"),
    "nowhere": (dict(init_from="nowhere"), r"nowhere: not a run \(no config.json\)"),
    "another model": (dict(width=32), "model options. Use --layers 2 --width 16 --heads 2 --bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_runs_that_do_not_fit(name, base):
    options, message = BAD[name]
    with pytest.raises(TrainError, match=message):
        lm_task(**dict(lora=RANK, init_from=base) | options)


def test_runs_without_weights_to_begin_with(base, tmp_path):
    path = base_run(tmp_path / "run")
    with pytest.raises(TrainError, match="run has no evaluated checkpoint yet"):
        lm_task(init_from=path)
    task = lm_task(lora=RANK, init_from=base)
    run = new_run(tmp_path / "adapters", task)
    with pytest.raises(TrainError, match=f"has adapters. Give the run .*{base}"):
        lm_task(init_from=str(run.path))


def test_a_run_of_another_command_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"options": {"depth": 22}}))
    with pytest.raises(TrainError, match="/run: config.json is not that of effjax train lm"):
        lm_task(init_from=str(tmp_path / "run"))


def test_a_damaged_checkpoint_to_begin_with_is_named(base, tmp_path):
    run = RunDirectory(shutil.copytree(base, tmp_path / "run"))
    task = lm_task(init_from=str(run.path))
    file = run.checkpoints / "1" / "default" / "_METADATA"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TrainError, match=r"/run/checkpoints/1 is damaged \(.*\)$"):
        task.initial_state()


def test_checkpoints_to_begin_with_that_cannot_be_read(base, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.__init__", refused)
    with pytest.raises(TrainError, match=r"/checkpoints: cannot be read \(Permission denied\)"):
        lm_task(init_from=base)


def test_a_run_to_begin_with_is_only_read(base, tmp_path):
    def files(path):
        return {file: file.stat().st_mtime_ns for file in [path, *path.rglob("*")]}

    path = shutil.copytree(base, tmp_path / "run")
    before = files(path)
    lm_task(init_from=str(path)).initial_state()
    assert files(path) == before
    shutil.rmtree(path / "checkpoints")
    before = files(path)
    with pytest.raises(TrainError, match="run has no evaluated checkpoint yet"):
        lm_task(init_from=str(path))
    assert files(path) == before


class StopAtStart(Progress):
    """Ctrl-C before the first step."""

    def start(self, steps, done):
        raise KeyboardInterrupt


def test_resuming_needs_the_other_run_for_step_0_only(base, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "run", lm_task(lora=RANK, init_from="base"))
    monkeypatch.chdir("elsewhere")
    config = LMConfig.from_json(run.read_config()["options"])
    for step_0_is_there in (False, True):
        if step_0_is_there:
            shutil.rmtree(tmp_path / "base")
        task: Any = prepare(config, jax.devices()[:1], TEXT, resume=True)
        with pytest.raises(KeyboardInterrupt):
            fit(task, run, StopAtStart(), resume=True)
        with Checkpoints(run.checkpoints) as checkpoints:
            assert checkpoints.steps == [0]
            params = checkpoints.restore(task.shapes(), 0).params
        jax.tree.map(np.testing.assert_array_equal, without_adapters(params), weights(1))
    shutil.rmtree(run.checkpoints)
    with pytest.raises(TrainError, match=r"/base: not a run \(no config.json\)"):
        fit(task, run, resume=True)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_plan_of_frozen_weights():
    """On the host, read and never written; only what is trained has moments."""
    layers, width, rank = 3, 64, 8
    config = LMConfig(layers=layers, width=width, context=16, lora=rank, **FORMS["fused"])
    found = plan(*lm_training_step(config))
    kernels = layers * (12 * width**2 + 2 * width)
    adapters = layers * rank * (4 + 2 + 5 + 5) * width
    assert found.host.arguments == found.host.aliased == 4 * (kernels + 3 * adapters)
    others = 2 * 256 * width + width
    assert found.device.arguments <= 4 * others + 2**13  # tokens, counts
    written = re.findall(r"= f32\[([\d,]+)\]\S* dynamic-update-slice", found.hlo)
    written = {shape.replace(",1,", ",") for shape in written}
    assert f"{layers},{width},{rank}" in written
    assert not {f"{layers},{width},{3 * width}", f"{layers},{width},{4 * width}"} & written
