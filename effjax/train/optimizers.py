"""Learning rates and optimizers of training runs."""

from typing import Any, Literal

import jax
import optax

from ..optimizers import adamw_8bit, in_float32, stochastic_rounding

B2 = 0.95  # decay rate of AdamW's second moment
LOWEST = 0.1  # of the largest learning rate, at the start and at the end of a run with warmup


def make_schedule(
    kind: Literal["cosine", "step"], learning_rate: float, steps: int, warmup: float | None = None
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps.

    Args:
        kind: "cosine" decays to zero; "step" divides by ten after 1/2 and after 3/4 of the steps.
        learning_rate: The largest learning rate.
        steps: The length of the run.
        warmup: The share of the steps with linear warmup before a cosine, which then starts and
            ends at a tenth of `learning_rate`. None for no warmup.
    """
    if kind == "step":
        boundaries = {steps // 2: 0.1, steps * 3 // 4: 0.1}
        return optax.piecewise_constant_schedule(learning_rate, boundaries)
    if warmup is None:
        return optax.cosine_decay_schedule(learning_rate, steps)
    count = max(round(warmup * steps), 1)
    return optax.warmup_cosine_decay_schedule(
        LOWEST * learning_rate, learning_rate, count, max(steps, count + 1),
        end_value=LOWEST * learning_rate,
    )  # fmt: skip


def make_sgd(
    schedule: optax.Schedule, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum, and weight decay of kernels only.

    Parameters of rank one are not decayed: scales and biases of batch norm, and the classifier's
    bias.
    """

    def is_kernel(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=is_kernel),
        optax.sgd(schedule, momentum=momentum, nesterov=True),
    )


def make_adamw(
    schedule: optax.Schedule,
    weight_decay: float,
    *,
    bits: Literal[8, 32] = 32,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Return AdamW for a decoder, with weight decay on the matrices of linear layers only.

    Norms, biases and the embedding are not decayed. The update of a parameter does not depend on
    the others, so that layers can be updated one at a time.

    Args:
        schedule: The learning rate, a function of the number of steps.
        weight_decay: The strength of the decay, multiplied by the learning rate.
        bits: Bits of each moment.
        seed: Seed of the stochastic rounding of bfloat16 parameters.
    """

    def is_decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: _is_matrix(path[-1].key), params)

    options: dict[str, Any] = dict(b2=B2, weight_decay=weight_decay, mask=is_decayed)
    if bits == 8:
        adamw = adamw_8bit(schedule, **options)
    else:
        adamw = in_float32(optax.adamw(schedule, **options))
    return optax.chain(adamw, stochastic_rounding(seed))


def _is_matrix(name: str) -> bool:
    return not (name.endswith("bias") or "norm" in name or "embed" in name)
