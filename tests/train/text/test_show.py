"""The text of `effjax finetune --show`."""

import datetime
import io
import json

import pytest
from rich.console import Console

from effjax.train.errors import DataError
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.show import show_rows
from effjax.train.text.tiny import CHATML, train_tokenizer, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")

# It has the reasoning of the last turn only, so that each answer has a sequence.
REASONING = CHATML.replace(
    "+ message.content",
    "+ (message.thinking if loop.last and message.thinking else '') + message.content",
)


def llama2_tokenizer():
    """Return a tokenizer whose decoder strips the space that a text begins with."""
    special = ["<unk>", "<s>", "</s>"]
    words = ["▁", "▁the", "▁cat", "▁sat", *(f"<0x{i:02X}>" for i in range(256))]
    scores = [(word, -1.0) for word in special + words]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, byte_fallback=True))
    tokenizer.add_special_tokens(special)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.fixture
def show(tmp_path):
    """Return a function that shows rows, as the lines of a file."""

    def show(
        *rows, tokenizer=None, template=CHATML, count=9, with_ids=False, terminal=False, **options
    ):
        write_tokenizer(tmp_path, tokenizer or train_tokenizer(), template)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = FinetuneConfig(checkpoint=str(tmp_path), data=[str(file)], **options)
        output = io.StringIO()
        color = "standard" if terminal else None
        console = Console(file=output, force_terminal=terminal, color_system=color, width=20)
        tokenizer = load_tokenizer(tmp_path, datetime.date(2026, 1, 31))
        show_rows(console, config, tokenizer, count, with_ids)
        return output.getvalue().replace(f"{file}: line ", "").splitlines()

    return show


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def test_a_text_is_as_it_is_in_the_row(show):
    """Its spaces, tabs and brackets stay, and its lines cannot be confused with the marks."""
    prompt, completion = " |+>\u27e6a\u27e7 (1)\n+|b\tc", "  d \n\n+>e\u27e6\x1b[1m"
    lines = show({"prompt": prompt, "completion": completion})
    assert lines[1:] == [
        " | |+>\u27e6a\u27e7 (1)", " |+|b\tc", "+>  d ", "+|", "+|+>e\u27e6\\x1b[1m</s>"
    ]  # fmt: skip
    marked = [(line[0], line[1:]) for line in lines[1:]]
    for mark, text in (" ", prompt), ("+", f"{completion}</s>".replace("\x1b", "\\x1b")):
        parts = [line for of, line in marked if of == mark]
        assert "".join(f"\n{part[1:]}" for part in parts)[1:] == text


def test_a_decoder_does_not_change_the_text(show):
    """Nor do tokens that are parts of characters."""
    rows = {"prompt": "the cat", "completion": " sat"}, {"prompt": " é", "completion": " é"}
    lines = show(*rows, tokenizer=llama2_tokenizer())
    assert lines[1:3] == [" |<s>the cat", "+> sat</s>"]
    assert lines[4:] == [" |<s> é", "+> é</s>"]
    assert show(rows[0], tokenizer=llama2_tokenizer(), with_ids=True)[1:] == [
        "  1 '<s>'", "  4 '▁the'", "  5 '▁cat'", "+ 6 '▁sat'", "+ 2 '</s>'"
    ]  # fmt: skip


def test_rows_of_several_sequences(show):
    """A long text, and a conversation that the template renders differently for each answer."""
    lines = show({"text": "0123456789"}, {"text": "ab"}, max_length=8, count=1)
    assert lines == [
        "1: sequence 1 of 2, 8 tokens, 7 with loss", " |0", "+>1234567",
        "1: sequence 2 of 2, 4 tokens, 3 with loss", " |7", "+>89</s>",
    ]  # fmt: skip
    turns = user("a"), assistant("b", thinking="[x]"), user("c"), assistant("d", thinking="[y]")
    lines = show({"messages": turns}, template=REASONING)
    assert [line for line in lines if line[0] not in " "] == [
        "1: sequence 1 of 2, 19 tokens, 6 with loss", "+|[x]b<|im_end|>",
        "1: sequence 2 of 2, 35 tokens, 6 with loss", "+|[y]d<|im_end|>",
    ]  # fmt: skip


def test_rows_that_are_cut(show):
    row = {"prompt": "01", "completion": "2345"}
    assert show(row, max_length=4) == ["1: 4 tokens, 2 with loss, 3 tokens cut off", " |01", "+>23"]
    left_out = "1: left out, no token with loss in the first 2 tokens"
    assert show(row, row, max_length=2, count=1) == [left_out]


def test_pairs(show):
    row = {"prompt": "a", "chosen": "xy", "rejected": "d"}
    lines = show(row, row | {"chosen": "b" * 9, "prompt": "a" * 9}, loss="dpo", max_length=8)
    assert lines == [
        "1: chosen, 4 tokens, 3 with loss", " |a", "+>xy</s>",
        "1: rejected, 3 tokens, 2 with loss", " |a", "+>d</s>",
        "2: left out, no token with loss in the first 8 tokens",
    ]  # fmt: skip


def test_a_terminal(show):
    """Text with loss is green, and long lines stay whole."""
    lines = show({"prompt": "a" * 30, "completion": "x"}, terminal=True)
    assert lines[1:] == [f"\x1b[2m |{'a' * 30}\x1b[0m", "\x1b[1;32m+>x</s>\x1b[0m"]


def test_a_malformed_row(show):
    with pytest.raises(DataError, match="rows.jsonl: line 2: must have one of these"):
        show({"text": "a"}, {"prompt": "a"})
    assert len(show({"text": "a"}, {"prompt": "a"}, count=1)) == 3
