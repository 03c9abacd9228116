from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.nnx import BatchNorm, convert_batch_norm, revert_batch_norm

X = np.random.default_rng(0).normal(3, 2, (6, 4)).astype(np.float32)


class BatchNormAct(nnx.BatchNorm):
    """A subclass with an activation, as in timm."""

    def __call__(self, x, **kwargs):
        return nnx.relu(super().__call__(x, **kwargs))


class SyncBatchNormAct(BatchNorm):
    def __call__(self, x, **kwargs):
        return nnx.relu(super().__call__(x, **kwargs))


class Model(nnx.Module):
    """A model with a BatchNorm in every kind of container; `first` and `again` are shared."""

    def __init__(self, rngs):
        def norm(**options):
            return nnx.BatchNorm(4, rngs=rngs, **options)

        metadata = dict(out_sharding=None, note="kept")
        self.first: Any = norm(scale_metadata=metadata, momentum=0.7)
        self.again = self.first
        self.list: Any = nnx.List([norm(use_running_average=True), nnx.LayerNorm(4, rngs=rngs)])
        self.dict = nnx.Dict(inner=norm(use_scale=False, use_bias=False))
        self.plain = nnx.data((norm(), {"deep": [norm()]}))
        self.sequential = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), norm())
        self.others = nnx.List([
            nnx.GroupNorm(4, num_groups=2, rngs=rngs),
            nnx.InstanceNorm(4, rngs=rngs),
            nnx.RMSNorm(4, rngs=rngs),
        ])  # fmt: skip

    def __call__(self, x):
        x = self.again(self.first(x))
        for norm in (*self.list, self.dict.inner, self.plain[0], self.plain[1]["deep"][0]):
            x = norm(x)
        return self.sequential(x)


def classes(model):
    return {path: type(module) for path, module in nnx.iter_modules(model)}


def test_converts_exactly_the_batch_norms():
    model = Model(nnx.Rngs(0))
    before = classes(model)
    assert convert_batch_norm(model, axis_name="data", axis_index_groups=[[0, 1], [2, 3]]) is model
    expected = {p: BatchNorm if c is nnx.BatchNorm else c for p, c in before.items()}
    assert classes(model) == expected and list(expected.values()).count(BatchNorm) == 6
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BatchNorm):
            assert module.axis_name == "data"
            assert module.axis_index_groups == ((0, 1), (2, 3))  # hashable, as nnx.jit needs
    hash(nnx.graphdef(model))


def test_preserves_references_values_metadata_and_modes():
    model = Model(nnx.Rngs(0))
    graph = list(nnx.iter_graph(model))
    before = [(path, id(value)) for path, value in graph if isinstance(value, nnx.Variable)]
    metadata = model.first.scale.get_metadata()
    state = nnx.to_pure_dict(nnx.state(model))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    shared = model.first
    convert_batch_norm(model)
    graph = list(nnx.iter_graph(model))
    assert [(path, id(v)) for path, v in graph if isinstance(v, nnx.Variable)] == before
    assert nnx.to_pure_dict(nnx.state(model)).keys() == state.keys()
    assert model.first is model.again is shared
    assert model.first.scale.get_metadata() == metadata and metadata["note"] == "kept"
    assert model.first.momentum == 0.7 and model.first.use_running_average is False
    assert model.list[0].use_running_average is True
    assert model.first.axis_name is None  # not given, so each layer's own

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.square(m(X)).mean())(model)
        optimizer.update(model, grads)

    old = model.first.scale[...]
    step(model, optimizer)
    assert (model.first.scale[...] != old).any() and model.first is model.again


def test_output_is_unchanged():
    model, converted = Model(nnx.Rngs(0)), convert_batch_norm(Model(nnx.Rngs(0)))
    run = nnx.jit(lambda model: model(X))
    np.testing.assert_allclose(run(converted), run(model), atol=1e-5)
    np.testing.assert_allclose(converted.first.mean[...], model.first.mean[...], rtol=1e-5)
    model.eval()
    converted.eval()
    np.testing.assert_allclose(run(converted), run(model), atol=1e-5)


def test_converts_a_bare_batch_norm():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`stats`"):
        convert_batch_norm(norm, "data", stats="fast")  # type: ignore[arg-type]
    assert type(norm) is nnx.BatchNorm  # an error leaves it unchanged
    assert convert_batch_norm(norm, "data", unbiased_running_var=True, stats="gather") is norm
    assert type(norm) is BatchNorm and norm.axis_name == "data"
    assert norm.unbiased_running_var and norm.stats == "gather"
    graphdef, state = nnx.split(norm)
    assert type(nnx.merge(graphdef, state)) is BatchNorm


def test_skips_subclasses_with_a_warning():
    """A subclass with an activation must not lose it (timm #1254)."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        BatchNormAct(4, rngs=rngs),
        SyncBatchNormAct(4, rngs=rngs),
        BatchNorm(4, activation="relu", track_running_stats=False, rngs=rngs),
    )
    with pytest.warns(UserWarning, match=r"skips layers\.0: BatchNormAct"):
        convert_batch_norm(model, "data")
    kept, own, fused = model.layers
    assert type(kept) is BatchNormAct and kept.axis_name is None
    assert type(own) is SyncBatchNormAct and own.axis_name == "data"
    assert fused.activation == "relu" and fused.axis_name == "data"
    assert not fused.track_running_stats


def test_error_for_unmapped_axis():
    model = convert_batch_norm(Model(nnx.Rngs(0)), "data")
    with pytest.raises(ValueError, match=r"`axis_name` \(='data'\) is not mapped.*model.eval"):
        model(X)
    model.eval()
    model(X)


def test_axis_is_kept_or_removed():
    model = convert_batch_norm(Model(nnx.Rngs(0)), "data", 4)
    convert_batch_norm(model)
    assert model.first.axis_name == "data" and model.first.axis_index_groups == 4
    convert_batch_norm(model, axis_index_groups=None)
    assert model.first.axis_name == "data" and model.first.axis_index_groups is None
    convert_batch_norm(model, "data", 4)
    convert_batch_norm(model, axis_name=None)
    assert model.first.axis_name is None and model.first.axis_index_groups is None
    model(X)


def test_revert():
    model = revert_batch_norm(convert_batch_norm(Model(nnx.Rngs(0)), "data", stats="gather"))
    assert classes(model) == classes(Model(nnx.Rngs(0)))
    assert model.first.axis_name == "data"
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.BatchNorm):
            layer.axis_name = None
    assert nnx.graphdef(model) == nnx.graphdef(Model(nnx.Rngs(0)))
    reverted = revert_batch_norm(BatchNorm(4, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(reverted(X), nnx.BatchNorm(4, rngs=nnx.Rngs(0))(X), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(activation="relu"),
        dict(momentum=None),
        dict(axis=(0, 1)),
        dict(axis_name="data", axis_index_groups=4),
    ],
    ids=lambda options: list(options)[-1],
)
def test_revert_rejects_options_that_flax_lacks(options):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(BatchNorm(4, rngs=rngs), BatchNorm(4, **options, rngs=rngs))
    with pytest.raises(ValueError, match=r"of layers.1 is not supported by flax.nnx"):
        revert_batch_norm(model)
    assert type(model.layers[0]) is BatchNorm


def test_rejects_what_is_not_a_module():
    with pytest.raises(TypeError, match="must be a flax.nnx.Module, not a dict"):
        convert_batch_norm({})  # type: ignore[type-var]
