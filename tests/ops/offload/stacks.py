"""A stack of layers with dropout and its reference implementation in device memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from effjax import offload_scan, offload_sequential, to_device, to_host

LAYERS, WIDTH, BATCH = 4, 8, 8
KEY = jax.random.key(7)
POLICIES = {
    "recomputed": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
}
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip


def dropout(h, key):
    return h if key is None else jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)


def layer(w, x, key):
    return x + dropout(jnp.tanh(x @ w["a"] + w["c"]), key) @ w["b"]


def init(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "a": 0.3 * jax.random.normal(a, (WIDTH, 2 * WIDTH)),
        "b": 0.3 * jax.random.normal(b, (2 * WIDTH, WIDTH)),
        "c": 0.3 * jax.random.normal(c, (2 * WIDTH,)),
    }


def params(num_layers=LAYERS):
    return jax.vmap(init)(jax.random.split(jax.random.key(0), num_layers))


def inputs():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def key_of(key, i, m):
    """Return the key of a layer and a microbatch."""
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), m)


def in_memory(layer, params, x, key, num_microbatches=1):
    """Scan over the layers and, within each layer, over the microbatches."""
    m = num_microbatches

    def body(x, at):
        w, i = at
        if m == 1:
            return layer(w, x, key_of(key, i, 0)), None

        def one(_, at):
            x, j = at
            return None, layer(w, x, key_of(key, i, j))

        parts = jax.tree.map(lambda a: a.reshape(m, a.shape[0] // m, *a.shape[1:]), x)
        _, y = lax.scan(one, None, (parts, jnp.arange(m)))
        return jax.tree.map(lambda a: a.reshape(m * a.shape[1], *a.shape[2:]), y), None

    number = jax.tree.leaves(params)[0].shape[0]
    return lax.scan(body, x, (params, jnp.arange(number)))[0]


# Layers with a frozen int8 kernel and trained low-rank matrices.


def low_rank_product(w, x):
    """Apply an int8 kernel with its scales, and add the low-rank product."""
    kernel = w["kernel"].astype(x.dtype) * w["scale"]
    return x @ kernel + x @ w["low"]["down"] @ w["low"]["up"]


def low_rank_layer(w, x, key):
    return x + dropout(jnp.tanh(low_rank_product(w, x)), key) @ w["out"].astype(x.dtype)


def is_low_rank(path, leaf):
    return path[0].key == "low"


# Layers with many kinds of operations.


def gelu(w, x, key):
    return x + jax.nn.gelu(x @ w["a"] + w["c"]) @ w["b"]


def casting(w, x, key):
    """Compute large values from the parameters alone and from constants."""
    half = jax.tree.map(lambda a: (2 * a).astype(jnp.bfloat16), w)
    h = jnp.tanh(x.astype(jnp.bfloat16) @ half["a"] + half["c"])
    table = jnp.cos(jnp.arange(2 * WIDTH * WIDTH).reshape(WIDTH, -1)).astype(jnp.bfloat16)
    return x + (h @ (half["b"] + table.T)).astype(x.dtype)


def named(w, x, key):
    return layer({**w, "c": 0 * w["c"]}, checkpoint_name(x @ w["a"], "h") @ w["b"] + x, key)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def composed(w, x, key):
    """Combine a custom derivative, a loop, a branch and a constant."""
    h = jax.jit(jnp.sin)(doubled(x) @ w["a"]) * np.linspace(0.5, 1, 2 * WIDTH, dtype="float32")
    h, sums = lax.scan(lambda h, c: (jnp.tanh(h + c), h.sum(1)), h, jnp.stack([w["c"]] * 2))
    y = lax.cond(sums[0, 0] > 0, jnp.sin, jnp.cos, h @ w["b"])
    return x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0)


# Loss and gradients.


def offloaded(layer, form="stack", **options):
    """Return a function of a stack and x that applies the stack, or a list of its layers."""

    def apply(w, x):
        if form == "stack":
            return offload_scan(layer, w, x, **options)
        where = to_device if options.get("params_in") == "device" else to_host
        w = [jax.tree.map(lambda a, i=i: where(to_device(a)[i]), w) for i in range(LAYERS)]
        return offload_sequential([layer] * LAYERS, w, x, **options)

    return apply


def loss(y):
    return jnp.mean(jnp.sin(y) + 0.3 * y * y)


def value_and_grads(apply, *args, **compiler_options):
    """Return the loss of ``apply(*args)`` and its gradients with respect to all arguments."""
    run = jax.value_and_grad(lambda *a: loss(apply(*a)), tuple(range(len(args))))
    return jax.jit(run, compiler_options=compiler_options)(*args)


def check_gradients(
    *, layer=layer, plain=None, form="stack", w=None, x=None, tolerance=0.0, **options
):
    """Compare with `plain` (by default `layer`) in device memory; `policy` is a name.

    A tolerance of 0 asks for equal bits. Gradients are in the memory of the parameters.
    """
    w, x = params() if w is None else w, inputs() if x is None else x
    key, count = options.get("key"), options.get("num_microbatches", 1)
    options["policy"] = POLICIES[options.get("policy", "recomputed")]
    where = to_device if options.get("params_in") == "device" else to_host
    # XLA may omit a rounding to bfloat16 in one program and not in the other.
    run = functools.partial(value_and_grads, xla_allow_excess_precision=False)
    got = run(offloaded(layer, form, **options), where(w), x)
    want = run(lambda w, x: in_memory(plain or layer, w, x, key, count), w, x)
    if tolerance:
        assert_close(got, want, tolerance, tolerance / 10)
    else:
        assert_equal_bits(got, want)
    assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(want)]
    assert kinds(got[1][0]) == kinds(where(w)) and kinds(got[1][1]) == {"device"}


def assert_equal_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(got, want, rtol=2e-6, atol=None):
    """Compare two pytrees; `atol` is `rtol` by default."""
    atol = rtol if atol is None else atol
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def to_numpy(tree):
    """Return NumPy arrays, also for PRNG keys."""
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda a: np.asarray(jax.random.key_data(a) if is_key(a) else a), tree)


def on(mesh, spec, host=False):
    """Return a sharding in host or device memory."""
    return NamedSharding(mesh, spec, memory_kind="pinned_host" if host else "device")


def kinds(tree):
    """Return the memory kinds of the arrays of a tree."""
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}
