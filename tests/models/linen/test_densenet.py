from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors

from effjax.models.linen import DenseNet

OPTIONS: dict[str, Any] = dict(
    growth_rate=2, block_config=(1, 1), num_init_features=4, num_classes=3, small_inputs=True
)  # fmt: skip
X = np.random.default_rng(0).normal(size=(4, 4, 4, 3)).astype(np.float32)


def shapes(**options):
    return jax.eval_shape(DenseNet(**OPTIONS | options).init, jax.random.key(0), X)


def test_the_same_variables_in_every_form():
    want = shapes(efficient=False)
    assert shapes() == want
    model = DenseNet(**OPTIONS, axis_name="absent")  # initialization needs no axis

    def train_init(key):
        return model.init(key, X, train=True)

    assert jax.eval_shape(train_init, jax.random.key(0)) == want
    assert set(want["params"]) == {
        "stem_conv", "blocks_0", "transitions_0", "blocks_1", "final_norm", "classifier"
    }  # fmt: skip


def test_initialization_leaves_running_stats():
    variables = jax.jit(lambda k: DenseNet(**OPTIONS).init(k, X, train=True))(jax.random.key(0))
    for path, value in jax.tree_util.tree_leaves_with_path(variables["batch_stats"]):
        np.testing.assert_array_equal(value, float(path[-1].key == "var"))


def test_tabulate():
    """One row a module, and what each costs."""
    model = DenseNet(**OPTIONS)
    table = model.tabulate(
        jax.random.key(0), X, train=True, show_repeated=True, compute_flops=True,
        console_kwargs=dict(width=200),
    )  # fmt: skip
    paths = [line.split("│")[1].strip() for line in table.splitlines() if line.count("│") > 1]
    paths = [path for path in paths if path[:1].isalpha()]
    assert len(paths) == len(set(paths)) == 18 and "blocks_1/layers_0/norm2" in paths


@pytest.mark.parametrize("efficient", [True, False])
def test_running_stats_must_be_mutable_in_training(efficient):
    model, variables = DenseNet(**OPTIONS, efficient=efficient), shapes()
    with pytest.raises(errors.ModifyScopeVariableError, match="batch_stats"):
        jax.eval_shape(lambda v: model.apply(v, X, train=True), variables)
    jax.eval_shape(lambda v: model.apply(v, X), variables)


def test_apply_without_running_stats_begins_them():
    variables = shapes()

    def apply(variables):
        return DenseNet(**OPTIONS).apply(variables, X, train=True, mutable=["batch_stats"])[1]

    new = jax.eval_shape(apply, {"params": variables["params"]})
    assert new == {"batch_stats": variables["batch_stats"]}


def test_dropout_needs_its_key():
    model = DenseNet(**OPTIONS, drop_rate=0.5)
    with pytest.raises(errors.InvalidRngError, match="dropout"):
        jax.eval_shape(lambda v: model.apply(v, X, True, mutable=["batch_stats"]), shapes())


def test_half_precision():
    model = DenseNet(**OPTIONS, dtype=jnp.bfloat16)
    logits, new = jax.eval_shape(
        lambda v: model.apply(v, X, True, mutable=["batch_stats"]), shapes()
    )
    leaves = jax.tree.leaves((logits, new, shapes(dtype=jnp.bfloat16)))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    "options, x, match",
    [
        (dict(block_config=()), X, "`block_config` is empty"),
        (dict(compression=2), X, r"`compression` \(=2\)"),
        ({}, X[0], r"not \(4, 4, 3\)"),
        (dict(block_config=(1, 1, 1, 1)), X, "too small"),
    ],
)
def test_errors(options, x, match):
    with pytest.raises(ValueError, match=match):
        DenseNet(**OPTIONS | options).init(jax.random.key(0), x)
