"""Texts that a model generates at each validation of a run."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...models.generate import Generation, generate
from ...ops.offload import offload_jit, to_device
from ..errors import DataError
from ..mesh import replicated
from .base import Base
from .chat import Tokenizer
from .config import SAMPLE_TOKENS, FinetuneConfig
from .decode import decode, printable_lines
from .generate import count_new_tokens, pad_prompts
from .learner import DecoderLearner, DecoderState
from .model import TextModel
from .prompts import encode, read_lines

MAX_PROMPTS = 100  # whose caches are on the device together


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

    def make(self, learner: DecoderLearner) -> Callable[[DecoderState], list[dict[str, str]]]:
        """Return a function that completes the prompts with the parameters of a state.

        Its result has a dict for each prompt, of the "prompt" and the "text".
        """
        config = learner.config
        tokens, lengths = pad_prompts(self.tokens, max(map(len, self.tokens)))

        # One call for all prompts: layers in host memory are loaded once for a token of all rows.
        def complete(layers: Any, others: Any, step: jax.Array) -> Generation:
            done = generate(
                learner.model, layers, to_device(others), jnp.asarray(tokens),
                lengths=jnp.asarray(lengths), max_new_tokens=self.max_tokens,
                temperature=self.temperature, stop_tokens=self.stop_tokens,
                key=jax.random.fold_in(jax.random.key(config.seed), step), dtype=config.dtype,
                lora_scale=config.lora_scale,
            )  # fmt: skip
            # Each process reads the tokens.
            return jax.lax.with_sharding_constraint(done, replicated(learner.mesh))

        compiled = offload_jit(complete, donate=False)

        def sample(state: DecoderState) -> list[dict[str, str]]:
            done = compiled(state.model.layers, state.model.others, state.step)
            texts = (
                printable_lines("".join(decode(self.tokenizer, row[:count].tolist(), (), ids)))
                for row, count, ids in zip(*map(np.asarray, done), self.tokens, strict=True)
            )
            return [
                {"prompt": prompt, "text": text}
                for prompt, text in zip(self.prompts, texts, strict=True)
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
    encoded = [encode(model, text, None, tokenizer.template is not None) for text in prompts]
    tokens = [ids for ids, _ in encoded]
    stop_tokens = sorted(set().union(*(ends for _, ends in encoded)))
    max_tokens = count_new_tokens(model, tokens, config.sample_tokens or SAMPLE_TOKENS)
    temperature = config.sample_temperature or 0.0
    return Samples(prompts, tokens, stop_tokens, max_tokens, temperature, tokenizer)
