"""The check that an optimizer treats each parameter separately, on all of optax."""

import functools
import inspect
import itertools
import re
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from effjax.ops.offload.layers import LayerStack, stream_update
from effjax.ops.offload.mixing import check_per_leaf, find_state_keys
from effjax.ops.offload.optimizer import apply_optimizer
from tests.tiers import vary

SHAPES = {"a": (3, 2), "b": (3,), "c": (4, 4)}
LAYER = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
KEY = jax.random.key(0)
sgd = functools.partial(optax.sgd, 0.1)


def deprecated(make):
    """Suppress the deprecation warning of an optimizer."""

    def quietly():
        with warnings.catch_warnings(action="ignore"):
            return make()

    return quietly


def mask(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


LEARNING_RATE_FIRST = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars
lion nadam nadamw novograd optimistic_gradient_descent optimistic_adam_v2 radam rmsprop rprop
sgd sign_sgd signum sm3 yogi adaptive_grad_clip add_decayed_weights apply_every clip
clip_by_block_rms ema scale scale_by_learning_rate trace
"""
NO_ARGUMENTS = """
centralize identity keep_params_nonnegative scale_by_adadelta scale_by_adam scale_by_adamax
scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients
scale_by_factored_rms scale_by_lion scale_by_novograd scale_by_optimistic_gradient
scale_by_param_block_norm scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss
scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans
"""
CONTRIB_LEARNING_RATE_FIRST = """
acprop ademamix adopt cocob galore madgrad muon schedule_free_adamw schedule_free_sgd
simplified_ademamix
"""
CONTRIB_NO_ARGUMENTS = """
scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob scale_by_galore
scale_by_simplified_ademamix
"""
# Optimizers that treat every parameter separately.
OWN: dict[str, Any] = {
    **{n: functools.partial(getattr(optax, n), 0.1) for n in LEARNING_RATE_FIRST.split()},
    **{n: getattr(optax, n) for n in NO_ARGUMENTS.split()},
    **{
        f"contrib.{n}": functools.partial(getattr(optax.contrib, n), 0.1)
        for n in CONTRIB_LEARNING_RATE_FIRST.split()
    },
    **{f"contrib.{n}": getattr(optax.contrib, n) for n in CONTRIB_NO_ARGUMENTS.split()},
    "add_noise": lambda: optax.add_noise(0.1, 0.5, KEY),
    "chain": lambda: optax.chain(optax.scale_by_adam(), optax.scale(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(sgd(), lambda step: step < 3),
    "conditionally_transform": lambda: optax.conditionally_transform(sgd(), lambda step: step < 3),
    "contrib.sam": lambda: optax.contrib.sam(sgd(), sgd()),
    "contrib.scale_by_madgrad": lambda: optax.contrib.scale_by_madgrad(0.1, 0.9, 1e-6),
    "contrib.scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda params: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), params
            )
        ),
        mask,
    ),
    "contrib.reduce_on_plateau": lambda: optax.chain(sgd(), optax.contrib.reduce_on_plateau()),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(sgd(), 0.1),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(sgd()),
    "freeze": lambda: optax.transforms.freeze({"a": True, "b": False, "c": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": deprecated(
        lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=0.1)
    ),
    "masked": lambda: optax.masked(sgd(), mask),
    "multi_transform": lambda: optax.multi_transform(
        {"adam": optax.adam(0.1), "sgd": sgd()}, lambda p: {**dict.fromkeys(p, "adam"), "b": "sgd"}
    ),
    "named_chain": lambda: optax.named_chain(("adam", optax.scale_by_adam())),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=KEY),
    "optimistic_adam": deprecated(lambda: optax.optimistic_adam(0.1, 1.0)),
    "partition": lambda: optax.partition(
        {"adam": optax.adam(0.1), "sgd": sgd()}, {"a": "adam", "b": "sgd", "c": "adam"}
    ),
    "scale_by_rprop": lambda: optax.scale_by_rprop(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(0.1, 0.0, 9)),
    "selective_transform": lambda: optax.transforms.selective_transform(
        sgd(), freeze_mask={"a": True, "b": False, "c": False}
    ),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(jnp.add, updates, params)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g + p),
    "with_extra_args_support": lambda: optax.with_extra_args_support(sgd()),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
}
NOISY = "add_noise", "noisy_sgd"
# Optimizers that mix parameters, and the mixed value that the error names.
MIXED: dict[str, tuple[Any, str]] = {
    "clip_by_global_norm": (lambda: optax.clip_by_global_norm(1.0), "the update of"),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(sgd(), 3),
        "state.notfinite_count.*skip_nonfinite=True",
    ),
    "contrib.dadapt_adamw": (optax.contrib.dadapt_adamw, r"state.estim_lr"),
    "contrib.dog": (optax.contrib.dog, r"state\[1\].max_dist"),
    "contrib.dowg": (optax.contrib.dowg, r"state\[1\].weighted_sq_norm_grads"),
    "contrib.momo": (optax.contrib.momo, "state.gamma"),
    "contrib.momo_adam": (optax.contrib.momo_adam, "state.gamma"),
    "contrib.mechanize": (lambda: optax.contrib.mechanize(sgd()), "state.r"),
    "contrib.normalize": (optax.contrib.normalize, "the update of"),
    "contrib.prodigy": (optax.contrib.prodigy, "state.estim_lr"),
    "flatten": (lambda: optax.flatten(optax.adam(0.1)), r"state\[0\].mu"),
    "normalize_by_update_norm": (optax.normalize_by_update_norm, "the update of"),
    "polyak_sgd": (optax.polyak_sgd, "the update of"),
    "scale_by_polyak": (optax.scale_by_polyak, "the update of"),
    "scale_by_lbfgs": (optax.scale_by_lbfgs, r"state.weights_memory"),
    "skip_not_finite": (
        lambda: optax.MultiSteps(sgd(), 2, should_skip_update_fn=optax.skip_not_finite),
        "state.mini_step.*skip_nonfinite=True",
    ),
    "skip_large_updates": (
        lambda: optax.MultiSteps(
            sgd(),
            2,
            should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1.0),
        ),
        "state.mini_step",
    ),
}
# Optimizers that need another argument or other parameters.
UNFIT: dict[str, tuple[Any, str]] = {
    "lbfgs": (optax.lbfgs, "value"),
    "contrib.differentially_private_aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, KEY),
        "batch dimension"),
    "contrib.dpsgd": (
        deprecated(lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, 0)), "batch dimension"),
    "contrib.hutchinson_estimator_diag_hessian": (
        optax.contrib.hutchinson_estimator_diag_hessian, "obj_fn"),
    "contrib.sophia": (lambda: optax.contrib.sophia(0.1), "obj_fn"),
    "lookahead": (lambda: optax.lookahead(sgd(), 5, 0.5), "fast"),
    "measure_with_ema": (
        lambda: optax.measure_with_ema(optax.tree.norm, 0.9), "have the structure of the par"),
    "monitor": (
        lambda: optax.monitor({"norm": optax.tree.norm}), "have the structure of the state"),
    "scale_by_backtracking_linesearch": (
        lambda: optax.scale_by_backtracking_linesearch(5), "value"),
    "scale_by_zoom_linesearch": (lambda: optax.scale_by_zoom_linesearch(5), "value"),
}  # fmt: skip


COMMON = "adam", "adafactor", "lamb", "masked", "multi_transform", "noisy_sgd", "MultiSteps"


@pytest.mark.parametrize("name", COMMON)
def test_accepts_common_optimizer(name):
    check_per_leaf(OWN[name](), LAYER)
    assert len(find_state_keys(OWN[name](), LAYER)) == (name in NOISY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in OWN if name not in COMMON])
def test_accepts_per_leaf_optimizer(name):
    check_per_leaf(OWN[name](), LAYER)
    assert len(find_state_keys(OWN[name](), LAYER)) == (name in NOISY)


@vary("name", MIXED)
def test_rejects_optimizer_that_mixes_parameters(name):
    make, where = MIXED[name]
    with pytest.raises(
        ValueError,
        match=r"^`tx` must treat every parameter separately, but .*`clip_norm`",
    ) as error:
        check_per_leaf(make(), LAYER)
    assert re.search(where, str(error.value))


def test_layers_of_the_same_shapes_are_checked_once():
    def count_traces(num_layers):
        calls = []
        update = lambda updates, state, params=None: calls.append(1) or (updates, state)  # noqa: E731
        tx = optax.GradientTransformation(lambda params: (), update)
        stream_update(tx, stacked=False).init([{"w": jnp.ones(3)} for _ in range(num_layers)])
        return len(calls)

    assert count_traces(8) == count_traces(1) > 0


@vary("name", UNFIT)
def test_rejects_optimizer_with_unmet_requirement(name):
    make, missing = UNFIT[name]
    with pytest.raises(ValueError, match=rf"^`tx.* (failed for|must) .*{missing}"):
        check_per_leaf(make(), LAYER)


@pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the lists are of optax 0.2.8")
def test_lists_cover_optax():
    names = set()
    for prefix, module in ("", optax), ("", optax.transforms), ("contrib.", optax.contrib):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                returned = str(inspect.signature(function).return_annotation)
                names |= {prefix + name} if "GradientTransformation" in returned else set()
    assert names <= {*OWN, *MIXED, *UNFIT}


FOR_ONE = {"a": jax.ShapeDtypeStruct((3, 2), jnp.float32)}


@pytest.mark.parametrize(
    ("tx", "where"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            r"the update of params\['a'\]",
        ),
        (optax.contrib.prodigy(), r"the update of params\['a'\] uses state.estim_lr, which also"),
        (optax.masked(optax.clip_by_global_norm(1.0), {"a": True}), "the update of"),
        (optax.masked(optax.clip_by_global_norm(1.0), mask), "the update of"),
    ],
    ids=["clip", "prodigy", "masked", "mask"],
)
def test_rejects_mixing_optimizer_for_single_parameter_layers(tx, where):
    """In a list, such an optimizer would mix the parameters of different layers."""
    with pytest.raises(ValueError, match=rf"treat every layer separately, but {where}.* other lay"):
        check_per_leaf(tx, FOR_ONE)
    own = optax.masked(
        optax.lamb(0.1),
        lambda p: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "a", p),
    )
    check_per_leaf(own, FOR_ONE)  # knows the paths of one layer


@functools.cache
def stacked():
    """Return parameters and gradients of two slices of two layers."""
    keys = iter(jax.random.split(KEY, 2 * len(SHAPES)))
    return [
        {name: jax.random.normal(next(keys), (2, 2, *shape)) for name, shape in SHAPES.items()}
        for _ in range(2)
    ]


def at(tree, *index):
    return jax.tree.map(lambda a: a[index], tree)


# These reduce over a parameter or its gradient, or depend on its rank.
REDUCING = [
    "lamb", "adafactor", "sm3", "contrib.muon", "lars", "fromage", "novograd", "centralize",
    "adaptive_grad_clip", "clip_by_block_rms", "scale_by_distance_over_gradients",
    "scale_by_param_block_norm", "contrib.galore", "masked", "multi_transform", "MultiSteps",
]  # fmt: skip


@vary("name", REDUCING)
def test_update_slice_matches_update_of_each_layer(x64, name):
    tx, (w, grads) = OWN[name](), stacked()
    got = w, jax.vmap(jax.vmap(tx.init))(w)
    step = jax.jit(LayerStack(tx).update_slice)
    step_of_one = jax.jit(functools.partial(apply_optimizer, tx))
    for i in (0, 0, 1, 1):
        new = step(*at(got, i), at(grads, i))
        got = jax.tree.map(lambda a, b, i=i: a.at[i].set(b), got, new)
    for i, j in itertools.product(range(2), range(2)):
        p, g = at(w, i, j), at(grads, i, j)
        s = tx.init(p)
        for _ in range(2):
            p, s = step_of_one(p, s, g)
        chex.assert_trees_all_close(at(got, i, j), (p, s), rtol=1e-9, atol=1e-12)
