"""Reference training steps in device memory, with optax."""

import functools

import jax
import jax.numpy as jnp
import optax

from effjax import to_device
from tests.ops.offload.stacks import (
    BATCH,
    KEY,
    LAYERS,
    WIDTH,
    assert_close,
    in_memory,
    key_of,
    layer,
    params,
)

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
    assert_close(got, want, rtol=tolerance, atol=tolerance)


def parts_of(tree, m):
    """Split a pytree [B, ...] into m parts."""
    rows = lambda a, j: a[j * (a.shape[0] // m) : (j + 1) * (a.shape[0] // m)]  # noqa: E731
    return [jax.tree.map(lambda a, j=j: rows(a, j), tree) for j in range(m)]


def as_ends(embed, head):
    """Add an unchanged state, and an empty auxiliary result of head."""

    def run_embed(others, model_state, batch, key):
        return embed(others, batch, key), model_state

    def run_head(others, model_state, x, batch, key):
        return head(others, x, batch, key), model_state, ()

    return run_embed, run_head


def loss_in_memory(model, model_state, batch, key, m=1, ends=None, layer=layer):
    """Return (mean loss of m microbatches, (model_state, aux of head [m, ...]))."""
    embed_, head_ = ends or as_ends(embed, head)
    parts, x, losses, aux = list(enumerate(parts_of(batch, m))), [], [], []
    for j, part in parts:
        one, model_state = embed_(model["others"], model_state, part, key_of(key, LAYERS, j))
        model_state = jax.lax.stop_gradient(model_state)
        x.append(one)
    x = jax.tree.map(lambda *a: jnp.concatenate(a), *x)
    x = parts_of(in_memory(layer, stack(model["layers"]), x, key, m), m)
    for j, part in parts:
        at = key_of(key, LAYERS + 1, j)
        loss, model_state, more = head_(model["others"], model_state, x[j], part, at)
        model_state = jax.lax.stop_gradient(model_state)
        losses.append(loss)
        aux.append(more)
    return sum(losses) / m, (model_state, jax.tree.map(lambda *a: jnp.stack(a), *aux))


def train_in_memory(tx, model_state=(), batch=TOKENS, key=KEY, m=1, steps=3, **options):
    """Return (losses, layers, others, model_state, aux); optax updates one layer at a time."""
    gradients = jax.value_and_grad(loss_in_memory, has_aux=True)

    @jax.jit
    def step(model, state, model_state, key):
        (value, more), grads = gradients(model, model_state, batch, key, m, **options)
        updates, state = tx.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value, more

    model = {"layers": layers_of(params()), "others": others()}
    state, losses = tx.init(model), []
    for i in range(steps):
        key_of_step = None if key is None else jax.random.fold_in(key, i)
        model, state, value, (model_state, aux) = step(model, state, model_state, key_of_step)
        losses.append(value)
    return losses, stack(model["layers"]), model["others"], model_state, aux


@functools.cache
def trained_in_memory(tx=ADAMW, num_microbatches=1):
    """Return (losses, layers, others) of three steps with dropout."""
    return train_in_memory(tx, m=num_microbatches)[:3]
