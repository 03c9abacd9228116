"""The check that an optimizer treats each parameter separately, on all of optax."""

import functools
import inspect
import itertools
import warnings

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
MASK = {"a": True, "b": False, "c": True}
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
TWO = {"adam": ADAM, "sgd": SGD}, {"a": "adam", "b": "sgd", "c": "adam"}


def find_optimizers():
    """Return the functions of optax that return transformations of gradients."""
    found = {}
    for prefix, module in ("", optax), ("", optax.transforms), ("contrib.", optax.contrib):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                returned = str(inspect.signature(function).return_annotation)
                if "GradientTransformation" in returned:
                    found[prefix + name] = function
    return found


OPTIMIZERS = find_optimizers() | {  # these have no annotation
    "contrib.dog": optax.contrib.dog,
    "contrib.dowg": optax.contrib.dowg,
    "contrib.hutchinson_estimator_diag_hessian": optax.contrib.hutchinson_estimator_diag_hessian,
    "monitor": optax.monitor,
}
# Arguments other than 0.1 for those without a default and for learning rates.
ARGUMENTS = {
    "add_noise": (0.1, 0.5, KEY),
    "chain": (optax.scale_by_adam(), optax.scale(0.1)),
    "conditionally_mask": (SGD, lambda step: step < 3),
    "conditionally_transform": (SGD, lambda step: step < 3),
    "flatten": (ADAM,),
    "freeze": (MASK,),
    "lookahead": (SGD, 5, 0.5),
    "masked": (SGD, MASK),
    "measure_with_ema": (optax.tree.norm, 0.9),
    "monitor": ({"norm": optax.tree.norm},),
    "multi_transform": TWO,
    "named_chain": (("adam", optax.scale_by_adam()),),
    "partition": TWO,
    "scale_by_schedule": (optax.linear_schedule(0.1, 0.0, 9),),
    "snapshot": ("norm", optax.tree.norm),
    "stateless": (lambda updates, params: jax.tree.map(jnp.add, updates, params),),
    "stateless_with_tree_map": (lambda g, p: g + p,),
    "with_extra_args_support": (SGD,),
    "apply_if_finite": (SGD, 3),
    "scale_by_backtracking_linesearch": (5,),
    "scale_by_zoom_linesearch": (5,),
    "contrib.dpsgd": (0.1, 1.0, 0.1, 0),
    "contrib.mechanize": (SGD,),
    "contrib.sam": (SGD, SGD),
    "contrib.schedule_free": (SGD, 0.1),
    "contrib.split_real_and_imaginary": (SGD,),
}
OTHERS = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        learning_rate=0.1
    ),
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=KEY),
    "selective_transform": lambda: optax.transforms.selective_transform(SGD, freeze_mask=MASK),
    "skip_not_finite": lambda: optax.MultiSteps(
        SGD, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "contrib.scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda params: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), params
            )
        ),
        MASK,
    ),
}
# Optimizers that mix parameters, and the mixed value that the error names.
MIXED = {
    "clip_by_global_norm": "the update of",
    "apply_if_finite": "state.notfinite_count",
    "contrib.dadapt_adamw": "state.estim_lr",
    "contrib.dog": r"state\[1\].max_dist",
    "contrib.dowg": r"state\[1\].weighted_sq_norm_grads",
    "contrib.momo": "state.gamma",
    "contrib.momo_adam": "state.gamma",
    "contrib.mechanize": "state.r",
    "contrib.normalize": "the update of",
    "contrib.prodigy": "state.estim_lr",
    "flatten": r"state\[0\].mu",
    "normalize_by_update_norm": "the update of",
    "polyak_sgd": "the update of",
    "scale_by_polyak": "the update of",
    "scale_by_lbfgs": "state.weights_memory",
    "skip_not_finite": "state.mini_step.*skip_nonfinite=True",
}
# Optimizers that need another argument or other parameters, and what the error names.
UNFIT = {
    "lbfgs": "value",
    "contrib.differentially_private_aggregate": "batch dimension",
    "contrib.dpsgd": "batch dimension",
    "contrib.hutchinson_estimator_diag_hessian": "obj_fn",
    "contrib.sophia": "obj_fn",
    "lookahead": "fast",
    "measure_with_ema": "the parameters",
    "monitor": "the state",
    "scale_by_backtracking_linesearch": "value",
    "scale_by_zoom_linesearch": "value",
}


def make(name):
    """Return an optimizer of optax, or one of `OTHERS`."""
    with warnings.catch_warnings(action="ignore"):  # some are deprecated
        if name in OTHERS:
            return OTHERS[name]()
        function = OPTIMIZERS[name]
        if name in ARGUMENTS:
            return function(*ARGUMENTS[name])
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.default is p.empty or p.name == "learning_rate"]
        return function(**{n: 0.1 for n in names if n != "kwargs"})


COMMON = "adam", "adafactor", "lamb", "masked", "multi_transform", "noisy_sgd", "MultiSteps"


SEPARATE = [name for name in (OPTIMIZERS | OTHERS) if name not in {*MIXED, *UNFIT}]


def check_accepted(name):
    check_per_leaf(make(name), LAYER)
    assert len(find_state_keys(make(name), LAYER)) == (name in ("add_noise", "noisy_sgd"))


@pytest.mark.parametrize("name", COMMON)
def test_accepts_common_optimizer(name):
    check_accepted(name)


@pytest.mark.exhaustive
@pytest.mark.skipif(optax.__version__ != "0.2.8", reason="the tables are of optax 0.2.8")
@pytest.mark.parametrize("name", [name for name in SEPARATE if name not in COMMON])
def test_accepts_optimizer(name):
    check_accepted(name)


@vary("name", MIXED)
def test_rejects_optimizer_that_mixes_parameters(name):
    with pytest.raises(ValueError, match=rf"^`tx` must treat every parameter .*{MIXED[name]}"):
        check_per_leaf(make(name), LAYER)


@vary("name", UNFIT)
def test_rejects_optimizer_with_unmet_requirement(name):
    with pytest.raises(ValueError, match=rf"^`tx.*{UNFIT[name]}"):
        check_per_leaf(make(name), LAYER)


def test_layers_of_the_same_shapes_are_checked_once():
    def count_traces(num_layers):
        calls = []
        update = lambda updates, state, params=None: calls.append(1) or (updates, state)  # noqa: E731
        tx = optax.GradientTransformation(lambda params: (), update)
        stream_update(tx, stacked=False).init([{"w": jnp.ones(3)} for _ in range(num_layers)])
        return len(calls)

    assert count_traces(8) == count_traces(1) > 0


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), SGD),
        optax.contrib.prodigy(),
        optax.masked(optax.clip_by_global_norm(1.0), lambda p: jax.tree.map(lambda _: True, p)),
    ],
    ids=["clip", "prodigy", "masked"],
)
def test_rejects_mixing_optimizer_for_single_parameter_layers(tx):
    """In a list, such an optimizer would mix the parameters of different layers."""
    with pytest.raises(ValueError, match="every layer separately"):
        check_per_leaf(tx, {"a": LAYER["a"]})


def test_accepts_mask_by_path_for_single_parameter_layers():
    by_path = lambda p: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "a", p)  # noqa: E731
    check_per_leaf(optax.masked(optax.lamb(0.1), by_path), {"a": LAYER["a"]})


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
    tx, (w, grads) = make(name), stacked()
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
