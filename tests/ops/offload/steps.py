"""Small training steps with any options, and their comparison with training in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from effjax import offload_jit, offload_train_step, to_device, to_host
from tests.ops.offload import reference
from tests.ops.offload.stacks import (
    BATCH,
    LAYERS,
    WIDTH,
    assert_close,
    dropout,
    kinds,
    layer,
    low_rank_product,
    params,
)

TOKENS = jnp.arange(BATCH) % 11


def others():
    e, u = jax.random.split(jax.random.key(5))
    return {"e": jax.random.normal(e, (11, WIDTH)), "u": jax.random.normal(u, (WIDTH, 11))}


def embed(others, batch, key):
    # Sharded rows cannot be indexed along Explicit axes.
    x = jax.nn.one_hot(batch, len(others["e"]), dtype=others["e"].dtype) @ others["e"]
    return x if key is None else jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)


def row_losses(others, x, batch, key):
    x = x if key is None else x * jax.random.uniform(key, (x.shape[0], 1))
    logits = x @ others["u"]
    labels = jax.nn.one_hot(batch, logits.shape[-1], dtype=logits.dtype)
    return optax.softmax_cross_entropy(logits, labels)


def head(others, x, batch, key):
    return row_losses(others, x, batch, key).mean()


def decayed(p):
    return jax.tree.map(lambda a: a.ndim > 1, p)


# The large eps makes updates depend on the size of the gradients.
ADAMW = optax.adamw(1e-2, eps=0.1, mask=decayed)


def layers_of(stacked):
    return reference.unstack(to_device(stacked), LAYERS)


# Functions with all kinds of arguments and results. Batches are ``{"tokens", "factor"}``; the loss
# of a row is multiplied by its factor.


def model_state():
    return {"mean": jnp.zeros(WIDTH), "power": jnp.ones(()), "batches": jnp.int32(0)}


def make_ends(axis=None, *, has_state=False, head_has_aux=False, weighted_loss=False):
    """Return embed and head; they average over the axis of `jax.shard_map`."""
    mean = lambda a: a if axis is None else lax.pmean(a, axis)  # noqa: E731
    total = lambda a: a if axis is None else lax.psum(a, axis)  # noqa: E731

    def run_embed(others, *args):
        *states, batch, key = args
        x = embed(others, batch["tokens"], key)
        if not has_state:
            return x
        (state,) = states
        x = x - 0.1 * state["mean"]
        new = 0.9 * state["mean"] + 0.1 * mean(x.mean(0))
        return x, {**state, "mean": new, "batches": state["batches"] + 1}

    def run_head(others, *args):
        *states, x, batch, key = args
        if has_state:
            x = x * states[0]["power"]
        losses = row_losses(others, x, batch["tokens"], key) * batch["factor"]
        if weighted_loss:
            mask = batch["tokens"] > 3  # the first microbatch has a weight of 0
            loss = total((losses * mask).sum()), total(mask.sum())
        else:
            loss = mean(losses.mean())
        results = [loss]
        if has_state:
            power = 0.9 * states[0]["power"] + 0.1 * mean((x**2).mean())
            results.append({**states[0], "power": power})
        if head_has_aux:
            results.append({"rows": x.sum(-1)})
        return tuple(results) if len(results) > 1 else loss

    return run_embed, run_head


def with_aux(layer):
    """Return a layer with an auxiliary result."""

    def run(w, x, key):
        y = layer(w, x, key)
        return y, {"largest": y.max(-1), "place": y.argmax(-1)}

    return run


# Different layers: one has no parameters, and the parameters of another are a single array.


def wide(w, x, key):
    return dropout(jnp.tanh(x @ w["a"] + w["c"]), key)


def squashed(_, x, key):
    return jnp.sin(x)


def shifted(w, x, key):
    return x + w


def quantized(w, x, key):
    return jnp.tanh(low_rank_product(w, x))


DIFFERENT = [wide, squashed, shifted, quantized]


def different_params():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    return [
        {"a": 0.3 * jax.random.normal(a, (WIDTH, 12)), "c": jnp.zeros(12)},
        {},
        0.1 * jax.random.normal(b, (12,)),
        {
            "kernel": jax.random.randint(c, (12, WIDTH), -127, 127, jnp.int8),
            "scale": jnp.float32(0.004),
            "low": {
                "down": 0.3 * jax.random.normal(d, (12, 2)),
                "up": 0.3 * jax.random.normal(d, (2, WIDTH)),
            },
        },
    ]


def is_trained(path, leaf):
    """Return False for the integers and their scale, and for the kernel `b` of a stack."""
    return getattr(path[-1], "key", None) not in ("b", "kernel", "scale")


def every_row(path, leaf):
    """Update all parameters in rows."""
    return True


# Training of both forms, "stack" and "list", with any options.

MICROBATCHES = {"num_microbatches": 2}
APART = {"fuse_update": False}
FROZEN = {"trainable": is_trained, "trainable_others": lambda path, leaf: path[0].key == "u"}
OF_STACKS = {"prefetch", "resident_slices"}
OTHERS_ON_HOST = {"others_in": "host", "update_rows": every_row}
SECOND_IS_NAN = 1.0, float("nan"), 1.0


def make_params(form):
    return params() if form == "stack" else different_params()


def make_batches(tokens, factors):
    """Return a batch for each step; the factor of the loss is that of its last row."""
    return [{"tokens": tokens, "factor": jnp.ones(tokens.size).at[-1].set(a)} for a in factors]


def make_training(form, *, tx=ADAMW, tokens=TOKENS, factors=(1.0, 1.0), axis=None, **options):
    """Return the arguments and the options of `train` and `reference.train`."""
    names = "has_state", "head_has_aux", "weighted_loss"
    run_embed, run_head = make_ends(axis, **{n: options[n] for n in names if n in options})
    add_aux = with_aux if options.get("has_aux") else lambda layer: layer
    run_layers = add_aux(layer)
    if form == "list":  # with integer parameters
        run_layers = list(map(add_aux, DIFFERENT))
        options = {"trainable": is_trained} | {n: options[n] for n in options.keys() - OF_STACKS}
    if options.get("has_state"):
        options["model_state"] = model_state()
    batches = make_batches(tokens, factors)
    return (run_embed, run_layers, run_head, tx, make_params(form), others(), batches), options


def start(embed, layer, head, tx, layers, others, *, model_state=(), **options):
    """Return the first state and the compiled step."""
    init, step = offload_train_step(embed, layer, head, tx, **options)
    layers = layers if options.get("params_in") == "device" else to_host(layers)
    others = to_host(others) if options.get("others_in") == "host" else others
    return init(layers, others, model_state), offload_jit(step)


def train(*args, key=None, **options):
    """Take the steps of `reference.train`; return the losses and the result of the last step."""
    *args, batches = args
    state, step = start(*args, **options)
    losses = []
    for i, batch in enumerate(batches):
        before = state
        result = step(state, batch, None if key is None else jax.random.fold_in(key, i))
        assert all(a.is_deleted() for a in jax.tree.leaves(before))
        state = result.state
        losses.append(result.loss)
    return losses, result


def check(*args, tolerance=1e-9, want=None, compiled=False, **options):
    """Compare with training in memory, and check the memory of the state, which is returned."""
    want = want or reference.train(*args, compiled=compiled, **options)
    losses, result = train(*args, **options)
    assert_trained(losses, result, want, tolerance)
    assert_places(result.state, **options)
    return result.state


def assert_trained(losses, result, want, tolerance, *, norm=True):
    state = result.state
    got = losses, state.layers, state.others, state.model_state
    assert_close(got, want[:4], tolerance)
    got = result.aux, result.head_aux, state.grad_norm
    assert_close(got, (want.aux, want.head_aux, want.last_norm), tolerance)
    if norm:
        assert_close(result.grad_norm, want.grad_norm, tolerance)
    assert result.finite == np.isfinite(result.grad_norm).all()
    if state.loss_scale:
        assert state.loss_scale.scale == want.loss_scales[-1]


def assert_places(state, params_in="host", others_in="device", **options):
    """Check the memory of parameters and moments; counts are on the device."""
    memory = {"host": {"pinned_host"}, "device": {"device"}}
    count_ndim = 0 if isinstance(state.layers, (list, tuple)) else 1
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim > count_ndim]
    assert kinds(state.layers) == memory[params_in] and kinds(moments) <= memory[params_in]
    moments = [a for a in jax.tree.leaves(state.others_state) if a.ndim]
    assert kinds(state.others) == memory[others_in] and kinds(moments) <= memory[others_in]
    assert kinds(state.model_state) <= {"device"}
