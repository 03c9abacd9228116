"""Training steps in memory, as optax takes them: what those of offload must equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effjax import to_device
from tests.ops.offload.stacks import BATCH, KEY, LAYERS, WIDTH, in_memory, key_of, layer, params

TOKENS = jnp.arange(BATCH) % 11


def others():
    e, u = jax.random.split(jax.random.key(5))
    return {"e": jax.random.normal(e, (11, WIDTH)), "u": jax.random.normal(u, (WIDTH, 11))}


def embed(others, batch, key):
    x = others["e"][batch]
    return x if key is None else jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)


def head(others, x, batch, key):
    x = x if key is None else x * jax.random.uniform(key, (x.shape[0], 1))
    return optax.softmax_cross_entropy_with_integer_labels(x @ others["u"], batch).mean()


def decayed(p):
    return jax.tree.map(lambda a: a.ndim > 1, p)


ADAMW = optax.adamw(1e-2, mask=decayed)


def layers_of(stacked):
    return [
        jax.tree.map(lambda a, i=i: jnp.asarray(a)[i], to_device(stacked)) for i in range(LAYERS)
    ]


def stack(layers):
    return jax.tree.map(lambda *a: jnp.stack(a), *layers)


def close(got, want, tolerance=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


def parts_of(tree, m):
    """A pytree [B, ...] in m parts."""
    rows = lambda a, j: a[j * (a.shape[0] // m) : (j + 1) * (a.shape[0] // m)]  # noqa: E731
    return [jax.tree.map(lambda a, j=j: rows(a, j), tree) for j in range(m)]


def loss_in_memory(model, batch, key, m=1, embed=embed, layer=layer, head=head):
    """The mean of the losses of m microbatches."""
    parts = list(enumerate(parts_of(batch, m)))
    x = [embed(model["others"], part, key_of(key, LAYERS, j)) for j, part in parts]
    x = jax.tree.map(lambda *a: jnp.concatenate(a), *x)
    x = parts_of(in_memory(layer, stack(model["layers"]), x, key, m), m)
    losses = [head(model["others"], x[j], part, key_of(key, LAYERS + 1, j)) for j, part in parts]
    return sum(losses) / m


@functools.cache
def trained_in_memory(tx=ADAMW, num_microbatches=1, steps=3):
    """Losses and parameters after steps with dropout; optax sees the layers one by one."""

    @jax.jit
    def step(model, state, key):
        value, grads = jax.value_and_grad(loss_in_memory)(model, TOKENS, key, num_microbatches)
        updates, state = tx.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value

    model = {"layers": layers_of(params()), "others": others()}
    state, losses = tx.init(model), []
    for i in range(steps):
        model, state, value = step(model, state, jax.random.fold_in(KEY, i))
        losses.append(value)
    return losses, stack(model["layers"]), model["others"]
