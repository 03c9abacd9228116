"""A stack of layers with dropout and its reference implementation in device memory."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

LAYERS, WIDTH, BATCH = 4, 8, 8
KEY = jax.random.key(7)
POLICIES = {
    "recomputed": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


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


def loss(y):
    return jnp.mean(jnp.sin(y) + 0.3 * y * y)


def value_and_grads(apply, *args, **compiler_options):
    """Return the loss of ``apply(*args)`` and its gradients with respect to all arguments."""
    run = jax.value_and_grad(lambda *a: loss(apply(*a)), tuple(range(len(args))))
    return jax.jit(run, compiler_options=compiler_options)(*args)


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
