"""Generation of the tokens after a prompt, one at a time, and the limits of their number."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...models import DecoderConfig
from ...models.generate import Options, advance, start
from ...ops.offload import offload_jit
from ..errors import TrainError, counted
from .model import TextModel


def count_positions(model: TextModel) -> int | None:
    """Return the number of positions of a model; None if its config.json does not say it."""
    positions = model.base.settings.get("max_position_embeddings")
    return positions if type(positions) is int else None


def count_new_tokens(model: TextModel, prompt: Sequence[int], max_tokens: int) -> int:
    """Return `max_tokens`, limited by the positions of the model that a prompt leaves.

    Raises:
        TrainError: The prompt is too long.
    """
    size, positions = len(prompt), count_positions(model)
    if positions is None:
        return max_tokens
    if size >= positions:
        raise TrainError(
            f"The prompt is too long: it has {counted(size, 'token')}, and the model "
            f"{counted(positions, 'position')}. Shorten it."
        )
    return min(max_tokens, positions - size)


def pad_prompts(prompts: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of prompts, padded at the end to [N, size], and their lengths [N]."""
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def generate_tokens(
    config: DecoderConfig,
    options: Options,
    layers: Any,
    others: Any,
    prompt: Sequence[int],
    key: jax.Array,
    *,
    size: int,
    num_slots: int,
) -> Iterator[int]:
    """Yield the tokens after a prompt, as `models.generate` computes them.

    The programs are compiled for each `size` and `num_slots`.

    Args:
        config: The decoder.
        options: From `check_options`.
        layers: The parameters of the layers.
        others: The other parameters.
        prompt: The tokens of the prompt.
        key: The PRNG key of the sampling.
        size: The length to which the prompt is padded.
        num_slots: The number of tokens that the cache holds, and the largest one of the prompt and
            the generated tokens together.
    """
    begin, following = _compile(config, options, num_slots)
    tokens, lengths = map(jnp.asarray, pad_prompts([prompt], size))
    state = begin(layers, others, tokens, lengths, key)
    for count in range(min(options.max_new_tokens, num_slots - len(prompt))):
        if count:
            state = following(state, layers, others)
        yield int(state.tokens[0, count])
        if state.is_done[0]:
            return


# Kept, because each prompt and each turn of a chat comes back to them.
@functools.lru_cache(maxsize=8)
def _compile(config: DecoderConfig, options: Options, num_slots: int) -> tuple[Callable, Callable]:
    begin = offload_jit(functools.partial(start, config, options, num_slots), donate=False)
    # The state is donated, so that the caches are updated in place.
    return begin, offload_jit(functools.partial(advance, config, options))
