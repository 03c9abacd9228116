"""Errors for invalid arguments of the offload operators."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import effjax
from effjax.ops.offload import OffloadState
from tests.ops.offload.stacks import KEY, inputs, layer, loss, params
from tests.tiers import vary

W = effjax.to_host(params())
LIST = [jax.tree.map(lambda a: a[0], params())]
TX = optax.adam(1e-3)


def scan(stacked_params=W, x=None, layer=layer, **options):
    return effjax.offload_scan(layer, stacked_params, inputs() if x is None else x, **options)


def sequential(params=LIST, x=None, **options):
    x = inputs() if x is None else x
    return effjax.offload_sequential([layer], params, x, **{"params_in": "device", **options})


def step_init(layers=W, others=None, model_state=(), **options):
    init, _ = effjax.offload_train_step(layer, layer, layer, TX, **options)
    return init(layers, {"a": jnp.ones(2)} if others is None else others, model_state)


def step(state=None, key=None):
    state = OffloadState(W, {}, (), ()) if state is None else state
    return effjax.offload_train_step(layer, layer, layer, TX).step(state, inputs(), key)


def update(grads=W, state=(), params=W, **options):
    return effjax.stream_update(TX).update(grads, state, params, **options)


def host_init(keys, **options):
    return effjax.host_init(jax.random.normal, keys, **options)


KEYS = jax.random.split(KEY, 2)
ON_DEVICE = W | {"c": params()["c"]}
THREE_OF_FOUR = W | {"c": effjax.to_host(params()["c"][:3])}


@pytest.mark.parametrize(
    ("function", "name", "arguments"),
    [
        (effjax.to_host, "tree", {"tree": [1.0]}),
        (effjax.to_device, "tree", {"tree": np.array(["x"])}),
        (host_init, "keys", {"keys": KEY}),
        (host_init, "shardings", {"keys": KEYS, "shardings": {"a": 3}}),
        (scan, "stacked_params", {"stacked_params": {"a": "x"}}),
        (scan, "stacked_params", {"stacked_params": effjax.to_host(jnp.ones((0, 3)))}),
        (scan, r"stacked_params` .*: stacked_params\['c'\]", {"stacked_params": ON_DEVICE}),
        (scan, "stacked_params` .* same number", {"stacked_params": THREE_OF_FOUR}),
        (scan, "x", {"x": [1.0]}),
        (scan, r"layer\(.* structure", {"layer": lambda w, x, key: (x, x)}),
        (scan, r"layer\(.* type", {"layer": lambda w, x, key: x @ w["a"]}),
        (scan, r"layer` .*\(x, aux\)", {"has_aux": True}),
        (scan, "trainable", {"trainable": {"a": True, "b": False}}),
        (scan, r"num_slices` \(=3\)", {"num_slices": 3}),
        (scan, r"resident_slices` \(=5\)", {"resident_slices": 5}),
        (scan, r"num_microbatches` \(=3\)", {"num_microbatches": 3}),
        (scan, "key", {"key": KEYS}),
        (scan, "num_microbatches", {"num_microbatches": 2.0}),
        (scan, "prefetch", {"prefetch": -1}),
        (scan, "params_in", {"params_in": "gpu"}),
        (scan, "activations_in", {"activations_in": "gpu"}),
        (scan, "grads_in", {"grads_in": "gpu"}),
        (scan, "compute_dtype", {"compute_dtype": "int8"}),
        (sequential, "params", {"params": ["x"]}),
        (sequential, "params", {"params_in": "host"}),
        (sequential, r"layers` \(of length 1\) and `params` \(of length 2\)", {"params": LIST * 2}),
        (sequential, r"num_slices` \(=2\)", {"num_slices": 2}),
        (sequential, "x", {"x": [1.0]}),
        (sequential, "key", {"key": 3}),
        (step_init, "layers", {"layers": {"a": "x"}}),
        (step_init, "others", {"others": [1.0]}),
        (step_init, "clip_norm", {"clip_norm": -1.0}),
        (step_init, "loss_scale", {"loss_scale": 0.5}),
        (step, "key", {"key": KEYS}),
        (update, "grads", {"grads": {"a": W["a"]}}),
        (update, "state", {"state": {"a": W["a"]}}),
        (update, "params", {"params": {}}),
        (update, "clip_norm", {"clip_norm": 0.0}),
    ],
)
def test_error_names_the_argument(function, name, arguments):
    with pytest.raises((TypeError, ValueError), match=f"^`{name}"):
        function(**arguments)


def in_sequence(w, x):
    layers = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(2)]
    return effjax.offload_sequential([layer] * 2, layers, x, params_in="device")


def in_scan(w, x):
    return effjax.offload_scan(layer, effjax.to_host(w), x)


@pytest.mark.parametrize(("run", "name"), [(in_scan, "scan"), (in_sequence, "sequential")])
def test_rejects_second_derivatives(run, name):
    w, x = params(), inputs()
    gradient = jax.grad(lambda w: loss(run(w, x)))
    with pytest.raises(NotImplementedError, match=f"offload_{name} supports first derivatives"):
        jax.eval_shape(jax.grad(lambda w: sum(map(jnp.sum, gradient(w).values()))), w)


def test_rejects_scan3():
    """Its loops move host arrays to the device, ignore `reverse`, and have no gradient."""
    if not hasattr(jax.config, "jax_scan3"):
        pytest.skip(f"jax {jax.__version__} has no jax_scan3")
    jax.config.update("jax_scan3", True)
    try:
        with pytest.raises(NotImplementedError, match="does not support jax_scan3"):
            jax.eval_shape(in_scan, params(), inputs())
    finally:
        jax.config.update("jax_scan3", False)


def gradients(w, x):
    return jax.value_and_grad(lambda w: loss(in_scan(w, x)))(w)


def updated(w, x):
    stream = effjax.stream_update(TX)
    return stream.update(w, stream.init(w), w)


def trained(w, x):
    head = lambda others, x, batch, key: loss(x * others["scale"])  # noqa: E731
    init, step = effjax.offload_train_step(lambda others, batch, key: batch, layer, head, TX)
    return step(init(effjax.to_host(w), {"scale": w["c"][0, 0]}), x)


@vary("run", [trained, gradients, updated])
def test_numpy_arrays(run):
    """NumPy arrays that jit closes over reach the operators as NumPy arrays."""
    arrays = params(), inputs()
    numpy = jax.tree.map(np.asarray, arrays)
    got, want = jax.jit(lambda: run(*numpy))(), jax.jit(run)(*arrays)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
