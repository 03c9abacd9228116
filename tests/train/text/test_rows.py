"""Rows of JSON, tokenized. The texts of tests have brackets around the tokens with loss."""

import dataclasses
import datetime
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from effjax.train.errors import DataError
from effjax.train.text import rows as rows_module
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
from effjax.train.text.sources import read_rows
from tests.train.text.tiny_checkpoint import TEMPLATES, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because of <|im_end|> 🎉 and <b>."}
NO = {"role": "assistant", "content": "No"}
PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def tokenizer_of(template="chatml"):
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), template=TEMPLATES[template], processor="<s> $A")
        return load_tokenizer(folder, TODAY)


@pytest.fixture
def load(tmp_path):
    """Return a function that writes rows and loads them."""

    def load(rows, template="chatml", max_length=100, validation=0.0, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_rows(path, tokenizer_of(template), max_length, validation, **options)

    return load


def show(sequences):
    """Return the text of each sequence, with brackets around its tokens with loss."""
    texts, decode = [], tokenizer_of().backend.decode
    for first, last in itertools.pairwise(sequences.offsets):
        text = ""
        for has_loss, places in itertools.groupby(range(first, last), sequences.has_loss.item):
            part = decode(sequences.tokens[[*places]].tolist(), skip_special_tokens=False)
            text += f"⟦{part}⟧" if has_loss else part
        texts.append(text)
    return texts


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "Hello wörld 🎉", "id": 7}, "<s>⟦Hello wörld 🎉</s>⟧"),
        ({"prompt": "2 + 2 =", "completion": " 4", "text": None}, "<s>2 + 2 =⟦ 4</s>⟧"),
        ({"prompt": "", "completion": "all"}, "<s>⟦all</s>⟧"),
        # A token across the prompt and the completion has loss.
        ({"prompt": "for t", "completion": "he"}, "<s>for⟦ the</s>⟧"),
        # There is no second BOS or EOS.
        ({"text": "<s>Hi</s>"}, "<s>⟦Hi</s>⟧"),
        ({"prompt": "<s>Hi", "completion": " you</s>"}, "<s>Hi⟦ you</s>⟧"),
        ({"text": "Hi</s> "}, "<s>⟦Hi</s> </s>⟧"),
        ({"messages": [QUESTION, NO], "prompt": "Why?"}, f"{PROMPT}⟦No<|im_end|>\n⟧"),
    ],
)
def test_forms(load, row, text):
    assert show(load([row]).train) == [text]


def test_forms_of_other_programs(load):
    """They are read as `messages`, and the description says so."""
    sharegpt = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "No"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("W", "hy?")]}]
    rows = [
        {"conversations": sharegpt, "id": 1},
        {"instruction": "Why?", "input": "", "output": "No", "source": "a"},
        {"messages": [*parts, NO]},
        {"prompt": [QUESTION], "completion": [NO]},
    ]
    data = load(rows)
    assert show(data.train) == [f"{PROMPT}⟦No<|im_end|>\n⟧"] * 4
    assert data.notes == (
        "`conversations` are read as `messages`",
        "`from` and `value` are read as `role` and `content`",
        "`instruction`, `input` and `output` are read as `messages`",
        "unused fields: id, source",
    )
    named = load([{"q": "2 + 2 =", "a": " 4"}], columns="prompt=q, completion=a")
    assert show(named.train) == ["<s>2 + 2 =⟦ 4</s>⟧"] and not named.notes
    with pytest.raises(DataError, match="no row has the column 'b'"):
        load([{"text": "a"}], columns="tools=b")


FOUND = ("the prompt is what `chosen` and `rejected` begin with",)


def test_pairs_of_messages(load):
    for row, notes in (
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [NO]}, ()),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, NO]}, FOUND),
        ({"prompt": "Why?", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, NO]}, FOUND),
    ):
        data = load([{**row, "score_chosen": 2}], pairs=True)
        answers = ANSWER["content"], NO["content"]
        assert show(data.train) == [f"{PROMPT}⟦{answer}<|im_end|>\n⟧" for answer in answers]
        assert data.notes == (*notes, "unused fields: score_chosen")


def test_pairs_of_texts(load):
    row = {"question": "2 + 3 =", "chosen": " 5", "rejected": " six"}
    data = load([row], columns="prompt=question", pairs=True)
    assert show(data.train) == ["<s>2 + 3 =⟦ 5</s>⟧", "<s>2 + 3 =⟦ six</s>⟧"]
    # A pair is left out if the prompt of one answer fills the sequence.
    rows = [{**row, "prompt": prompt} for prompt in ("a", "2 + 3 =" * 9)]
    data = load(rows, max_length=20, pairs=True)
    assert (len(data.train), data.counts["skipped"], data.counts["cut"]) == (2, 1, 1)


def test_pairs_of_equal_answers_are_counted(load):
    row = {"prompt": "a", "chosen": "b", "rejected": "b"}
    lists = {"prompt": [QUESTION], "chosen": [NO], "rejected": [NO]}
    whole = {"chosen": [QUESTION, NO], "rejected": [QUESTION, NO]}
    # These answers differ where they are cut.
    cut = {"prompt": "a", "chosen": "x1" * 200, "rejected": "x1" * 200 + "y"}
    data = load([row, lists, whole, cut, {**row, "chosen": "c"}], pairs=True)
    note = "4 pairs without a preference: equal answers within 100 tokens"
    assert note in data.notes and len(data.train) == 10


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_of_each_template(load, name):
    """The tokens with loss are those of the turns, however the template marks them."""
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "No\n\n"}]
    train = load([{"messages": messages}], name, 300).train
    expected = []
    for text, spans in tokenizer_of(name).render_turns(messages):
        for first, last in reversed(spans):
            text = f"{text[:first]}⟦{text[first:last]}⟧{text[last:]}"
        expected.append(text)
    assert show(train) == expected
    # Templates write BOS themselves.
    token_to_id = tokenizer_of().backend.token_to_id
    assert np.sum(train.tokens == token_to_id("<s>")) == (name in ("llama3", "mistral"))
    if name == "chatml":  # as in transformers, a special token that an answer spells out is one
        assert np.sum(train.tokens == token_to_id("<|im_end|>")) == 4 + 1


@pytest.mark.parametrize("name", ["chatml", "generation", "qwen3"])
def test_turns_without_loss(load, name):
    for row in (
        {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, NO]},
        {"messages": [QUESTION, {**ANSWER, "train": False}, QUESTION, NO]},
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [NO]},
    ):
        (text,) = show(load([row], name, 300).train)
        before, trained = text.split("⟦")
        assert "Because" in before and "No" in trained


def test_tools_and_variables_are_given_to_the_template(load, tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    (text,) = show(load([{"messages": [QUESTION, call]}], "qwen3").train)
    assert '<tool_call>{"name": "add"}</tool_call>' in text.split("⟦")[1]
    rows = [{"messages": [QUESTION, ANSWER], "tools": [{"name": "add"}]}]
    (text,) = show(load(rows, "llama3", 300).train)
    assert '[{"name": "add"}]' in text
    file = tmp_path / "template.jinja"
    file.write_text("{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "base"), TODAY, file)
    row = {"messages": [QUESTION, NO], "chat_template_kwargs": {"style": "short"}}
    file.write_text(json.dumps(row))
    assert show(load_rows(file, tokenizer, 99, 0).train) == ["shortWhy?⟦No⟧"]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 100])
def test_long_text_is_split(load, length):
    """Each token but the first is predicted once."""
    text, tokenizer = "abcdefgh12345678", tokenizer_of()
    data = load([{"text": text}], max_length=length)
    ids = [*tokenizer.beginning, *tokenizer.backend.encode(text).ids, *tokenizer.end]
    train = data.train
    assert train.tokens.dtype == np.int32 and train.has_loss.dtype == bool
    assert train.lengths.max() <= length and train.lengths.min() >= 2
    assert train.lengths.sum() == len(train.tokens)
    assert train.tokens[train.has_loss].tolist() == ids[1:]
    assert not train.has_loss[train.offsets[:-1]].any() and train.num_losses == len(ids) - 1
    assert (data.counts["cut"], data.counts["skipped"]) == (0, 0)


def test_long_rows_are_cut_and_counted(load):
    rows = [
        {"prompt": "QXQXQXQX", "completion": "12345678"},
        {"prompt": "x", "completion": "y"},
        {"prompt": "QXQXQXQXQXQX", "completion": "1"},
        {"messages": [QUESTION, ANSWER]},
    ]
    data = load(rows, max_length=12)
    assert show(data.train) == ["<s>QXQXQXQX⟦123⟧", "<s>x⟦y</s>⟧"]
    assert (data.counts["rows"], data.counts["cut"], data.counts["skipped"]) == (4, 3, 2)
    with pytest.raises(DataError, match="no train row .* 4 lack a token with loss .*max_length"):
        load(rows, max_length=2)


MALFORMED = [
    (b'{"text": "a"', "is not JSON (Expecting ',' delimiter, column 13)"),
    (b'{"text": "\xff"}', "is not UTF-8"),
    (b'{"text": "\\ud83c"}', "half of a surrogate pair"),
    (b"[" * 100_000, "is not JSON that can be read"),
    ([1], "must be a JSON object, not a list"),
    (None, "not a null"),
    ({}, "It has nothing"),
    ({"k" * 10**6: 1}, "…"),
    ({"tekst": "a", "id\n": 1}, "It has `tekst`, `id\\n`."),
    ({"prompt": "a"}, "must have one of these"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--loss dpo"),
    ({"text": "a", "messages": []}, "must have only one of these"),
    ({"text": 1}, "`text` must be a string, not a number"),
    ({"text": ""}, "`text` must not be empty"),
    ({"text": "a", "weight": 0.5}, "`weight` would change what is trained"),
    ({"prompt": "a", "completion": ""}, "`completion` must not be empty"),
    ({"prompt": ["a"], "completion": "b"}, "`prompt` must be a string"),
    ({"messages": []}, "`messages` must be a list of at least one message"),
    ({"messages": "a"}, "`messages` must be a list of at least one message"),
    ({"messages": ["a"]}, "message 1 must be an object, not a string"),
    ({"messages": [{"content": "a"}]}, "message 1 must have a `role`"),
    ({"messages": [{"role": "user"}]}, "`content`, not nothing"),
    ({"messages": [{"role": "user", "content": [1]}]}, "`content`, not list"),
    ({"messages": [QUESTION]}, "`messages` must have a message of the role 'assistant'"),
    ({"messages": [QUESTION], "tools": 1}, "`tools`"),
    ({"messages": [{**ANSWER, "weight": 0.5}]}, "`weight` (=0.5) must be 0 or 1"),
    ({"messages": [{**ANSWER, "loss_mask": [1]}]}, "`loss_mask` would change the loss"),
    ({"messages": [{**ANSWER, "content": [{"type": "image"}]}]}, "must be text, not 'image'"),
    ({"messages": [ANSWER], "chat_template_kwargs": {"tools": []}}, "must not have `tools`"),
    ({"conversations": [{"from": "bot", "value": "a"}]}, "`from` (='bot') must be one of"),
    ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "`from` (=['gpt']) must be one of"),
]
MALFORMED_PAIRS = [
    ({"prompt": "a", "chosen": "b"}, "It lacks `rejected`, and has `prompt`, `chosen`"),
    ({"chosen": "a b", "rejected": "a c"}, "must have a `prompt`"),
    ({"chosen": [ANSWER], "rejected": [NO]}, "must begin with the same messages"),
    ({"chosen": [QUESTION, NO], "rejected": [QUESTION]}, "must end with different answers"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "`chosen` must not be empty"),
    ({"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [NO]}, "'assistant'"),
    ({"prompt": "a", "chosen": 1, "rejected": "b"}, "`chosen` must be a string, not a number"),
]


@pytest.mark.parametrize(
    ("row", "pairs", "words"),
    [
        *((row, False, words) for row, words in MALFORMED),
        *((row, True, words) for row, words in MALFORMED_PAIRS),
    ],
)
def test_malformed_rows(tmp_path, row, pairs, words):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"} if pairs else {"text": "good"}
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(good).encode() + b"\n\n" + line)
    with pytest.raises(DataError) as raised:
        load_rows(path, tokenizer_of(), 10, 0, pairs=pairs)
    error = str(raised.value)
    assert "rows.jsonl: line 3: " in error and words in error
    assert "\n" not in error and len(error) < 500


def test_refused_by_the_template(load):
    rows = [{"text": "good"}, {"messages": [QUESTION, QUESTION, ANSWER]}]
    with pytest.raises(DataError, match=r"line 2: the chat template .*Roles must alter"):
        load(rows, "mistral")


def test_files(tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", tokenizer_of()
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(No such file"):
        load_rows(path, tokenizer, 10)
    with pytest.raises(DataError, match="must be a regular file"):
        load_rows(tmp_path, tokenizer, 10)
    path.write_text("")
    with pytest.raises(DataError, match="contains no row"):
        load_rows(path, tokenizer, 10)
    # As some editors write it: a byte order mark, carriage returns, no last line end.
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "\xe2\x80\xa8"}')
    assert show(load_rows(path, tokenizer, 10, 0).train) == ["<s>⟦a</s>⟧", "<s>⟦\u2028</s>⟧"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder that `datasets` would write copies into."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_parquet(file, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), file)


def test_tables(tmp_path, cache):
    write_parquet(tmp_path / "rows.parquet", [{"messages": [QUESTION, NO]}, {"messages": [NO]}])
    (tmp_path / "rows.csv").write_text('text,note\n"a, b",1\n')
    names = [str(tmp_path / name) for name in ("rows.parquet", "rows.csv")]
    data = load_rows(names, tokenizer_of(), 100, 0)
    assert show(data.train)[2] == "<s>⟦a, b</s>⟧" and len(data.train) == 3
    assert data.notes == ("unused fields: note",)
    assert not [*cache.rglob("*.arrow")]
    (tmp_path / "rows.csv").write_text("text\n")
    with pytest.raises(DataError, match=r"rows\.csv: contains no row"):
        load_rows(names[1], tokenizer_of(), 100, 0)


@pytest.mark.usefixtures("cache")
def test_settings_of_the_process_are_kept(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("effjax.train.text.sources.CHUNK", 2)
    (tmp_path / "rows.csv").write_text("text\na\nb\nc\n")

    def settings():
        has_no_bars = datasets.are_progress_bars_disabled()
        return [*warnings.filters], datasets.logging.get_verbosity(), has_no_bars

    before, places = settings(), []
    for row in read_rows(str(tmp_path / "rows.csv")):
        places.append(row.place)
        assert settings() == before
    assert places == ["row 1", "row 2", "row 3"] and settings() == before


@pytest.mark.usefixtures("cache")
def test_cells_of_csv_are_texts(tmp_path):
    file = tmp_path / "rows.csv"
    cells = ["NA", "None", "null", "nan", "007", "1.10", "1e3", "true", "-", " a ", "2024-01-02"]
    file.write_text("\ufeffprompt,completion\n" + "".join(f"Q,{cell}\n" for cell in cells))
    assert [row.content["completion"] for row in read_rows(str(file))] == cells
    # An empty cell is an absent field, except in the column of the prompt.
    file.write_text('prompt,input,output\n,"",a\nb,"x\r\ny",""\n')
    contents = [row.content for row in read_rows(str(file))]
    assert contents == [{"prompt": "", "output": "a"}, {"prompt": "b", "input": "x\r\ny"}]
    renamed = [row.content for row in read_rows(str(file), "input")]
    assert renamed[0] == {"input": "", "output": "a"}
    file.write_text("question,completion\n,a\n")
    data = load_rows(file, tokenizer_of(), 99, 0, columns="prompt=question")
    assert show(data.train) == ["<s>⟦a</s>⟧"]
    file.write_text("instruction,input,output\nCode?,NA,Namibia\nSymbol?,,Na\n")
    first, second = show(load_rows(file, tokenizer_of(), 99, 0).train)
    assert "Code?\n\nNA<|im_end|>" in first and "Symbol?<|im_end|>" in second


@pytest.mark.usefixtures("cache")
def test_keys_that_arrow_adds_are_removed(tmp_path):
    """Those of structs, at any depth. Entries of lists stay."""
    rows = [
        {
            "messages": [QUESTION, {"role": "assistant", "tool_calls": [{"arguments": {key: 1}}]}],
            "tools": [{"name": "f", "parameters": {"properties": {key: {"enum": ["a", None]}}}}],
            "chat_template_kwargs": {key: [None, {key: 1}]},
            "empty": {"properties": {} if key == "a" else {"b": 1}},
        }
        for key in ("a", "b")
    ]
    write_parquet(tmp_path / "rows.parquet", rows)
    assert [row.content for row in read_rows(str(tmp_path / "rows.parquet"))] == rows


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b'text\na\n"caf\xe9"\n', "line 3: is not UTF-8"),
        ("rows.csv", "text\na\n".encode("utf-16"), "line 1: is not UTF-8"),
        ("rows.csv", b"prompt,completion\na,b,c\n", "row 1 has more cells"),
        ("rows.csv", b"prompt,completion\na,b\na,b,c\n", "Expected 2 fields in line 3, saw 3"),
        ("rows.csv", b'text\na\n"b\n', "EOF inside string starting at row 2"),
        ("rows.csv", b"", "cannot be loaded (No columns"),
        ("rows.parquet", b"PAR1 and other bytes", "cannot be loaded (Parquet magic bytes"),
        ("rows.parquet", b"", "cannot be loaded (Parquet file size is 0"),
    ],
)
def test_damaged_tables(tmp_path, capfd, name, content, words):
    """The error is one line with the row, without advice about data sets of the Hub."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        [*read_rows(str(tmp_path / name))]
    error = str(raised.value)
    assert f"{name}: " in error and words in error
    assert "\n" not in error and "split" not in error
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("cache")
def test_bytes_of_parquet_that_are_not_utf8(tmp_path):
    """Arrow reads them as they are, so that a row in the middle is the first to fail."""
    file = tmp_path / "rows.parquet"
    write_parquet(file, [{"text": "a"}] * 12 + [{"text": "cafe"}])
    file.write_bytes(file.read_bytes().replace(b"cafe", b"caf\xe9"))
    with pytest.raises(DataError, match=r"rows\.parquet: row 13: .*'utf-8' codec can't decode"):
        [*read_rows(str(file))]


def test_what_exists_is_a_file(tmp_path, monkeypatch):
    """Also if its name has a colon, or is one of the Hub with a split."""
    monkeypatch.chdir(tmp_path)
    names = "a:b.jsonl", "data:v2/x.jsonl", "owner/name:test", "owner/name", "owner/n@main:a:b"
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('{"text": "a"}')
        assert [row.content for row in read_rows(name)] == [{"text": "a"}]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["a:b.csv", "data:v2/x.csv", "https:/[1] *?.csv"])
def test_names_of_tables(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("text\na\n")
    assert [row.content for row in read_rows(name)] == [{"text": "a"}]


@pytest.mark.parametrize(
    "name",
    ["owner/rows.jsonl", "owner/rows.JSON", "owner/rows.csv", "owner/rows.parquet",
     "owner/rows.jsonl:test", "owner/data:v2/rows.jsonl"],
)  # fmt: skip
def test_missing_files(name):
    """A name with the suffix of a file is not one of the Hub."""
    with pytest.raises(DataError, match="cannot be read .No such file") as raised:
        [*read_rows(name)]
    assert str(raised.value).startswith(f"{name}: ")


def numbered(count, text="row"):
    return [{"text": f"{text} {i}"} for i in range(count)]


def show_numbered(*numbers, text="row"):
    return [f"<s>⟦{text} {i}</s>⟧" for i in numbers]


@pytest.mark.parametrize(("validation", "size"), [(0.1, 4), (0.25, 10), (7, 7), (0, 0)])
def test_validation_rows(load, validation, size):
    data = load(numbered(40), validation=validation)
    held_out = show(data.validation)
    assert len(held_out) == size
    assert sorted(show(data.train) + held_out) == sorted(show_numbered(*range(40)))
    # The split depends neither on the order of the rows nor on other keys.
    rows = [{"id": i, **row} for i, row in enumerate(numbered(40)[::-1])]
    assert set(show(load(rows, validation=validation).validation)) == set(held_out)
    assert ("validation_tokens" in data.describe()) == bool(size)


def test_same_rows_are_in_the_same_part(load):
    data = load(numbered(10) * 3, validation=0.3)
    assert not set(show(data.train)) & set(show(data.validation)) and len(data.validation) == 9
    # Many equal rows are trained on, although some of them have the smallest hashes.
    for name in map(str, range(8)):
        data = load(numbered(3, name) + [{"text": name}] * 17, validation=0.1)
        assert len(data.validation) == 2 and len(data.train) == 18


def answered(form, prompt, answer):
    """Return a row of one of the forms with a prompt."""
    question = {"role": "user", "content": prompt}
    chosen = {"role": "assistant", "content": answer}
    return {
        "texts": {"prompt": prompt, "completion": answer},
        "messages": {"messages": [question, chosen, QUESTION, NO]},
        "lists": {"prompt": [question, NO, QUESTION], "completion": [chosen]},
        "pairs": {"prompt": prompt, "chosen": answer, "rejected": f"{answer}?"},
        "pairs of lists": {"prompt": [question], "chosen": [chosen], "rejected": [NO]},
    }[form]


@pytest.mark.parametrize("form", ["texts", "messages", "lists", "pairs", "pairs of lists"])
def test_rows_of_a_prompt_are_in_the_same_part(load, form):
    rows = [answered(form, f"Q{i:02}", f" a{j}") for i in range(20) for j in range(5)]
    options = {"pairs": "pairs" in form, "max_length": 200}

    def prompts(sequences):
        return {re.search(r"Q\d\d", text)[0] for text in show(sequences)}

    data = load(rows, validation=0.2, **options)
    held_out = prompts(data.validation)
    assert len(held_out) == 4 and len(prompts(data.train)) == 16
    assert not held_out & prompts(data.train)
    assert prompts(load(rows[::-1], validation=0.2, **options).validation) == held_out
    # As near to the number as whole prompts are: two of 8, and two of 12.
    for number, held_out in (8, 2), (12, 2), (3, 1):
        assert len(prompts(load(rows, validation=number, **options).validation)) == held_out
    with pytest.raises(DataError, match=r"some of the 100 rows .* \(20 groups\)"):
        load(rows, validation=2, **options)


def test_rows_without_a_prompt(load):
    """They are held out by their texts, although they begin with the same characters."""
    greeting = [{"role": "system", "content": "Be brief."}, NO]
    question = ({"role": "user", "content": f"Q{i}"} for i in range(10))
    for rows in (
        [{"prompt": "", "completion": f"row {i}"} for i in range(10)],
        [{"messages": [*greeting, one, NO]} for one in question],
    ):
        assert len(load(rows, validation=0.2).validation) == 2


@pytest.mark.parametrize(
    ("rows", "validation", "words"),
    [
        (numbered(4), 0.1, "must hold out some of the 4 rows"),
        (numbered(2) * 10, 0.1, r"some of the 20 rows .*, and those .* together \(2 groups\)"),
        (numbered(4), 4, r"`validation` \(=4\) must .* 4 rows .*, not all"),
        (numbered(1) * 4, 0.5, r"\(1 group\)"),
    ],
)
def test_validation_must_leave_rows(load, rows, validation, words):
    with pytest.raises(DataError, match=words):
        load(rows, validation=validation)


def test_validation_files(load, tmp_path):
    second, third = tmp_path / "second.jsonl", tmp_path / "third.jsonl"
    second.write_text('{"text": "row 3"}')
    third.write_text('{"text": "row 9"}')
    data = load(numbered(5), validation_path=[str(second), str(third)])
    assert show(data.validation) == show_numbered(3, 9)
    assert show(data.train) == show_numbered(0, 1, 2, 4)
    assert (data.counts["rows"], data.counts["repeated"]) == (7, 1)
    # Rows that only share a prompt stay.
    second.write_text('{"prompt": "a", "completion": "b"}')
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}]
    assert show(load(rows, validation_path=second).train) == ["<s>a⟦c</s>⟧"]
    second.write_text("\n".join(json.dumps(row) for row in numbered(5)))
    with pytest.raises(DataError, match="no train row .* 5 are also validation rows"):
        load(numbered(5), validation_path=second)
    second.write_text('{"text": "row 3"}\nrow')
    with pytest.raises(DataError, match=r"second\.jsonl: line 2: is not JSON"):
        load(numbered(5), validation_path=second)


def test_several_data_sets(tmp_path):
    """JSON arrays and lines; an epoch repeats their train rows as the weights say."""
    (tmp_path / "a.json").write_text(json.dumps(numbered(10), indent=1))
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, numbered(10, "b"))))
    names = [str(tmp_path / name) for name in ("a.json", "b.jsonl")]
    data = load_rows(names, tokenizer_of(), 30, 4, weights=[0.5, 2])
    train, held_out = show(data.train), set(show(data.validation))
    assert len(held_out) == 4 and not held_out & set(train) and data.counts["rows"] == 20
    of_a, of_b = ([text for text in train if name in text] for name in ("row", "b "))
    rows_of_b = 10 - sum("b " in text for text in held_out)
    assert len(of_b) == 2 * rows_of_b == 2 * len(set(of_b))
    assert len(of_a) == round((10 - 4 + 10 - rows_of_b) / 2) == len(set(of_a))
    equal = load_rows(names, tokenizer_of(), 30, 4)
    assert set(show(equal.validation)) == held_out


def test_digest(load, monkeypatch):
    rows = [*numbered(9), {"text": "long " * 99}]
    data = load(rows, validation=3)
    other = load([*rows[1:], {"prompt": "row", "completion": " 0"}], validation=3)
    no_loss = dataclasses.replace(data.train, has_loss=np.zeros_like(data.train.has_loss))
    digests = {data.digest, other.digest, dataclasses.replace(data, train=no_loss).digest}
    assert len(digests) == 3
    monkeypatch.setattr(rows_module, "CHUNK", 20)
    assert load(rows, validation=3).describe()["sha256"] == data.digest


def test_processes_agree(tmp_path):
    """Another process reads the same sequences, whatever its hash seed and threads."""
    folder, file = write_tokenizer(tmp_path / "checkpoint"), tmp_path / "rows.jsonl"
    rows = [{"messages": [{**QUESTION, "content": f"no. {i}"}, ANSWER]} for i in range(50)]
    file.write_text("\n".join(map(json.dumps, rows)))
    code = f"""
import datetime
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
tokenizer = load_tokenizer({str(folder)!r}, datetime.date(2026, 1, 2))
print(load_rows({str(file)!r}, tokenizer, 30).digest, end="")
"""
    digest = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "false"},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert digest == load_rows(file, load_tokenizer(folder, TODAY), 30).digest
