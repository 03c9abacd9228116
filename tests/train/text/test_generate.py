"""The cache of a conversation."""

import itertools

import jax
import numpy as np

from effjax.models import DecoderConfig, init_decoder
from effjax.models.generate import check_options
from effjax.train.text import generate
from effjax.train.text.generate import ChatGenerator, TokenGenerator, generation_mesh
from effjax.train.text.tiny import SIZES


def test_keys_and_values_of_a_common_beginning_are_used_again(monkeypatch):
    """The tokens are those of the whole prompt, and only the new part of a prompt runs."""
    monkeypatch.setattr(generate, "CHUNK", 8)
    sizes = SIZES | {"num_hidden_layers": 1, "initializer_range": 1.0}
    config = DecoderConfig.from_json({"model_type": "llama", "vocab_size": 64, **sizes})
    params = init_decoder(config, jax.random.key(0))
    options = check_options(config, max_new_tokens=6)
    chat = ChatGenerator(config, options, *params, 48, generation_mesh(None))
    pad, parts = generate._pad, []

    def count_part(tokens, size):
        parts.append(tokens)
        return pad(tokens, size)

    monkeypatch.setattr(generate, "_pad", count_part)

    def answer(prompt, count=6):
        return list(itertools.islice(chat.answer(prompt, jax.random.key(0)), count))

    rng = np.random.default_rng(0)
    first, second, other = (rng.integers(0, 64, size).tolist() for size in (19, 9, 5))
    prompts, answers = [first], [answer(first)]
    prompts.append([*first, *answers[0], *second])
    answers.append(answer(prompts[1], 3))  # stopped
    assert len(parts) == 3 + 2 and chat.cached == [*prompts[1], *answers[1][:2]]
    prompts += [[*prompts[1], *answers[1], *other], [*first[:7], *other], [*first[:7], *other]]
    answers += map(answer, prompts[2:])
    assert len(parts) == 5 + 1 + 1 + 1
    whole = TokenGenerator(config, options, *params).generate_each(prompts, 0)
    for tokens, expected in zip(answers, map(list, whole), strict=True):
        assert tokens == expected[: len(tokens)] and len(set(expected)) > 2
    full = rng.integers(0, 64, 45).tolist()
    assert len(answer(full)) == 3  # the context ends
