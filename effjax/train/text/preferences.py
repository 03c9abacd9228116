"""Direct preference optimization (DPO): the loss of pairs of a chosen and a rejected answer.

Of the answers c and r to a prompt, with the policy π that is trained and the reference π₀ that it
was before, ``loss = -log sigmoid(beta * (log π(c)/π₀(c) - log π(r)/π₀(r)))``. The log probability
of an answer is the sum over its tokens, given the prompt.

Reference: Rafailov et al., 2023 (arXiv:2305.18290).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...models import DecoderConfig
from ...models.decoder import Params, token_losses

# Metrics besides the loss. A reward is `beta` times the log of the ratio of the probabilities.
METRICS = "rewards/chosen", "rewards/rejected", "accuracy", "margin"


def as_rows(batch: Any) -> dict[str, jax.Array]:
    """Return the arrays that the model reads, [2 N, T], of a batch of pairs [N, 2, T]."""
    names = "tokens", "positions", "segment_ids"
    return {name: _as_rows(batch[name]) for name in names if name in batch}


def _as_rows(a: jax.Array) -> jax.Array:
    return a.reshape(-1, a.shape[-1])


def sum_log_probs(model: DecoderConfig, others: Params, hidden: jax.Array, batch: Any) -> jax.Array:
    """Return the log probabilities of answers, float32 [N, P, 2] of P pairs in a row.

    Args:
        model: The decoder.
        others: The parameters outside the layers.
        hidden: The last layer's output [2 N, T, hidden_size].
        batch: From `PackedPairs.batch`.
    """
    labels, weights = _as_rows(batch["labels"]), _as_rows(batch["weights"])
    losses = token_losses(model, others, hidden, labels, weights != 0)[..., None]  # [2 N, T, 1]
    count = batch["pairs"].shape[1]
    if "segment_ids" in batch:
        # [2 N, T, P]: a sum over tokens for each pair of a packed row, without a scatter.
        is_of_pair = _as_rows(batch["segment_ids"])[..., None] == jnp.arange(1, count + 1)
        losses = jnp.where(is_of_pair, losses, 0)
    return -jnp.swapaxes(losses.sum(1).reshape(-1, 2, count), 1, 2)


def preference_loss(
    beta: float, log_probs: jax.Array, batch: Any
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Return the sum of the losses with the number of pairs, and the sums of the metrics.

    Args:
        beta: The factor of the rewards.
        log_probs: From `sum_log_probs`.
        batch: From `PackedPairs.batch`.
    """
    rewards = beta * (log_probs - batch["references"])
    chosen, rejected = rewards[..., 0], rewards[..., 1]
    margin, pairs = chosen - rejected, batch["pairs"]
    values = chosen, rejected, (margin > 0).astype(margin.dtype), margin
    sums = {name: jnp.sum(pairs * a) for name, a in zip(METRICS, values, strict=True)}
    loss_sum = jnp.sum(pairs * jax.nn.softplus(-margin))  # -log sigmoid(z) = softplus(-z)
    return (loss_sum, jnp.sum(pairs)), lax.stop_gradient(sums)
