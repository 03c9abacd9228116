"""The options of training steps of a stack and of a list, compared with training in memory."""

import functools

import jax
import numpy as np
import optax
import pytest

import effjax
from effjax import offload_jit, offload_train_step, to_host
from effjax.ops._common.platform import trace_for_platform
from tests.ops.offload import reference
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    assert_close,
    assert_equal_bits,
    kinds,
    to_numpy,
)
from tests.ops.offload.steps import (
    ADAMW,
    APART,
    FROZEN,
    MICROBATCHES,
    SECOND_IS_NAN,
    TOKENS,
    is_trained,
    make_batches,
    make_functions,
    make_options,
    make_params,
    model_state,
    others,
    train_in_memory,
)
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")
GOOD = 1.0, 1.0
OF_STACKS = {"prefetch", "resident_slices"}


@functools.cache
def expected(form, tx=ADAMW, factors=GOOD, key=KEY, **options):
    return train_in_memory(form, make_batches(TOKENS, factors), tx, key, **options)


def train(form, tx=ADAMW, factors=GOOD, key=KEY, **options):
    """Return the losses, and the result of the last step."""
    options = make_options(form, **options)
    if form == "list":
        options = {name: options[name] for name in options.keys() - OF_STACKS}
    init, step = offload_train_step(*make_functions(form, **options), tx, **options)
    w, other = make_params(form), others()
    w = w if options.get("params_in") == "device" else to_host(w)
    other = to_host(other) if options.get("others_in") == "host" else other
    state = init(w, other, model_state() if options.get("has_state") else ())
    step, losses = offload_jit(step), []
    for i, batch in enumerate(make_batches(TOKENS, factors)):
        before = state
        result = step(state, batch, None if key is None else jax.random.fold_in(key, i))
        assert all(a.is_deleted() for a in jax.tree.leaves(before))
        state = result.state
        losses.append(result.loss)
    return losses, result


def check(form, tolerance=1e-9, **options):
    """Compare with training in memory, and check the memory of the state."""
    losses, (state, _, aux, head_aux, grad_norm, finite) = train(form, **options)
    of_results = {"tx", "factors", "key", *reference.Options._fields}
    want = expected(form, **{k: v for k, v in options.items() if k in of_results})
    got = losses, state.layers, state.others, state.model_state
    assert_close(got, want[:4], tolerance)
    got = aux, head_aux, grad_norm, state.grad_norm
    assert finite == np.isfinite(grad_norm)
    assert_close(got, (want.aux, want.head_aux, want.grad_norm, want.last_norm), tolerance)
    if "loss_scale" in options:
        assert state.loss_scale.scale == want.loss_scales[-1]
    layers_in = "device" if options.get("params_in") == "device" else "pinned_host"
    others_in = "pinned_host" if options.get("others_in") == "host" else "device"
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim > (form == "stack")]
    assert kinds(state.layers) == kinds(moments) == {layers_in}
    assert kinds(state.others) == {others_in}
    assert kinds(state.model_state) <= {"device"}
    return state


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
        "factors": SECOND_IS_NAN, "others_in": "host", "tx": optax.MultiSteps(SGD, 2),
    },
}  # fmt: skip


@vary("name", COMBINATIONS)
@pytest.mark.parametrize("form", ["stack", "list"])
def test_combined_options(form, name):
    state = check(form, **COMBINATIONS[name])
    if "trainable" in COMBINATIONS[name]:
        start = make_params(form)
        frozen, _ = reference.partition(start, lambda *args: not is_trained(*args))
        new, _ = reference.partition(state.layers, lambda *args: not is_trained(*args))
        jax.tree.map(np.testing.assert_array_equal, new, frozen)
        np.testing.assert_array_equal(state.others["e"], others()["e"])


def is_frozen(path, leaf):
    return jax.tree_util.keystr(path).startswith((".layers[0]", ".layers['b']", ".others['e']"))


def label(params):
    labels = {True: "frozen", False: "trained"}
    return jax.tree_util.tree_map_with_path(lambda *a: labels[is_frozen(*a)], params)


def label_whole(form):
    layers = [make_params(form), others()]
    return label(effjax.OffloadParams(*layers))


@vary(
    ("form", "labels"),
    [("stack", lambda form: label), ("list", label_whole)],
    ids=["stack-function", "list-tree"],
)
def test_labels_have_the_paths_of_all_parameters(form, labels):
    """A label by path freezes the same parameters as `trainable`."""
    tx = optax.partition({"trained": ADAMW, "frozen": optax.set_to_zero()}, labels(form))
    losses, (state, *_) = train(form, tx, key=None)
    prefix = jax.tree_util.GetAttrKey("layers")
    want = expected(
        form,
        key=None,
        trainable=lambda path, leaf: (
            not is_frozen((prefix, *path), leaf) and (form == "stack" or is_trained(path, leaf))
        ),
        trainable_others=FROZEN["trainable_others"],
    )
    assert_close((losses, state.layers, state.others), want[:3], 1e-9)


@pytest.mark.parametrize(
    ("tx", "part"),
    [
        (optax.masked(SGD, lambda p: jax.tree.map(lambda _: False, p)), "a mask that is nowhere"),
        (optax.partition({"a": SGD, "b": SGD}, effjax.OffloadParams("b", "b")), "the label 'a'"),
    ],
    ids=["mask", "label"],
)
def test_rejects_labels_that_select_nothing(tx, part):
    init, _ = offload_train_step(*make_functions("stack"), tx)
    with pytest.raises(ValueError, match=rf"`tx` has {part}.*\.layers\['a'\].*\.others\['u'\]"):
        init(to_host(make_params("stack")), others())


@vary("options", [{}, APART], ids=["fused", "apart"])
def test_loss_reaches_the_optimizer(options):
    """The steps become smaller as in optax when the loss does not decrease."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    tx, factors = optax.chain(ADAMW, plateau), (1.0, 1.0, 1.0)
    losses, (state, *_) = train("stack", tx, factors, None, **options)
    model = {"layers": reference.unstack(make_params("stack"), LAYERS), "others": others()}
    functions, batches = make_functions("stack"), make_batches(TOKENS, factors)
    run = (functions[0], [functions[1]] * LAYERS, functions[2])

    @jax.jit
    def step(model, opt_state, batch):
        compute = lambda m: reference.compute_loss(*run, m, (), batch, None, reference.Options())[0]  # noqa: E731
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


@pytest.mark.parametrize("name", sorted(OF_STACKS))
def test_a_list_has_no_options_of_stacks(name):
    functions = make_functions("list")
    with pytest.raises(ValueError, match=rf"`{name}` .=1. must be None for a list of layers"):
        offload_train_step(*functions, ADAMW, **{name: 1})


# One option at a time, but for those of COMBINATIONS. The other cases of `vary` run exhaustively.
CLIPPED = {"clip_norm": 0.05}
OPTIONS = {
    "params on the device": {"params_in": "device"},
    "defaults": {},
    "apart": APART,
    "no prefetch": {"prefetch": 0},
    "saved": {**MICROBATCHES, "policy": POLICIES["dots"]},
    "activations on the device": {**MICROBATCHES, "activations": "device", "prefetch": 3},
    "only activations on the host": {"params_in": "device", "activations": "host"},
    "others on the host": {"others_in": "host"},
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
        "key": None, "tx": optax.MultiSteps(ADAMW, 2), "factors": (1.0, 2.0, 3.0)
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


MUON = optax.contrib.muon(1e-2)


@pytest.mark.exhaustive
def test_muon(optimized):
    """The products of Muon add in the same order in both memories, as XLA optimizes them."""
    check("stack", 1e-12, tx=MUON)
    with jax.enable_x64(False):
        got, want = (train("stack", MUON, params_in=memory) for memory in ("host", "device"))
    assert got[0] == want[0] and got[0][0].dtype == "float32"
    assert_equal_bits(to_numpy(got[1].state), to_numpy(want[1].state))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "name"), [("stack", "fused"), ("list", "apart")])
def test_loops_of_tpus(form, name):
    with trace_for_platform("tpu"):
        check(form, **COMBINATIONS[name])
