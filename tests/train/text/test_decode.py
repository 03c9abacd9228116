"""Texts of tokens, in pieces."""

import datetime

import pytest

from effjax.train.text.chat import load_tokenizer
from effjax.train.text.decode import decode
from effjax.train.text.tiny import train_tokenizer, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

BEGIN = "\N{LOWER ONE EIGHTH BLOCK}"  # what these tokenizers write for a space
TEXTS = (
    "the cat sat on the mat", "  two  spaces ", "naïve 🎉🎉 日本語\n\n end", "a</s> b</s>",
    "an odd \N{REPLACEMENT CHARACTER} b \N{REPLACEMENT CHARACTER}",
)  # fmt: skip


def make_tokenizer(kind):
    """Return a tokenizer of bytes, one that marks the beginning of words, or that of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "bytes":
        return train_tokenizer()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BEGIN), normalizers.Replace(" ", BEGIN)]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(BEGIN, " "), decoders.ByteFallback(), decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=[BEGIN], max_token_length=6,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sat on the mat, two ends of an odd space"] * 9, trainer)
    content = tokenizer.to_str()  # bytes are no special tokens
    for byte in range(256):
        name = f'"content":"<0x{byte:02X}>"'
        before, _, after = content.partition(name)
        content = before + name + after.replace('"special":true', '"special":false', 1)
    return Tokenizer.from_str(content)


@pytest.fixture(scope="module", params=["bytes", "metaspace", "llama2"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, make_tokenizer(request.param), None)
    return load_tokenizer(folder, datetime.date(2026, 1, 2))


@pytest.mark.parametrize("text", TEXTS)
def test_text_continues_what_is_before(tokenizer, text):
    """A text and its continuation are the whole text, with the space between them."""
    ids = tokenizer.backend.encode(text).ids
    whole = tokenizer.backend.decode(ids)
    assert "".join(decode(tokenizer, ids)) == whole
    complete = 0
    for i in range(len(ids) + 1):
        before = tokenizer.backend.decode(ids[:i])
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):
            complete += 1
            assert before + "".join(decode(tokenizer, ids[i:], before=ids[:i])) == whole
    assert complete >= 5


def test_incomplete_character(tokenizer):
    """Its bytes are shown at the end, and no error."""
    ids = tokenizer.backend.encode("x 🎉").ids
    *pieces, last = decode(tokenizer, ids[:-1])
    assert "".join(pieces).strip() == "x" and {*last} == {"\N{REPLACEMENT CHARACTER}"}
    # A broken character, with text and another one behind it.
    broken = [*ids[:-1], *tokenizer.backend.encode("the ").ids, *ids[-3:-1], ids[-1]]
    assert "the" in "".join(decode(tokenizer, broken))
