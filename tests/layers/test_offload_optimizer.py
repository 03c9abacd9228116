"""OffloadOptimizer and OffloadTrainState compared with Flax's optimizers in memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.linen import OffloadTrainState
from effjax.memory import plan
from effjax.nnx import OffloadModel, OffloadOptimizer, offload_jit
from effjax.ops.offload import row_update
from effjax.optimizers import set_hyperparams
from tests.layers.offload_linen import X
from tests.layers.offload_nnx import Block
from tests.ops.offload.reference import clip_by_group_norm, clip_by_previous_norm
from tests.ops.offload.stacks import assert_close, kinds
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

Y = np.random.default_rng(2).normal(size=(12, 6)).astype(np.float32)
ADAM = optax.adam(optax.linear_schedule(1e-2, 1e-3, 3), eps=1e-3)
MOMENTUM = optax.sgd(0.1, momentum=0.9)  # unlike Adam, it depends on the size of the gradients


def group_of(path):
    """Return the layer of a parameter below `body`; all others are one group."""
    name = jax.tree_util.keystr(path)
    return re.split("kernel|bias", name)[0] if "body" in name else "others"


# Clipping in memory by `clip_by` of the optimizers of effjax.
CLIPS = {
    None: optax.identity(),
    "global": optax.clip_by_global_norm(0.1),
    "previous": clip_by_previous_norm(0.1),
    "layer": clip_by_group_norm(0.1, group_of),
}


def clip_options(clip_by):
    return {"clip_norm": 0.1, "clip_by": clip_by} if clip_by else {}


# Networks of nnx. `wrap` makes a module of the layers that are in host memory.


class Wrapped(nnx.Module):
    """Host layers between matrices; the user may move them to the host."""

    def __init__(self, wrap):
        rngs = nnx.Rngs(0)
        self.before = nnx.Param(rngs.normal((6, 40)))
        self.body = wrap([nnx.Linear(40, 3, rngs=rngs), nnx.relu, nnx.Linear(3, 40, rngs=rngs)])
        self.after = nnx.Param(rngs.normal((40, 6)))

    def __call__(self, x):
        before, after = (effjax.to_device(w.get_value()) for w in (self.before, self.after))
        return self.body(x @ before) @ after


def sequence(wrap):
    """Return different layers with batch statistics and dropout."""
    rngs = nnx.Rngs(0)
    return wrap([
        nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu,
        nnx.Dropout(0.3, rngs=rngs), nnx.Linear(8, 6, rngs=rngs),
    ])  # fmt: skip


class Looped(nnx.Module):
    """A stack of equal layers in device memory."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers)


def stack(wrap):
    make = nnx.vmap(lambda rngs: Block(rngs, rate=0.0), in_axes=0, out_axes=0)
    return (Looped if wrap is plain else wrap)(make(nnx.Rngs(0).split(4)))


def plain(layers):
    return nnx.Sequential(*layers)


def offloaded(make):
    model = make(OffloadModel)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, OffloadModel):
            module.to_host()
    return model


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def train_step(model, optimizer, x, y):
    selected = nnx.DiffState(0, optimizer.wrt)
    loss, grads = nnx.value_and_grad(loss_of, argnums=selected)(model, x, y)
    optimizer.update(model, grads)
    return loss


def trained(model, optimizer, run):
    """Return the losses of three steps and the state of the model."""
    losses = [run(model, optimizer, X * (1 + i), Y) for i in range(3)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))


def check_training(make, tx, clip=None, model=None, run=None, wrt=nnx.Param, **options):
    """Check that training is that in memory and moves no array; return the optimizer."""
    model = offloaded(make) if model is None else model
    where = jax.tree.map(lambda a: a.sharding, nnx.state(model))
    optimizer = OffloadOptimizer(model, tx, wrt=wrt, **clip_options(clip), **options)
    got = trained(model, optimizer, run or offload_jit(train_step))
    like = make(plain)
    in_memory = nnx.Optimizer(like, optax.chain(CLIPS[clip], tx), wrt=wrt)
    assert_close(got, trained(like, in_memory, nnx.jit(train_step)), 1e-5)
    assert where == jax.tree.map(lambda a: a.sharding, nnx.state(model))
    return optimizer


def _is_variable(a):
    return isinstance(a, nnx.Variable)


@vary(
    ("make", "tx", "clip"),
    [
        (stack, ADAM, None),
        (sequence, ADAM, None),
        (Wrapped, ADAM, None),
        (Wrapped, MOMENTUM, "layer"),
        (stack, MOMENTUM, "previous"),
    ],
)
def test_training_matches_in_memory(make, tx, clip):
    optimizer = check_training(make, tx, clip)
    state = jax.tree.map(lambda v: v.get_value(), optimizer.opt_state, is_leaf=_is_variable)
    moments = [a for a in jax.tree.leaves((state.layers, state.stacks)) if a.ndim > 1]
    assert kinds(moments) == {"pinned_host"} and kinds(state.others) <= {"device"}
    assert optimizer.step.get_value() == 3
    assert clip != "previous" or optimizer.grad_norm.get_value() > 0.1


@vary(
    ("clip", "in_rows"), [("layer", True), ("global", True), ("previous", True), ("layer", False)]
)
def test_huge_arrays_on_the_host_are_updated_alone(clip, in_rows, monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 100)
    model = offloaded(Wrapped)
    for variable in model.before, model.after:
        variable.set_value(effjax.to_host(variable.get_value()))
        assert row_update.has_huge_array(variable.get_value())
    paths = []

    def update_rows(path, leaf):
        paths.append(jax.tree_util.keystr(path))
        return True

    check_training(Wrapped, MOMENTUM, clip, model, update_rows=update_rows if in_rows else None)
    assert {"['before']", "['after']", "['body']['layers'][0]['kernel']"} <= {*paths} or not in_rows


@vary("make", [Wrapped, stack])
def test_update_outside_jit(make):
    """The update keeps shardings and donates the parameters."""
    gradient = nnx.jit(nnx.value_and_grad(loss_of))

    def run(model, optimizer, x, y):
        loss, grads = gradient(model, x, y)
        before = jax.tree.leaves(nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        assert all(a.is_deleted() for a in before)
        return loss

    check_training(make, ADAM, run=run)


def test_wrt_selects_parameters():
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("kernel")))
    optimizer = check_training(Wrapped, ADAM, wrt=wrt)
    arrays = [a for a in jax.tree.leaves(nnx.state(optimizer, nnx.OptState)) if a.ndim]
    assert len(arrays) == 2 * 4  # moments of two matrices and two biases


@pytest.mark.exhaustive
def test_sharded_batches(mesh8):
    model = offloaded(Wrapped)
    replicated, batches = NamedSharding(mesh8, P()), NamedSharding(mesh8, P("data"))
    for variable in filter(_is_variable, (value for _, value in nnx.iter_graph(model))):
        a = variable.get_value()
        there = replicated.with_memory_kind(a.sharding.memory_kind)
        variable.set_value(jax.device_put(a, there))
    step = offload_jit(train_step)

    def run(model, optimizer, x, y):
        whole = (np.concatenate([a, a]) for a in (x, y))
        return step(model, optimizer, *(jax.device_put(a, batches) for a in whole))

    optimizer = check_training(Wrapped, ADAM, model=model, run=run)
    assert all(len(a.devices()) == 8 for a in jax.tree.leaves(nnx.state(optimizer.opt_state)))


def test_offload_jit_without_updates():
    model, run = offloaded(Wrapped), lambda model, x: model(x)
    got = offload_jit(run, donate=False)(model, X)
    assert_close(got, nnx.jit(run)(Wrapped(plain), X), 1e-5)
    assert_close(offload_jit(run)(model, x=X), got)


def test_a_restored_run_continues_without_another_compilation():
    def start():
        model = offloaded(Wrapped)
        return model, OffloadOptimizer(model, ADAM)

    @offload_jit
    def step(model, optimizer, x):
        count.append(1)
        train_step(model, optimizer, x, Y)

    first, second, count = start(), start(), []
    assert step(*first, X) is None and step.__name__ == "step"
    saved = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(first)))
    here = nnx.to_pure_dict(nnx.state(second))
    nnx.update(second, jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), saved, here))
    step(*first, 2 * X)
    assert len(count) == 1
    step(*second, 2 * X)
    assert_close(nnx.state(second[0]), nnx.state(first[0]))


def test_the_loss_reaches_the_optimizer_of_nnx():
    """`reduce_on_plateau` gets `value`, and injected hyperparameters can be set."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    tx = optax.chain(optax.inject_hyperparams(optax.sgd)(0.1), plateau)
    model = OffloadModel([nnx.Linear(2, 2, rngs=nnx.Rngs(0))]).to_host()
    optimizer = OffloadOptimizer(model, tx)
    before = effjax.to_device(nnx.to_pure_dict(nnx.state(model)))
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    with pytest.raises(TypeError, match="`value` must be the loss, which `tx` needs"):
        optimizer.update(model, grads)
    optimizer.opt_state = set_hyperparams(optimizer.opt_state, learning_rate=0.25)
    for _ in range(3):  # with scales of 1/2, 1/4 and 1/8
        optimizer.update(model, grads, value=jnp.float32(1))
    after = effjax.to_device(nnx.to_pure_dict(nnx.state(model)))
    moved = jax.tree.map(lambda a, b: a - b, before, after)
    jax.tree.map(lambda a: np.testing.assert_allclose(a, 0.25 * 0.875, rtol=1e-6), moved)


def test_rejects_invalid_arguments():
    model = offloaded(Wrapped)
    mixing = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
    valid: Any = dict(model=model, tx=ADAM)
    for match, options in (
        (r"`clip_norm` \(=0\)", dict(clip_norm=0)),
        ("`clip_by` .* needs `clip_norm`", dict(clip_by="layer")),
        ("must treat every parameter separately", dict(tx=mixing)),
        (r"Call to_host\(\)", dict(model=Wrapped(OffloadModel))),
        ("`wrt`", dict(wrt="no such")),
        (r"`update_rows` must select .*kernel", dict(update_rows=lambda path, leaf: False)),
    ):
        with pytest.raises(ValueError, match=match):
            OffloadOptimizer(**valid | options)
    optimizer, grads = OffloadOptimizer(model, ADAM), nnx.state(model, nnx.Param)
    for error, match, *args in (
        (ValueError, "`grads`", model, nnx.state(model, nnx.PathContains("bias"))),
        (ValueError, "`grads`", model, jax.tree.map(lambda g: g[:1], grads)),
        (TypeError, "`grads` must be a State", model, jnp.ones(3)),
        (TypeError, "`model`", grads, model),
    ):
        with pytest.raises(error, match=match):
            optimizer.update(*args)
    with pytest.raises(TypeError, match="takes nnx modules first"):
        offload_jit(lambda x, model: None)(3, model)
    with pytest.raises(TypeError, match="would lose the updates of other modules"):
        offload_jit(lambda model, x, optimizer: None)(model, X, optimizer=optimizer)


# States of linen.


class LinenModel(nn.Module):
    """Host layers between device layers."""

    body: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="after")(self.body(nn.Dense(6, name="before")(x)))


def trained_state(model, state, jit):
    """Return the losses of three steps and the last state."""

    @jit
    def step(state, x, y):
        def loss_of(params):
            return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for i in range(3):
        state, loss = step(state, X * (1 + i), Y)
        losses.append(loss)
    return losses, state


def body_on_host(tree):
    return {**tree, "body": effjax.to_host(tree["body"])}


@pytest.mark.parametrize(
    ("clip", "tx", "options"),
    [
        ("previous", MOMENTUM, {}),
        ("global", ADAM, {"update_rows": lambda path, leaf: path[0].key == "body"}),
    ],
)
def test_train_state_matches_in_memory(clip, tx, options, monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 20)  # the kernels of the body are huge arrays
    layers = [nn.Dense(12), nn.relu, nn.Dense(6)]
    like, model = (
        LinenModel(body) for body in (nn.Sequential(layers), effjax.linen.OffloadModel(layers))
    )
    params = like.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=like.apply, params=params, tx=optax.chain(CLIPS[clip], tx))
    want, in_memory = trained_state(like, state, jax.jit)
    before = OffloadTrainState.create(
        apply_fn=model.apply, params=body_on_host(params), tx=tx, **clip_options(clip), **options
    )
    got, state = trained_state(model, before, effjax.offload_jit)
    assert_close((got, state.params), (want, in_memory.params), 1e-5)
    assert state.step == 3 and isinstance(state, TrainState)
    assert kinds(state.params["body"]) == {"pinned_host"}
    assert kinds(state.params["after"]) == {"device"}
    assert all(a.is_deleted() for a in jax.tree.leaves(before.params))
    assert len(state.opt_state.layers) == 2  # the two modules that have parameters
    assert len(jax.tree.leaves(state.grad_norm)) == (clip == "previous")


@pytest.mark.parametrize(
    ("tx", "clip"), [(optax.lamb(1e-2), None), (optax.sgd(1.0), "layer")], ids=["lamb", "clipped"]
)
def test_train_state_updates_stack_layer_by_layer(tx, clip):
    """Lamb and clipping compute norms of each layer, not of the stack."""
    model = LinenModel(effjax.linen.OffloadModel(nn.Dense(6), num_layers=3))
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    grads = jax.tree.map(lambda a: jnp.sin(3 * a), params)
    state = OffloadTrainState.create(
        apply_fn=None, params=body_on_host(params), tx=tx, stacks=["body/layers"],
        **clip_options(clip),
    )  # fmt: skip
    update = effjax.offload_jit(lambda state, grads: state.apply_gradients(grads=grads))
    got = update(state, body_on_host(grads)).params["body"]
    clipped = optax.chain(optax.clip_by_global_norm(0.1), tx) if clip else tx

    @jax.jit
    @jax.vmap
    def update_layer(w, g):
        return optax.apply_updates(w, clipped.update(g, clipped.init(w), w)[0])

    assert_close(effjax.to_device(got), update_layer(params["body"], grads["body"]))


def test_train_state_rejects_invalid_arguments():
    params = {"body": {"layers": {"kernel": jnp.ones((3, 6, 6))}}}
    valid: Any = dict(apply_fn=None, params=effjax.to_host(params), tx=ADAM)
    for error, match, options in (
        (ValueError, "`stacks` .* params have no 'layers'", dict(stacks=["layers"])),
        (TypeError, "`stacks` must be a sequence", dict(stacks="layers")),
        (TypeError, "`stacks` must be a sequence", dict(stacks=[3])),
        (TypeError, "`params` must be nested dicts of arrays", dict(params=[params])),
        (TypeError, "`apply_fn`", dict(apply_fn=params)),
        (ValueError, "must be in host memory", dict(params=params, stacks=["body/layers"])),
        (ValueError, "`update_rows` must select", dict(update_rows=lambda path, leaf: False)),
    ):
        with pytest.raises(error, match=match):
            OffloadTrainState.create(**valid | options)
    with pytest.raises(ValueError, match="`grads`"):
        OffloadTrainState.create(**valid).apply_gradients(grads=params["body"])


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_device_memory_does_not_grow_with_depth():
    # The layers have 1024 x 1024 parameters, 4 MiB each.

    def planned(count):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(1024, 1024, rngs=rngs) for _ in range(count)]
        model = OffloadModel(layers).to_host()
        optimizer = OffloadOptimizer(model, optax.adam(1e-3))
        return plan(offload_jit(train_step), model, optimizer, x, x)

    x = jnp.ones((64, 1024))
    few, many = planned(3), planned(6)
    assert many.peak_device_bytes <= 1.02 * few.peak_device_bytes
    assert many.peak_device_bytes <= 12 * 4 * 2**20
    assert many.host.arguments >= 3 * 6 * 4 * 2**20
