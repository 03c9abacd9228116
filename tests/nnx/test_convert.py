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
    """The same of effjax's class."""


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


def norms(model):
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.BatchNorm)]


def variables(model):
    return [(p, id(v)) for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]


def test_converts_exactly_the_batch_norms():
    model = Model(nnx.Rngs(0))
    before = classes(model)
    assert convert_batch_norm(model, axis_name="data", axis_index_groups=[[0, 1], [2, 3]]) is model
    expected = {p: BatchNorm if c is nnx.BatchNorm else c for p, c in before.items()}
    assert classes(model) == expected and list(expected.values()).count(BatchNorm) == 6
    groups = ((0, 1), (2, 3))  # hashable, as nnx.jit needs
    assert {(norm.axis_name, norm.axis_index_groups) for norm in norms(model)} == {("data", groups)}
    hash(nnx.graphdef(model))


def test_preserves_references_values_metadata_and_modes():
    model = Model(nnx.Rngs(0))
    before, shared, old = variables(model), model.first, model.first.scale[...]
    metadata, names = shared.scale.get_metadata(), nnx.to_pure_dict(nnx.state(model)).keys()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    convert_batch_norm(model)
    assert variables(model) == before and nnx.to_pure_dict(nnx.state(model)).keys() == names
    assert shared.scale.get_metadata() == metadata and metadata["note"] == "kept"
    assert shared.momentum == 0.7 and shared.use_running_average is False
    assert model.list[0].use_running_average is True
    assert shared.axis_name is None  # not given, so each layer's own

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.square(m(X)).mean())(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    assert (model.first.scale[...] != old).any() and model.first is model.again is shared


def test_output_is_unchanged():
    model, converted = Model(nnx.Rngs(0)), convert_batch_norm(Model(nnx.Rngs(0)))
    run = nnx.jit(lambda model: model(X))
    np.testing.assert_allclose(run(converted), run(model), atol=1e-5)
    np.testing.assert_allclose(converted.first.mean[...], model.first.mean[...], rtol=1e-5)
    convert_batch_norm(converted, "data")
    with pytest.raises(ValueError, match=r"`axis_name` \(='data'\) is not mapped.*model.eval"):
        converted(X)
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
    assert type(nnx.merge(*nnx.split(norm))) is BatchNorm


def test_skips_subclasses_with_a_warning():
    """A subclass with an activation must not lose it (timm #1254)."""
    rngs = nnx.Rngs(0)
    kept, own = BatchNormAct(4, rngs=rngs), SyncBatchNormAct(4, rngs=rngs)
    fused = BatchNorm(4, activation="relu", track_running_stats=False, rngs=rngs)
    with pytest.warns(UserWarning, match=r"skips layers\.0: BatchNormAct"):
        convert_batch_norm(nnx.Sequential(kept, own, fused), "data")
    assert type(kept) is BatchNormAct and kept.axis_name is None
    assert type(own) is SyncBatchNormAct and own.axis_name == fused.axis_name == "data"
    assert fused.activation == "relu" and not fused.track_running_stats


def test_axis_is_kept_or_removed():
    model: Any = nnx.Sequential(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    for options, want in (
        (dict(axis_name="data", axis_index_groups=4), ("data", 4)),
        ({}, ("data", 4)),
        (dict(axis_index_groups=None), ("data", None)),
        (dict(axis_name="data", axis_index_groups=4), ("data", 4)),
        (dict(axis_name=None), (None, None)),
    ):
        (norm,) = norms(convert_batch_norm(model, **options))
        assert (norm.axis_name, norm.axis_index_groups) == want
    model(X)


def test_revert():
    model = revert_batch_norm(convert_batch_norm(Model(nnx.Rngs(0)), "data", stats="gather"))
    assert model.first.axis_name == "data"
    for norm in norms(model):
        norm.axis_name = None
    assert nnx.graphdef(model) == nnx.graphdef(Model(nnx.Rngs(0)))  # of the same classes
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
    with pytest.raises(ValueError, match=r"of layers.1 is not supported"):
        revert_batch_norm(model)
    assert type(model.layers[0]) is BatchNorm


def test_rejects_what_is_not_a_module():
    with pytest.raises(TypeError, match="a dict"):
        convert_batch_norm({})  # type: ignore[type-var]
