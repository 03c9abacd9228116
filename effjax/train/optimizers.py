"""Learning rates and optimizers of training runs."""

import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from ..optimizers import (
    adamw_8bit,
    in_24_bits,
    in_float32,
    split_matrices,
    stochastic_rounding,
    with_matmul_precision,
)

B1, B2, EPSILON = 0.9, 0.95, 1e-8  # of AdamW
# Names of the weights of linear layers; Mixtral calls those of experts w1, w2 and w3.
_LINEAR = re.compile(r"(self_attn|mlp|\w+\.experts)\.(\w+_proj|w[123])\.weight")
LOWEST = 0.1  # of the largest learning rate, at the start and at the end of a run with warmup


def make_schedule(
    kind: Literal["cosine", "linear", "constant", "step"],
    learning_rate: float,
    steps: int,
    warmup: float | None = None,
    first: float = LOWEST,
    lowest: float = LOWEST,
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps.

    Args:
        kind: "cosine" and "linear" decay after the warmup; "step" divides by ten after 1/2 and
            after 3/4 of the steps, without warmup.
        learning_rate: The largest learning rate.
        steps: The length of the run.
        warmup: The share of the steps with linear warmup, rounded up as in transformers; it ends
            before the last step. None for a cosine to zero without warmup.
        first: The share of `learning_rate` at the start of the warmup.
        lowest: The share of `learning_rate` at the end of the decay.
    """
    if kind == "step":
        boundaries = {steps // 2: 0.1, steps * 3 // 4: 0.1}
        return optax.piecewise_constant_schedule(learning_rate, boundaries)
    if warmup is None:
        return optax.cosine_decay_schedule(learning_rate, steps)
    # The last step has the whole rate, also of a run that would be all warmup.
    count = min(math.ceil(warmup * steps), steps - 1)
    rest = steps - count
    decays = {
        "cosine": optax.cosine_decay_schedule(learning_rate, rest, lowest),
        "linear": optax.linear_schedule(learning_rate, lowest * learning_rate, rest),
        "constant": optax.constant_schedule(learning_rate),
    }
    rises = optax.linear_schedule(first * learning_rate, learning_rate, count)
    return optax.join_schedules([rises, decays[kind]], [count]) if count else decays[kind]


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


def make_optimizer(
    name: Literal["adamw", "adamw8bit", "muon"],
    schedule: optax.Schedule,
    weight_decay: float,
    *,
    master_copy: bool = False,
    seed: int = 0,
    b1: float = B1,
    b2: float = B2,
    epsilon: float = EPSILON,
    fused: Mapping[str, Sequence[int]] = types.MappingProxyType({}),
) -> optax.GradientTransformation:
    """Return the optimizer of a decoder, with weight decay on the matrices of linear layers only.

    Norms, biases and the embedding are not decayed. The update of a parameter does not depend on
    the others, so that layers can be updated one at a time.

    Muon orthogonalizes the momentum of each matrix of a linear layer of the decoder's layers, and
    of each expert by itself, and multiplies it by 0.2 · sqrt(larger side), so that it is as large
    as AdamW's and has its learning rates. The products have operands in bfloat16 and sums in
    float32. Embedding, head, norms, biases and the routers of experts have AdamW.

    Args:
        name: AdamW with moments in 32 or in 8 bits, or Muon with a momentum in 32 bits.
        schedule: The learning rate, a function of the number of steps.
        weight_decay: The strength of the decay, multiplied by the learning rate.
        master_copy: Whether bfloat16 parameters have 8 more bits, see `in_24_bits`. Otherwise
            they are rounded stochastically.
        seed: Seed of the stochastic rounding.
        b1: Decay rate of AdamW's first moment.
        b2: Decay rate of AdamW's second moment.
        epsilon: Added to the root of AdamW's second moment.
        fused: The rows of each matrix in linear layers that have several, by name, such as
            `DecoderConfig.fused_projections`. Muon orthogonalizes each by itself.

    References:
        K. Jordan et al., Muon, 2024; J. Liu et al., Muon is Scalable for LLM Training, 2025
        (arXiv:2502.16982).
    """

    def is_decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: _is_matrix(path[-1].key), params)

    def label(params: Any) -> Any:
        return jax.tree.map_with_path(lambda *leaf: "adamw" if is_adamw(*leaf) else "muon", params)

    options: dict[str, Any] = dict(
        b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=is_decayed
    )
    if name == "adamw8bit":
        optimizer = adamw_8bit(schedule, **options)
    else:
        optimizer = optax.adamw(schedule, **options)
    if name == "muon":
        # The last two axes are those of a matrix; before them is that of experts.
        muon = optax.contrib.muon(
            schedule, weight_decay=weight_decay, consistent_rms=0.2,
            muon_weight_dimension_numbers=_matrix_axes,
        )  # fmt: skip
        muon = split_matrices(muon, {f"{name}.weight": rows for name, rows in fused.items()}, -2)
        # Muon is published with products in bfloat16.
        muon = with_matmul_precision(muon, "BF16_BF16_F32")
        optimizer = optax.partition({"muon": muon, "adamw": optimizer}, label)
    if master_copy:
        return in_24_bits(optimizer)
    # An update of a bfloat16 parameter is mostly below its rounding step: rounded to nearest, the
    # parameter would not change. Rounded at random, it changes by the update on average.
    return optax.chain(in_float32(optimizer), stochastic_rounding(seed))


def is_adamw(path: Any, leaf: Any) -> bool:
    """Return True if AdamW updates a parameter even with the optimizer "muon".

    AdamW treats rows separately, as `update_rows` of `effjax.offload_train_step` requires.
    """
    return not is_linear(path[-1].key)


def is_linear(name: str) -> bool:
    """Return True for the weight of a linear layer of attention, an MLP or an expert.

    Biases, norms, routers, the embedding, the head and the matrices of adapters are none.
    """
    return _LINEAR.fullmatch(name) is not None


def _matrix_axes(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params)


def _is_matrix(name: str) -> bool:
    return not (name.endswith("bias") or "norm" in name or "embed" in name)
