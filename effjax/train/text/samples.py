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
from .generate import pad_prompts
from .learner import DecoderLearner, DecoderState
from .model import TextModel
from .prompts import Encoded, Prompt, encode_prompt, read_lines

MAX_PROMPTS = 100  # whose caches are on the device together


@dataclasses.dataclass(frozen=True)
class Samples:
    """Prompts to complete, from `read_prompts`.

    Attributes:
        titles: The texts of the file.
        prompts: Their tokens, as rendered by the chat template if there is one.
        temperature: The divisor of the logits; 0 takes the most probable token.
        tokenizer: The tokenizer of the checkpoint.
    """

    titles: Sequence[str]
    prompts: Sequence[Encoded]
    temperature: float
    tokenizer: Tokenizer

    def make(self, learner: DecoderLearner) -> Callable[[DecoderState], list[dict[str, str]]]:
        """Return a function that completes the prompts with the parameters of a state.

        Its result has a dict for each prompt, of the "prompt" and the "text".
        """
        config = learner.config
        rows, ends, limits = zip(*self.prompts, strict=True)
        tokens, lengths = pad_prompts(rows, max(map(len, rows)))

        # One call for all prompts: layers in host memory are loaded once for a token of all rows.
        def complete(layers: Any, others: Any, step: jax.Array) -> Generation:
            done = generate(
                learner.model, layers, to_device(others), jnp.asarray(tokens),
                lengths=jnp.asarray(lengths), max_new_tokens=max(limits),
                temperature=self.temperature, stop_tokens=sorted(set().union(*ends)),
                key=jax.random.fold_in(jax.random.key(config.seed), step), dtype=config.dtype,
                lora_scale=config.lora_scale,
            )  # fmt: skip
            # Each process reads the tokens.
            return jax.lax.with_sharding_constraint(done, replicated(learner.mesh))

        compiled = offload_jit(complete, donate=False)

        def sample(state: DecoderState) -> list[dict[str, str]]:
            done = compiled(state.model.layers, state.model.others, state.step)
            # A prompt that leaves fewer positions than others ends before them.
            texts = (
                "".join(decode(self.tokenizer, row[: min(count, limit)].tolist(), (), ids))
                for row, count, ids, limit in zip(*map(np.asarray, done), rows, limits, strict=True)
            )
            return [
                {"prompt": title, "text": printable_lines(text)}
                for title, text in zip(self.titles, texts, strict=True)
            ]

        return sample


def read_prompts(config: FinetuneConfig, base: Base, tokenizer: Tokenizer) -> Samples | None:
    """Return the prompts of a configuration; None if it has none.

    Raises:
        DataError: The file cannot be read or has no prompt, or one of them is invalid or too long.
    """
    if config.sample_prompts is None:
        return None
    file = Path(config.sample_prompts)
    prompts = read_lines(file)
    if len(prompts) > MAX_PROMPTS:
        raise DataError(
            f"{file}: must have at most {MAX_PROMPTS} prompts, one in each line. It has "
            f"{len(prompts)}."
        )
    model, chat = TextModel(base, None, tokenizer), tokenizer.template is not None
    max_tokens = config.sample_tokens or SAMPLE_TOKENS
    encoded = [encode_prompt(model, prompt, None, chat, max_tokens) for prompt in prompts]
    titles = [prompt.title for prompt in prompts if isinstance(prompt, Prompt)]
    return Samples(titles, encoded, config.sample_temperature or 0.0, tokenizer)
