"""Tokenization of long texts in parts."""

import random

import numpy as np
import pytest

from effjax.train.text import encode

tokenizers = pytest.importorskip("tokenizers")
models, normalizers, pre_tokenizers = (
    tokenizers.models, tokenizers.normalizers, tokenizers.pre_tokenizers
)  # fmt: skip

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    "the", "tokens", "don't", "1234567", "x=[];", "…", "größe", "🎉🎉", "日本語。テキスト",
    "<|end|>",
]  # fmt: skip
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", " \n  ", "\t", "", "\r\n"]


def make_text(size, seed):
    random.seed(seed)
    return "".join(random.choice(WORDS) + random.choice(SPACES) for _ in range(size))


def byte_level():
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


# A normalizer, a pre-tokenizer, and how many texts of more than one part are tokenized whole: those
# that have no place to cut, or none whose part has the same tokens.
KINDS = {
    "llama3": (None, byte_level(), 2),
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), 2),
    "prefix": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), 3),
    "nfc": (normalizers.NFC(), byte_level(), 2),
    "metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="first"), 2),
    "bert": (None, pre_tokenizers.BertPreTokenizer(), 2),
    # These are hardly cut: the first makes one word of a text, and the second strips each part.
    "one word": (normalizers.Replace(" ", "▁"), None, 3),
    "strip": (normalizers.Strip(), byte_level(), 21),
}


class Backend:
    """A tokenizer that records the lengths of the texts that it gets."""

    def __init__(self, normalizer, pre_tokenizer):
        self.tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="?"))
        if normalizer is not None:
            self.tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            self.tokenizer.pre_tokenizer = pre_tokenizer
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=["?", "<|end|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        self.tokenizer.train_from_iterator([make_text(300, seed) for seed in range(5)], trainer)
        self.encode_batch, self.lengths = self.tokenizer.encode_batch, []

    def encode(self, text, **options):
        self.lengths.append(len(text))
        return self.tokenizer.encode(text, **options)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(encode, "PART", 1000)
    monkeypatch.setattr(encode, "MARGIN", 100)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_tokens_of_the_whole(kind):
    *parts, num_whole = KINDS[kind]
    backend = Backend(*parts)
    texts = [make_text(300, 10 + seed) for seed in range(20)]
    texts += ["short", "", "日本語" * 500, "a\n" * 1000, " " * 1000 + "a b c " * 300]
    for text, found in zip(texts, encode.encode_texts(backend, texts), strict=True):
        whole = backend.tokenizer.encode(text, add_special_tokens=False)
        np.testing.assert_array_equal(found.ids, whole.ids)
        np.testing.assert_array_equal(
            np.reshape(found.offsets, (-1, 2)), np.reshape(whole.offsets, (-1, 2))
        )
    assert sum(length > 1000 for length in backend.lengths) == num_whole


def test_little_is_tokenized_twice():
    backend, text = Backend(None, byte_level()), make_text(5000, 0)
    encode.encode_texts(backend, [text])
    assert max(backend.lengths) == 1000 and sum(backend.lengths) < 1.4 * len(text)
