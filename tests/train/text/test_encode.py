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
    "the",
    "tokens",
    "don't",
    "1234567",
    "x=[];",
    "…",
    "größe",
    "🎉🎉",
    "日本語。テキスト",
    "<|end|>",
]
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", " \n  ", "\t", "", "\r\n"]


def make_text(size, seed=0):
    random.seed(seed)
    return "".join(random.choice(WORDS) + random.choice(SPACES) for _ in range(size))


def byte_level(pattern=LLAMA3, prefix=False):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


KINDS = {
    "llama3": (models.BPE(), None, byte_level()),
    "gpt2": (models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix": (models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "nfc": (models.BPE(), normalizers.NFC(), byte_level()),
    "metaspace": (models.BPE(), None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "bert": (models.BPE(unk_token="?"), None, pre_tokenizers.BertPreTokenizer()),
    # These are hardly cut: the first makes one word of a text, and the second strips each part.
    "one word": (models.BPE(), normalizers.Replace(" ", "▁"), None),
    "strip": (models.BPE(), normalizers.Strip(), byte_level()),
}


class Backend:
    """A tokenizer that records the lengths of the texts that it gets."""

    def __init__(self, kind):
        model, normalizer, pre_tokenizer = KINDS[kind]
        self.tokenizer = tokenizers.Tokenizer(model)
        if normalizer is not None:
            self.tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            self.tokenizer.pre_tokenizer = pre_tokenizer
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=["?", "<|end|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        self.tokenizer.train_from_iterator([make_text(300, seed) for seed in range(5)], trainer)
        self.lengths: list[int] = []

    def encode(self, text, **options):
        self.lengths.append(len(text))
        return self.tokenizer.encode(text, **options)

    def encode_batch(self, texts, **options):
        return self.tokenizer.encode_batch(texts, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_tokens_of_the_whole(monkeypatch, kind):
    monkeypatch.setattr(encode, "PART", 400)
    monkeypatch.setattr(encode, "MARGIN", 80)
    backend = Backend(kind)
    texts = [make_text(300, 10 + seed) for seed in range(20)]
    # Two of these have no place to cut, or none whose part has the same tokens.
    texts += ["short", "", "日本語" * 500, "a\n" * 1000, " " * 1000 + "a b c " * 300]
    for text, found in zip(texts, encode.encode_texts(backend, texts), strict=True):
        whole = backend.tokenizer.encode(text, add_special_tokens=False)
        np.testing.assert_array_equal(found.ids, whole.ids)
        np.testing.assert_array_equal(
            np.reshape(found.offsets, (-1, 2)), np.reshape(whole.offsets, (-1, 2))
        )
    num_whole = sum(length > 400 for length in backend.lengths)
    assert num_whole == {"prefix": 3, "one word": 8, "strip": 22}.get(kind, 2)


def test_no_long_text_is_tokenized_whole(monkeypatch):
    monkeypatch.setattr(encode, "PART", 1000)
    monkeypatch.setattr(encode, "MARGIN", 100)
    backend = Backend("llama3")
    text = make_text(5000)
    (found,) = encode.encode_texts(backend, [text])
    assert max(backend.lengths) == 1000 and sum(backend.lengths) < 1.4 * len(text)
    assert found.offsets[-1, 1] == len(text)
