"""Tokens after a prompt, one at a time."""

import jax
import numpy as np
import pytest

from effjax.models import DecoderConfig, generate, init_decoder
from effjax.models.generate import check_options
from effjax.train.text.generate import generate_tokens
from effjax.train.text.tiny import SIZES

LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [64.0] * 4}
LONG |= {"original_max_position_embeddings": 28, "attention_factor": 1.0}  # within the second turn


@pytest.mark.parametrize(("temperature", "scaling"), [(0.0, None), (1.0, None), (0.0, LONG)])
def test_turns_of_a_conversation(temperature, scaling):
    """Each turn reads the whole conversation: its tokens are those of `models.generate`."""
    sizes = SIZES | {"num_hidden_layers": 1, "initializer_range": 1.0, "rope_scaling": scaling}
    config = DecoderConfig.from_json({"model_type": "llama", "vocab_size": 64, **sizes})
    params, key = init_decoder(config, jax.random.key(0)), jax.random.key(3)

    def run(prompt, size, stop_tokens=(), num_slots=48):
        options = check_options(
            config, max_new_tokens=6, temperature=temperature, stop_tokens=stop_tokens
        )
        tokens = generate_tokens(
            config, options, *params, prompt, key, size=size, num_slots=num_slots
        )
        return list(tokens)

    prompt, answers = np.random.default_rng(0).integers(0, 64, 19).tolist(), []
    for size in 19, 32, 48:  # without padding, with some, and up to the end of the cache
        answers.append(run(prompt, size))
        whole = generate(
            config, *params, np.array([prompt]), max_new_tokens=6, temperature=temperature, key=key
        )
        assert answers[-1] == whole.tokens[0].tolist()
        prompt = [*prompt, *answers[-1], 7]
    stop = answers[-1][2]
    first = answers[-1].index(stop)
    assert run(prompt[:-7], 48, [stop]) == answers[-1][: first + 1]
    assert run(prompt, 48, num_slots=len(prompt) + 3) == run(prompt, 48)[:3]  # the cache ends
    assert len({tuple(answer) for answer in answers}) == 3
