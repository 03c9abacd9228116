"""The options of training steps of a stack and of a list, compared with training in memory."""

import functools

import jax
import optax
import pytest

import effjax
from effjax import offload_train_step
from effjax.ops._common.platform import trace_for_platform
from tests.ops.offload import reference, steps
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    assert_close,
    assert_equal_bits,
    to_numpy,
)
from tests.ops.offload.steps import (
    ADAMW,
    APART,
    FROZEN,
    MICROBATCHES,
    OTHERS_ON_HOST,
    SECOND_IS_NAN,
    is_trained,
    make_training,
)  # fmt: skip
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def expected(form, has_key=True, **options):
    args, options = make_training(form, **options)
    return reference.train(*args, key=KEY if has_key else None, **options)


def check(form, tolerance=1e-9, has_key=True, **options):
    of_results = {"tx", "factors", *reference.Options._fields}
    want = expected(form, has_key, **{n: a for n, a in options.items() if n in of_results})
    args, options = make_training(form, **options)
    key = KEY if has_key else None
    steps.check(*args, key=key, want=want, tolerance=tolerance, **options)


SGD = optax.sgd(0.5)
STATE = {"has_state": True, "head_has_aux": True}
COMBINATIONS = {
    "fused": {
        **STATE, **FROZEN, **MICROBATCHES, "has_aux": True, "weighted_loss": True,
        "num_slices": 2, "resident_slices": 1, "policy": POLICIES["everything"],
        "clip_norm": 0.1, "clip_by": "previous",
    },
    "apart": {
        **STATE, **FROZEN, **MICROBATCHES, "fuse_update": False, "loss_scale": 64.0,
        "clip_norm": 0.05, "clip_by": "layer", "factors": SECOND_IS_NAN,
    },
    "accumulated, apart, skipped": {
        **MICROBATCHES, "fuse_update": False, "skip_nonfinite": True, "clip_norm": 0.1,
        "factors": SECOND_IS_NAN, **OTHERS_ON_HOST, "tx": optax.MultiSteps(SGD, 2),
    },
}  # fmt: skip


@vary("name", COMBINATIONS)
@pytest.mark.parametrize("form", ["stack", "list"])
def test_combined_options(form, name):
    check(form, **COMBINATIONS[name])


# One option at a time, but for those of COMBINATIONS. The other cases of `vary` run exhaustively.
CLIPPED = {"clip_norm": 0.05}
OPTIONS = {
    "params on the device": {"params_in": "device"},
    "defaults": {},
    "apart": APART,
    "no prefetch": {"prefetch": 0},
    "saved": {**MICROBATCHES, "policy": POLICIES["dots"]},
    "activations on the device": {**MICROBATCHES, "activations_in": "device", "prefetch": 3},
    "only activations on the host": {"params_in": "device", "activations_in": "host"},
    "others on the host": OTHERS_ON_HOST,
    "clipped": {**CLIPPED, **APART},
    "scaled, clipped by previous": {
        **APART, **CLIPPED, "loss_scale": 64.0, "clip_by": "previous", "factors": SECOND_IS_NAN
    },
    "weighted": {
        **APART, "num_microbatches": 4, "head_has_aux": True, "weighted_loss": True,
        "loss_scale": 8.0,
    },
    "frozen others": {"trainable_others": False} | APART,
    "accumulated, no key": {
        "has_key": False, "tx": optax.MultiSteps(ADAMW, 2), "factors": (1.0, 2.0, 3.0)
    },
    "noise": {"tx": optax.chain(ADAMW, optax.add_noise(0.1, 0.5, 3)), "num_slices": 2},
}  # fmt: skip
# Those that a list runs by its own code.
LIST_OPTIONS = "defaults", "params on the device", "clipped", "noise"


@vary(
    ("form", "name"),
    [*(("stack", name) for name in OPTIONS), *(("list", name) for name in LIST_OPTIONS)],
)
def test_option(form, name):
    check(form, **OPTIONS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "name"), [("stack", "fused"), ("list", "apart")])
def test_loops_of_tpus(form, name):
    with trace_for_platform("tpu"):
        check(form, **COMBINATIONS[name])


@pytest.mark.exhaustive
def test_muon(optimized):
    """The products of Muon add in the same order in both memories, as XLA optimizes them."""
    muon = optax.contrib.muon(1e-2)
    check("stack", 1e-12, tx=muon)
    with jax.enable_x64(False):
        args, _ = make_training("stack", tx=muon)
        got, want = (steps.train(*args, key=KEY, params_in=memory) for memory in ("host", "device"))
    assert got[0] == want[0] and got[0][0].dtype == "float32"
    assert_equal_bits(to_numpy(got[1].state), to_numpy(want[1].state))


# Labels and losses for optax.


def is_frozen(path, leaf):
    return jax.tree_util.keystr(path).startswith((".layers[0]", ".layers['b']", ".others['e']"))


def label(params):
    labels = {True: "frozen", False: "trained"}
    return jax.tree_util.tree_map_with_path(lambda *a: labels[is_frozen(*a)], params)


@vary(("form", "whole"), [("stack", False), ("list", True)])
def test_labels_have_the_paths_of_all_parameters(form, whole):
    """A label by path freezes the same parameters as `trainable`."""
    args, options = make_training(form)
    labels = label(effjax.OffloadParams(*args[4:6])) if whole else label
    tx = optax.partition({"trained": ADAMW, "frozen": optax.set_to_zero()}, labels)
    losses, (state, *_) = steps.train(*args[:3], tx, *args[4:], **options)
    prefix = jax.tree_util.GetAttrKey("layers")

    def trainable(path, leaf):
        is_labeled = not is_frozen((prefix, *path), leaf)
        return is_labeled and (form == "stack" or is_trained(path, leaf))

    frozen = {"trainable": trainable, "trainable_others": FROZEN["trainable_others"]}
    want = expected(form, has_key=False, **frozen)
    assert_close((losses, state.layers, state.others), want[:3], 1e-9)


@vary("options", [{}, APART], ids=["fused", "apart"])
def test_loss_reaches_the_optimizer(options):
    """The steps become smaller as in optax when the loss does not decrease."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    args, _ = make_training("stack", tx=optax.chain(ADAMW, plateau), factors=(1.0, 1.0, 1.0))
    losses, (state, *_) = steps.train(*args, **options)
    embed, layer, head, tx, layers, others, batches = args
    model = {"layers": reference.unstack(layers, LAYERS), "others": others}

    @jax.jit
    def step(model, opt_state, batch):
        def compute(model):
            run = embed, [layer] * LAYERS, head, model
            return reference.compute_loss(*run, (), batch, None, reference.Options())[0]

        loss, grads = jax.value_and_grad(compute)(model)
        updates, opt_state = tx.update(grads, opt_state, model, value=loss)
        return optax.apply_updates(model, updates), opt_state, loss

    opt_state, want = tx.init(model), []
    for batch in batches:
        model, opt_state, loss = step(model, opt_state, batch)
        want.append(loss)
    got = losses, reference.unstack(state.layers, LAYERS), state.others
    assert_close(got, (want, model["layers"], model["others"]), 1e-6)
    assert opt_state[1].scale < 1


@pytest.mark.parametrize("name", sorted(steps.OF_STACKS))
def test_a_list_has_no_options_of_stacks(name):
    args, _ = make_training("list")
    with pytest.raises(ValueError, match=rf"`{name}`"):
        offload_train_step(*args[:4], **{name: 1})
