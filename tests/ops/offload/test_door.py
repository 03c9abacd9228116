"""What the functions of offloading are called with by mistake: an error names the argument."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import effjax
from effjax.ops.offload import OffloadState
from tests.ops.offload.stacks import KEY, inputs, layer, loss, params

NO_FUNCTION = [None, 3, "tanh", [layer]]
NO_ARRAY = [None, 3, "x", [1.0, 2.0], {"a": "x"}, np.array(["x"]), object()]
NO_STACK = [*NO_ARRAY, {}, effjax.to_host(jnp.ones(())), effjax.to_host(jnp.ones((0, 3)))]
NO_KEY = [3, "key", [0, 1], jnp.ones(2), jax.random.split(KEY, 2)]
NO_COUNT = [0, 2.0, True, "2", [2]]
NO_NUMBER_FROM_0 = [-1, 1.0, True, "2", None]
NO_FLAG = [None, 1, "yes", jnp.ones(())]
NO_DTYPE = [int, "int8", jnp.int32, jnp.complex64, "floot", 3, [float], jnp.ones(2)]
NO_PLACE = ["gpu", None, 1, ["host"]]
NO_CHOICE = [None, 1, "a", {"z": True}, lambda path, leaf: 1]
NO_POLICY = ["dots_saveable", 3, True, [], jax.checkpoint_policies.save_only_these_names]
NO_OPTIMIZER = [None, 3, "adam", optax.adam, []]
NO_NORM = [0, -1.0, float("nan"), "a", [1.0]]

W = effjax.to_host(params())
OPTIONS = {
    "key": NO_KEY,
    "num_slices": NO_COUNT,
    "num_microbatches": [None, *NO_COUNT],
    "params_in": NO_PLACE,
    "activations": NO_PLACE,
    "compute_dtype": NO_DTYPE,
    "has_aux": NO_FLAG,
    "policy": NO_POLICY,
}
MORE = {
    "grads": [a for a in NO_PLACE if a is not None],
    "prefetch": NO_NUMBER_FROM_0,
    "resident_slices": NO_NUMBER_FROM_0,
}
TX = optax.adam(1e-3)
STEP: dict[str, Any] = {"embed": layer, "layer": layer, "head": layer, "tx": TX}
STATE = OffloadState(W, {}, (), ())


def init_step(**arguments):
    return effjax.offload_train_step(**STEP).init(**arguments)


def init_step_of(**options):
    return effjax.offload_train_step(**STEP, **options).init(W, {"a": jnp.ones(2)})


def step(**arguments):
    return effjax.offload_train_step(**STEP).step(**arguments)


def init_update(**arguments):
    return effjax.stream_update(TX).init(**arguments)


def update(**arguments):
    return effjax.stream_update(TX).update(**arguments)


# A function: arguments that are right, and for each what is wrong.
CALLS: dict[Any, tuple[dict, dict]] = {
    effjax.to_host: ({}, {"tree": NO_ARRAY}),
    effjax.to_device: ({}, {"tree": NO_ARRAY}),
    effjax.host_init: (
        {"init_fn": jax.random.normal, "keys": jax.random.split(KEY, 2)},
        {
            "init_fn": NO_FUNCTION,
            "keys": [None, *NO_KEY[:-1], KEY, jax.random.PRNGKey(0), jax.random.split(KEY, 2)[:0]],
            "shardings": [3, "host", ["host"], {"a": 3}],
        },
    ),
    effjax.offload_jit: ({"fun": layer}, {"fun": NO_FUNCTION, "donate": NO_FLAG}),
    effjax.offload_scan: (
        {"layer": layer, "stacked_params": W, "x": inputs()},
        {
            "layer": NO_FUNCTION,
            "stacked_params": NO_STACK,
            "x": NO_ARRAY,
            "trainable": NO_CHOICE,
            **OPTIONS,
            **MORE,
        },
    ),
    effjax.offload_sequential: (
        {"layers": [layer], "params": [jax.tree.map(lambda a: a[0], params())], "x": inputs()},
        {
            "layers": [None, 3, "layers", layer, [None], ["tanh"], [3], []],
            "params": [None, 3, "x", W, params()["a"], [None, "x"], ["x"], [3]],
            "x": NO_ARRAY,
            **OPTIONS,
        },
    ),
    effjax.offload_train_step: (
        STEP,
        {
            "embed": NO_FUNCTION,
            "layer": [None, 3, "tanh", [], [layer, None], ["tanh"]],
            "head": NO_FUNCTION,
            "tx": NO_OPTIMIZER,
            "fuse_update": NO_FLAG,
            "clip_norm": NO_NORM,
            "loss_scale": [0, 0.5, float("inf"), float("nan"), "a", [2.0]],
            "head_has_aux": NO_FLAG,
            "has_state": NO_FLAG,
            "skip_nonfinite": NO_FLAG,
            **{n: bad for n, bad in {**OPTIONS, **MORE}.items() if n not in ("key", "grads")},
            "grads": ["host"],
            "slices": [2],
        },
    ),
    init_step: (
        {"layers": W, "others": {}},
        {"layers": NO_STACK, "others": NO_ARRAY, "model_state": [*NO_ARRAY, jnp.ones(2)]},
    ),
    init_step_of: ({}, {"trainable": [*NO_CHOICE, False], "trainable_others": NO_CHOICE}),
    step: (
        {"state": STATE, "batch": inputs()},
        {
            "state": [None, 3, "state", [], {}, (W, {}, (), ()), STATE._replace(layers=None)],
            "key": NO_KEY,
        },
    ),
    effjax.stream_update: ({"tx": TX}, {"tx": NO_OPTIMIZER, "stacked": NO_FLAG}),
    init_update: ({}, {"params": NO_STACK}),
    update: (
        {"grads": W, "state": (), "params": W},
        {
            "grads": [*NO_ARRAY, {}, {"a": W["a"]}],
            "state": [None, 3, "state", [], {}],
            "params": NO_STACK,
            "clip_norm": NO_NORM,
        },
    ),
}
CASES = [
    pytest.param(function, name, value, id=f"{function.__name__}-{name}-{i}")
    for function, (_, bad) in CALLS.items()
    for name, values in bad.items()
    for i, value in enumerate(values)
]


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_an_error_names_the_argument(function, name, value):
    with pytest.raises((TypeError, ValueError), match=f"^`{name}"):
        function(**{**CALLS[function][0], name: value})


def test_all_arguments_are_there():
    """Of each public function, but for what only the user's functions see."""
    for function, (_, bad) in CALLS.items():
        if function.__module__.startswith("effjax"):
            names = set(inspect.signature(function).parameters)
            is_step = function is effjax.offload_train_step
            later = CALLS[init_step_of][1] if is_step else {}  # once there are parameters
            assert names - {"options", "params"} <= {*bad, *later}, function
    exported = {f.__name__ for f in CALLS if f.__module__.startswith("effjax")}
    public = {n for n, f in vars(effjax).items() if "offload" in getattr(f, "__module__", "")}
    assert public - {"OffloadState"} == exported


@pytest.mark.parametrize("donate", [True, False])
def test_offload_jit_of_what_is_no_array(donate):
    compiled = effjax.offload_jit(lambda *args: args[0], donate=donate)
    with pytest.raises(TypeError, match=r"`args\[0\]\['w'\]` of a function of offload_jit"):
        compiled({"w": "x"})
    with pytest.raises(TypeError, match=r"`args\[1\]` .* must be an array, not 'x'"):
        compiled(inputs(), "x")


def test_offload_jit_without_arguments():
    with pytest.raises(TypeError, match="called without; pass donate=False"):
        effjax.offload_jit(lambda: 1.0)()
    assert effjax.offload_jit(lambda: jnp.ones(()), donate=False)() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype("float32"), float])
def test_floating_dtypes_are_taken(dtype):
    y = jax.eval_shape(
        lambda w, x: effjax.offload_scan(
            lambda w, x, key: x, w, x, params_in="device", compute_dtype=dtype
        ),
        params(), inputs(),
    )  # fmt: skip
    assert y.shape == inputs().shape


def scanned(w, x):
    return jax.value_and_grad(lambda w: loss(effjax.offload_scan(layer, effjax.to_host(w), x)))(w)


def in_sequence(w, x):
    layers = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(2)]
    return effjax.offload_sequential([layer] * 2, layers, x, params_in="device")


def in_scan(w, x):
    return effjax.offload_scan(layer, effjax.to_host(w), x)


@pytest.mark.parametrize(("run", "name"), [(in_scan, "scan"), (in_sequence, "sequential")])
def test_derivatives_of_a_gradient_are_refused(run, name):
    w, x = params(), inputs()
    gradient = jax.grad(lambda w: loss(run(w, x)))
    with pytest.raises(NotImplementedError, match=f"offload_{name} has first derivatives in rev"):
        jax.eval_shape(jax.grad(lambda w: sum(map(jnp.sum, gradient(w).values()))), w)


def updated(w, x):
    stream = effjax.stream_update(TX)
    return stream.update(w, stream.init(w), w)


def trained(w, x):
    head = lambda others, x, batch, key: loss(x * others["scale"])  # noqa: E731
    init, step = effjax.offload_train_step(lambda others, batch, key: batch, layer, head, TX)
    return step(init(effjax.to_host(w), {"scale": w["c"][0, 0]}), x)


@pytest.mark.parametrize("run", [scanned, updated, trained])
def test_numpy_arrays_are_taken(run):
    """Those that jit closes over are still NumPy's at the door."""
    arrays = params(), inputs()
    numpy = jax.tree.map(np.asarray, arrays)
    got, want = jax.jit(lambda: run(*numpy))(), jax.jit(run)(*arrays)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
