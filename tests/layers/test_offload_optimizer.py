"""OffloadOptimizer and OffloadTrainState compared with Flax's optimizers in memory."""

import functools
import re

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
from tests.ops.offload.stacks import kinds
from tests.ops.offload.steps import close
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

Y = np.random.default_rng(2).normal(size=(12, 6)).astype(np.float32)


def adam():
    return optax.adam(optax.linear_schedule(1e-2, 1e-3, 3), eps=1e-3)


def momentum():
    return optax.sgd(0.1, momentum=0.9)  # unlike Adam, it depends on the size of the gradients


def group_of(path):
    """Return the layer of a parameter below `body`; all others are one group."""
    name = jax.tree_util.keystr(path)
    return re.split("kernel|bias", name)[0] if "body" in name else "others"


# Options of the optimizers of effjax, and the same clipping in memory.
CLIPS = {
    "global": ({"clip_norm": 0.1}, optax.clip_by_global_norm(0.1)),
    "previous": ({"clip_norm": 0.1, "clip_by": "previous"}, clip_by_previous_norm(0.1)),
    "layer": ({"clip_norm": 0.1, "clip_by": "layer"}, clip_by_group_norm(0.1, group_of)),
}


# Networks of nnx. `wrap` makes a module of the layers that are in host memory.


class Wrapped(nnx.Module):
    """Host layers between device layers."""

    def __init__(self, wrap):
        rngs = nnx.Rngs(0)
        self.before = nnx.Linear(6, 6, rngs=rngs)
        self.body = wrap([nnx.Linear(6, 12, rngs=rngs), nnx.relu, nnx.Linear(12, 6, rngs=rngs)])
        self.after = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return self.after(self.body(self.before(x)))


class Embedded(nnx.Module):
    """Matrices before and after layers; the user may move them to the host."""

    def __init__(self, wrap):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(rngs.normal((40, 6)))
        self.body = wrap([nnx.Linear(6, 6, rngs=rngs)])
        self.after = nnx.Param(rngs.normal((6, 40)))

    def __call__(self, x):
        table, after = (effjax.to_device(w.get_value()) for w in (self.table, self.after))
        return self.body(x @ after @ table)


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
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


def trained(model, optimizer, run):
    """Return the losses of three steps and the state of the model."""
    losses = [run(model, optimizer, X * (1 + i), Y) for i in range(3)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))


@functools.cache
def in_memory(make, tx):
    model = make(plain)
    return trained(model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.jit(train_step))


def _is_variable(a):
    return isinstance(a, nnx.Variable)


ADAM = adam()


@vary("make", [stack, sequence, Wrapped])
def test_training_matches_in_memory(make):
    model = offloaded(make)
    where = jax.tree.map(lambda a: a.sharding, nnx.state(model))
    optimizer = OffloadOptimizer(model, ADAM)
    close(trained(model, optimizer, offload_jit(train_step)), in_memory(make, ADAM), 1e-5)
    assert where == jax.tree.map(lambda a: a.sharding, nnx.state(model))
    state = jax.tree.map(lambda v: v.get_value(), optimizer.opt_state, is_leaf=_is_variable)
    moments = [a for a in jax.tree.leaves((state.layers, state.stacks)) if a.ndim > 1]
    assert kinds(moments) == {"pinned_host"} and kinds(state.others) <= {"device"}
    assert optimizer.step.get_value() == 3


def train_nnx(options, clip, tx):
    """Return the results of training offloaded and in memory."""
    model = offloaded(Wrapped)
    optimizer = OffloadOptimizer(model, tx, **options)
    got = trained(model, optimizer, offload_jit(train_step))
    if options.get("clip_by") == "previous":
        assert optimizer.grad_norm.get_value() > 0.1
    return got, in_memory(Wrapped, optax.chain(clip, tx))


class LinenModel(nn.Module):
    """Host layers between device layers."""

    body: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="after")(self.body(nn.Dense(6, name="before")(x)))


def linen_trained(model, state, jit):
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


def train_linen(options, clip, tx):
    """Return the results of training offloaded and in memory."""
    layers = [nn.Dense(12), nn.relu, nn.Dense(6)]
    like, model = (
        LinenModel(body) for body in (nn.Sequential(layers), effjax.linen.OffloadModel(layers))
    )
    params = like.init(jax.random.key(0), X)["params"]
    on_host = {**params, "body": effjax.to_host(params["body"])}
    state = TrainState.create(apply_fn=like.apply, params=params, tx=optax.chain(clip, tx))
    losses, want = linen_trained(like, state, jax.jit)
    state = OffloadTrainState.create(apply_fn=model.apply, params=on_host, tx=tx, **options)
    before = state.params
    got, state = linen_trained(model, state, effjax.offload_jit)
    assert state.step == 3 and isinstance(state, TrainState)
    assert kinds(state.params["body"]) == {"pinned_host"}
    assert kinds(state.params["after"]) == {"device"}
    assert all(a.is_deleted() for a in jax.tree.leaves(before))
    assert len(state.opt_state.layers) == 2  # the two modules that have parameters
    assert len(jax.tree.leaves(state.grad_norm)) == (options.get("clip_by") == "previous")
    return (got, state.params), (losses, want.params)


@pytest.mark.parametrize(
    ("train", "clip", "make_tx"),
    [
        (train_linen, "previous", momentum),
        (train_nnx, "layer", momentum),
        (train_linen, "global", adam),
    ],
)
def test_training_matches_optax(train, clip, make_tx):
    got, want = train(*CLIPS[clip], make_tx())
    close(got, want, 1e-5)


@vary("clip", ["global", "layer", "previous"])
def test_huge_arrays_on_the_host_are_updated_by_rows(clip, monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 100)
    options, want = CLIPS[clip]
    model = offloaded(Embedded)
    for name in ("table", "after"):
        variable = getattr(model, name)
        variable.set_value(effjax.to_host(variable.get_value()))
    optimizer = OffloadOptimizer(model, momentum(), **options)
    got = trained(model, optimizer, offload_jit(train_step))
    close(got, in_memory(Embedded, optax.chain(want, momentum())), 1e-5)
    assert kinds([model.table.get_value(), model.after.get_value()]) == {"pinned_host"}


@vary("clip_by", ["layer", "previous"])
def test_clipping_of_a_stack(clip_by):
    model = offloaded(stack)
    optimizer = OffloadOptimizer(model, optax.sgd(1.0), clip_norm=0.5, clip_by=clip_by)
    grads = jax.tree.map(lambda a: jnp.sin(3 * a), nnx.state(model, nnx.Param))
    before, g = (
        jax.tree.map(np.asarray, jax.tree.leaves(tree))
        for tree in (nnx.state(model, nnx.Param), grads)
    )
    optimizer.update(model, grads)
    after = jax.tree.leaves(nnx.state(model, nnx.Param))
    squares = sum(np.sum(np.square(a.reshape(4, -1)), 1) for a in g)  # of each of four layers
    if clip_by == "layer":
        factors = np.minimum(1, 0.5 / np.sqrt(squares))
        assert max(factors) < 1
    else:
        factors = np.ones(4)
        norm = optimizer.grad_norm.get_value()
        np.testing.assert_allclose(norm, np.sqrt(squares.sum()), rtol=1e-5)
    for a, b, d in zip(before, after, g, strict=True):
        want = a - d * factors.reshape(4, *[1] * (d.ndim - 1))
        np.testing.assert_allclose(b, want, rtol=1e-5, atol=1e-6)


@vary("make", [Wrapped, stack])
def test_update_outside_jit(make):
    """The update keeps shardings and donates the parameters."""
    model = offloaded(make)
    optimizer = OffloadOptimizer(model, ADAM)
    gradient = nnx.jit(nnx.value_and_grad(loss_of))

    def run(model, optimizer, x, y):
        loss, grads = gradient(model, x, y)
        before = jax.tree.leaves(nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        after = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert all(a.is_deleted() for a in before)
        assert [a.sharding for a in before] == [a.sharding for a in after]
        return loss

    close(trained(model, optimizer, run), in_memory(make, ADAM), 1e-5)


def test_wrt_selects_parameters():
    wrt = nnx.All(nnx.Param, nnx.PathContains("bias"))
    model, like = offloaded(Wrapped), Wrapped(plain)
    optimizer = OffloadOptimizer(model, adam(), wrt=wrt)
    assert {a.ndim for a in jax.tree.leaves(nnx.state(optimizer, nnx.OptState))} == {0, 1}
    in_plain = nnx.Optimizer(like, adam(), wrt=wrt)

    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(model, x, y)
        optimizer.update(model, grads)
        return loss

    close(trained(model, optimizer, offload_jit(step)), trained(like, in_plain, nnx.jit(step)))


@pytest.mark.exhaustive
def test_sharded_batches(mesh8):
    model = offloaded(Wrapped)
    replicated = NamedSharding(mesh8, P())
    for _, variable in nnx.iter_graph(model):
        if _is_variable(variable):
            a = variable.get_value()
            there = replicated.with_memory_kind(a.sharding.memory_kind)
            variable.set_value(jax.device_put(a, there))
    optimizer = OffloadOptimizer(model, ADAM)
    batches = NamedSharding(mesh8, P("data"))
    step = offload_jit(train_step)

    def run(model, optimizer, x, y):
        whole = (np.concatenate([a, a]) for a in (x, y))
        return step(model, optimizer, *(jax.device_put(a, batches) for a in whole))

    close(trained(model, optimizer, run), in_memory(Wrapped, ADAM), 1e-5)
    assert all(len(a.devices()) == 8 for a in jax.tree.leaves(nnx.state(optimizer.opt_state)))


def test_offload_jit_without_updates():
    model = offloaded(Wrapped)
    got = offload_jit(lambda model, x: model(x), donate=False)(model, X)
    close(got, nnx.jit(lambda model, x: model(x))(Wrapped(plain), X), 1e-5)
    close(offload_jit(lambda model, x: model(x))(model, x=X), got)


def test_a_restored_run_continues_without_another_compilation():
    model, count = offloaded(Wrapped), []
    optimizer = OffloadOptimizer(model, adam())

    @offload_jit
    def step(model, optimizer, x):
        count.append(1)
        train_step(model, optimizer, x, Y)

    assert step(model, optimizer, X) is None and step.__name__ == "step"
    saved = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state((model, optimizer))))
    other = offloaded(Wrapped)
    other_optimizer = OffloadOptimizer(other, adam())
    here = nnx.to_pure_dict(nnx.state((other, other_optimizer)))
    restored = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), saved, here)
    nnx.update((other, other_optimizer), restored)
    step(model, optimizer, 2 * X)
    assert len(count) == 1
    step(other, other_optimizer, 2 * X)
    close(nnx.state(other), nnx.state(model))


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
    with pytest.raises(ValueError, match=r"`clip_norm` \(=0\)"):
        OffloadOptimizer(model, adam(), clip_norm=0)
    with pytest.raises(ValueError, match=r"`clip_by` \(='layer'\) needs `clip_norm`"):
        OffloadOptimizer(model, adam(), clip_by="layer")
    with pytest.raises(ValueError, match="must treat every parameter separately"):
        OffloadOptimizer(model, optax.chain(optax.clip_by_global_norm(0.1), adam()))
    with pytest.raises(ValueError, match=r"must be in host memory.*Call to_host\(\)"):
        OffloadOptimizer(Wrapped(OffloadModel), adam())
    with pytest.raises(ValueError, match=r"`wrt` \(='no such'\)"):
        OffloadOptimizer(model, adam(), wrt="no such")
    optimizer = OffloadOptimizer(model, adam())
    grads = nnx.state(model, nnx.Param)
    for wrong in (
        nnx.state(model, nnx.PathContains("bias")),
        jax.tree.map(lambda g: g[:1], grads),
    ):
        with pytest.raises(ValueError, match="`grads`"):
            optimizer.update(model, wrong)
    with pytest.raises(TypeError, match="`grads` must be a State"):
        optimizer.update(model, jnp.ones(3))
    with pytest.raises(TypeError, match=r"`model` must be a flax\.nnx\.Module"):
        optimizer.update(grads, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes nnx modules first"):
        offload_jit(lambda x, model: None)(3, model)
    with pytest.raises(TypeError, match="would lose the updates of other modules"):
        offload_jit(lambda model, x, optimizer: None)(model, X, optimizer=optimizer)


# States of linen.


def test_train_state_updates_huge_arrays_by_rows(monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 100)
    table = jax.random.normal(jax.random.key(0), (40, 6))
    params, tx = {"embed": {"table": table}, "scale": jnp.ones(6)}, momentum()
    grads = jax.tree.map(lambda a: jnp.sin(3 * a), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    want = optax.apply_updates(params, updates)
    on_host = [{**tree, "embed": effjax.to_host(tree["embed"])} for tree in (params, grads)]
    state = OffloadTrainState.create(apply_fn=None, params=on_host[0], tx=tx)
    update = effjax.offload_jit(lambda state, grads: state.apply_gradients(grads=grads))
    got = update(state, on_host[1]).params
    assert kinds(got["embed"]) == {"pinned_host"}
    close(effjax.to_device(got), want)


def test_train_state_updates_stack_layer_by_layer():
    """Lamb computes norms of the arrays of each layer, not of the stack."""
    model, tx = LinenModel(effjax.linen.OffloadModel(nn.Dense(6), num_layers=3)), optax.lamb(1e-2)
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    grads = jax.tree.map(lambda a: jnp.sin(3 * a), params)
    on_host = [{**tree, "body": effjax.to_host(tree["body"])} for tree in (params, grads)]
    state = OffloadTrainState.create(
        apply_fn=None, params=on_host[0], tx=tx, stacks=["body/layers"]
    )
    update = effjax.offload_jit(lambda state, grads: state.apply_gradients(grads=grads))
    got = update(state, on_host[1]).params["body"]

    @jax.jit
    @jax.vmap
    def update_layer(w, g):
        return optax.apply_updates(w, tx.update(g, tx.init(w), w)[0])

    close(effjax.to_device(got), update_layer(params["body"], grads["body"]))


def test_train_state_rejects_invalid_arguments():
    params = {"body": {"layers": {"kernel": jnp.ones((3, 6, 6))}}}
    on_host = effjax.to_host(params)
    state = OffloadTrainState.create(apply_fn=None, params=on_host, tx=adam())
    for error, match, options in (
        (ValueError, "`stacks` .* params have no 'layers'", dict(stacks=["layers"])),
        (TypeError, "`stacks` must be a sequence", dict(stacks="layers")),
        (TypeError, "`stacks` must be a sequence", dict(stacks=[3])),
        (TypeError, "`params` must be nested dicts of arrays", dict(params=[params])),
        (TypeError, "`apply_fn` must be a function", dict(apply_fn=params)),
        (ValueError, "must be in host memory", dict(params=params, stacks=["body/layers"])),
    ):
        with pytest.raises(error, match=match):
            OffloadTrainState.create(
                **dict(apply_fn=None, params=state.params, tx=adam()) | options
            )
    with pytest.raises(ValueError, match="`grads` must have the structure of `params`"):
        state.apply_gradients(grads=params["body"])


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
