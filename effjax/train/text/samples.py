"""Texts that a model generates at each validation of a run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...models.generate import generate
from ...ops.offload import offload_jit, to_device
from ..errors import DataError
from ..mesh import replicated
from .base import Base
from .chat import Tokenizer
from .config import SAMPLE_TOKENS, FinetuneConfig
from .generate import TextModel, count_new_tokens, decode, printable_lines
from .learner import DecoderLearner, DecoderState
from .prompts import read_lines

MAX_PROMPTS = 100  # all are generated at once


class Sample(NamedTuple):
    """A generated text."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class Samples:
    """Prompts to complete, from `read_prompts`.

    Attributes:
        prompts: The texts of the file.
        tokens: The tokens of each prompt, as rendered by the chat template if there is one.
        stop_tokens: The tokens that end a completion.
        max_tokens: The largest number of new tokens.
        temperature: The divisor of the logits; 0 takes the most probable token.
        tokenizer: The tokenizer of the checkpoint.
    """

    prompts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    stop_tokens: Sequence[int]
    max_tokens: int
    temperature: float
    tokenizer: Tokenizer

    def make(self, learner: DecoderLearner, seed: int) -> Callable[[DecoderState], list[Sample]]:
        """Return a function that completes the prompts with the parameters of a state."""
        size = max(map(len, self.tokens))
        tokens = np.zeros((len(self.tokens), size), np.int32)
        for row, prompt in zip(tokens, self.tokens, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.tokens], np.int32)
        run = functools.partial(
            generate, learner.model, max_new_tokens=self.max_tokens, temperature=self.temperature,
            stop_tokens=self.stop_tokens, dtype=learner.dtype, lora_scale=learner.lora_scale,
        )  # fmt: skip

        def complete(layers: Any, others: Any, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Each process reads the tokens.
            key = jax.random.fold_in(jax.random.key(seed), step)
            done = run(
                layers, to_device(others), jnp.asarray(tokens), lengths=jnp.asarray(lengths),
                key=key,
            )  # fmt: skip
            place = replicated(learner.mesh)
            return tuple(jax.lax.with_sharding_constraint(a, place) for a in done)

        compiled = offload_jit(complete, donate=False)

        def sample(state: DecoderState) -> list[Sample]:
            rows, counts = map(
                np.asarray, compiled(state.model.layers, state.model.others, state.step)
            )
            return [
                Sample(
                    prompt, printable_lines("".join(decode(self.tokenizer, row[:count].tolist())))
                )
                for prompt, row, count in zip(self.prompts, rows, counts, strict=True)
            ]

        return sample


def read_prompts(config: FinetuneConfig, base: Base, tokenizer: Tokenizer) -> Samples | None:
    """Return the prompts of a configuration; None if it has none.

    Raises:
        DataError: The file cannot be read or has no prompt, or the template does not accept one.
        TrainError: A prompt is too long.
    """
    if config.sample_prompts is None:
        return None
    file = Path(config.sample_prompts)
    prompts = read_lines(file)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise DataError(
            f"{file}: must have 1 to {MAX_PROMPTS} prompts, one in each line. It has "
            f"{len(prompts)}."
        )
    model = TextModel(base, None, tokenizer)
    encoded = [model.encode(text, None, tokenizer.template is not None) for text in prompts]
    tokens = [ids for ids, _ in encoded]
    stop_tokens = sorted(set().union(*(ends for _, ends in encoded)))
    max_tokens = count_new_tokens(model, tokens, config.sample_tokens or SAMPLE_TOKENS)
    temperature = config.sample_temperature or 0.0
    return Samples(prompts, tokens, stop_tokens, max_tokens, temperature, tokenizer)
