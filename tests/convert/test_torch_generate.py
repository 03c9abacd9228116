"""Comparison of generated tokens with those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
pytest.importorskip("transformers", reason="requires transformers")

from effjax.models import DecoderConfig, generate  # noqa: E402
from tests.convert import decoders  # noqa: E402

LENGTHS = np.array([9, 4, 6])
PROMPTS = np.random.default_rng(2).integers(1, 37, (3, 9))
NEW = 10


@pytest.mark.parametrize("name", decoders.CONFIGS)
def test_greedy_tokens_are_those_of_transformers(name):
    """Prompts of different lengths, padded at the start there and at the end here."""
    model = decoders.make_transformers(decoders.CONFIGS[name]).eval()
    mask = np.arange(9) >= 9 - LENGTHS[:, None]
    padded = np.zeros_like(PROMPTS)
    padded[mask] = np.concatenate([row[:n] for row, n in zip(PROMPTS, LENGTHS, strict=True)])
    inputs = dict(input_ids=torch.from_numpy(padded), attention_mask=torch.from_numpy(mask))
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    free = model.generate(**inputs, **options, eos_token_id=None)[:, 9:].numpy()
    stop = int(free[0, 4])
    want = model.generate(**inputs, **options, eos_token_id=stop)[:, 9:].numpy()

    config = DecoderConfig.from_json(decoders.CONFIGS[name])
    params = decoders.stack(decoders.checkpoint(config), config)
    tokens, lengths = generate(
        config,
        *jax.tree.map(jnp.asarray, params),
        PROMPTS,
        lengths=LENGTHS,
        max_new_tokens=NEW,
        stop_tokens=[stop],
    )
    assert lengths[0] <= 5
    # Their result is shorter if all rows have stopped.
    np.testing.assert_array_equal(tokens[:, : want.shape[1]], want)
    assert not np.asarray(tokens)[:, want.shape[1] :].any()
