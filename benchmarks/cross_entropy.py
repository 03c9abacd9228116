"""Planned memory of the gradients of a language model with a large vocabulary.

Compares `effjax.linear_cross_entropy` with whole logits, with logits recomputed in the backward
pass, and with slices of the time axis in a checkpointed scan, the strongest peer. The tables show
the model's head alone and the whole model, whose layers are recomputed.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .measure import TARGET, need_compiler, plan_steps
from .results import Result, Size
from .transformer import TransformerLM

NUM_SLICES = 16  # of the time axis

# A loss takes `model(params)`, the parameters, the last layer's output [B, T, C] and labels [B, T].


def whole_logits(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(params).logits(x), labels)


def scan_time(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the loss of one slice of the time axis after the other, checkpointed."""
    slice_loss = functools.partial(whole_logits, model, params)
    slice_loss = jax.checkpoint(slice_loss, prevent_cse=False)

    def split(a):
        return jnp.moveaxis(a.reshape(len(a), NUM_SLICES, -1, *a.shape[2:]), 1, 0)

    return jax.lax.scan(lambda _, xs: (None, slice_loss(*xs)), None, (split(x), split(labels)))[1]


def effjax_loss(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return model(params).losses(x, labels)


LOSSES: dict[str, Callable] = {
    "plain": whole_logits,
    "jax.checkpoint": jax.checkpoint(whole_logits, static_argnums=0),
    "jax.checkpoint in a scan over time": scan_time,
    "effjax": effjax_loss,
}


def gradient_steps(
    model: TransformerLM, losses: Callable, batch_size: int, context: int
) -> dict[str, tuple]:
    """Return `(fn, *args)` of the gradients of the head and of the whole model."""
    graphdef, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tokens = jax.ShapeDtypeStruct((batch_size, context + 1), jnp.int32)
    labels = jax.ShapeDtypeStruct((batch_size, context), jnp.int32)

    def merge(some):
        return nnx.merge(graphdef, params | some)

    def head_loss(params, x, labels):
        return jnp.mean(losses(merge, params, x, labels))

    def model_loss(params, tokens):
        x = merge(params).features(tokens[:, :-1], remat=True)
        return head_loss(params, x, tokens[:, 1:])

    head = {name: params[name] for name in ("norm", "head")}
    x = jax.eval_shape(lambda p, y: merge(p).features(y), params, labels)
    return {
        "head": (jax.grad(head_loss, (0, 1)), head, x, labels),
        "model": (jax.grad(model_loss), params, tokens),
    }


def plan_losses(
    config: dict[str, Any],
    context: int,
    batch_sizes: Sequence[int],
    target: str = TARGET,
    names: Sequence[str] = tuple(LOSSES),
) -> Result:
    """Plan the gradients of a transformer with some losses."""
    model = nnx.eval_shape(lambda: TransformerLM(**config, rngs=nnx.Rngs(0)))
    rows = []
    for batch_size in batch_sizes:
        steps = {n: gradient_steps(model, LOSSES[n], batch_size, context) for n in names}
        for part in ("head", "model"):
            plans = plan_steps({name: step[part] for name, step in steps.items()}, target)
            rows += [
                {
                    "name": name,
                    "of": part,
                    "batch_size": batch_size,
                    "peak_bytes": plan.peak_device_bytes,
                    "temp_bytes": plan.device.temporaries,
                }
                for name, plan in plans.items()
            ]
    vocabulary = config["vocab_size"]
    return Result(
        f"cross_entropy_{vocabulary}_{target}",
        f"gradients of a language model of {vocabulary} tokens, planned for {target}",
        config | dict(context=context, target=target),
        rows,
        [f"Sequences of {context} tokens, {config['dtype']}. batch: number of sequences."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        config = dict(num_layers=4, width=512, num_heads=8, vocab_size=32768, dtype="bfloat16")
        yield plan_losses(config, 1024, [16, 64])
    else:
        config = dict(num_layers=2, width=128, num_heads=4, vocab_size=32768, dtype="bfloat16")
        yield plan_losses(config, 256, [16])
