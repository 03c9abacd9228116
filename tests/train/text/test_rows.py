"""Rows of JSON, tokenized."""

import dataclasses
import datetime
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from effjax.train.errors import DataError
from effjax.train.text import rows as rows_module
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
from tests.train.text.tiny_checkpoint import TEMPLATES, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because of <|im_end|> 🎉 and <b>."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"), processor="<s> $A")
    return load_tokenizer(folder, TODAY)


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    return {
        name: load_tokenizer(
            write_tokenizer(folder, template=TEMPLATES[name], processor="<s> $A"), TODAY
        )
        for name, folder in folders.items()
    }


@pytest.fixture
def load(tmp_path, tokenizer):
    """Return a function that writes rows and loads them."""

    def load(rows, tokenizer=tokenizer, max_length=100, validation=0.0, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_rows(path, tokenizer, max_length, validation, **options)

    return load


def texts(sequences, tokenizer, with_loss=False):
    """Return the text of each sequence, or of its tokens with loss."""
    result = []
    for first, last in zip(sequences.offsets, sequences.offsets[1:], strict=False):
        ids = sequences.tokens[first:last]
        ids = ids[sequences.has_loss[first:last]] if with_loss else ids
        result.append(tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False))
    return result


def test_forms(load, tokenizer):
    rows = [
        {"text": "Hello wörld 🎉", "id": 7},
        {"prompt": "2 + 2 =", "completion": " 4", "text": None},
        {"prompt": "", "completion": "all"},
        {"messages": [QUESTION, ANSWER], "prompt": "Why?"},
    ]
    train = load(rows).train
    chat = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    answer = "Because of <|im_end|> 🎉 and <b>.<|im_end|>\n"
    assert texts(train, tokenizer) == [
        "<s>Hello wörld 🎉</s>", "<s>2 + 2 = 4</s>", "<s>all</s>", chat + answer
    ]  # fmt: skip
    assert texts(train, tokenizer, True) == ["Hello wörld 🎉</s>", " 4</s>", "all</s>", answer]
    assert train.tokens.dtype == np.int32 and train.has_loss.dtype == bool
    assert train.lengths.sum() == len(train.tokens) and train.num_losses == train.has_loss.sum()


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_of_each_template(load, tokenizers_of, name):
    """The tokens with loss are those of the turns, however the template marks them."""
    tokenizer = tokenizers_of[name]
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "No\n\n"}]
    train = load([{"messages": messages}], tokenizer, 300).train
    turns = tokenizer.render_turns(messages)
    assert texts(train, tokenizer) == [text for text, _ in turns]
    assert texts(train, tokenizer, True) == [
        "".join(text[first:last] for first, last in spans) for text, spans in turns
    ]
    # Templates write BOS themselves.
    bos = tokenizer.backend.token_to_id("<s>")
    assert np.sum(train.tokens == bos) == (name in ("llama3", "mistral"))


def test_no_second_bos_or_eos(load, tokenizer):
    rows = [
        {"text": "<s>Hi</s>"},
        {"prompt": "<s>Hi", "completion": " you</s>"},
        {"text": "Hi</s> "},
    ]
    train = load(rows).train
    assert texts(train, tokenizer) == ["<s>Hi</s>", "<s>Hi you</s>", "<s>Hi</s> </s>"]
    assert texts(train, tokenizer, True) == ["Hi</s>", " you</s>", "Hi</s> </s>"]


def test_spelled_special_tokens_are_special(load, tokenizer):
    """As in transformers, which does not distinguish them from those of the template."""
    end = tokenizer.backend.token_to_id("<|im_end|>")
    train = load([{"messages": [QUESTION, ANSWER]}]).train
    assert np.sum(train.tokens == end) == 3


def test_tools_are_given_to_the_template(load, tokenizers_of):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rows = [{"messages": [QUESTION, call]}]
    assert '<tool_call>{"name": "add"}</tool_call>' in texts(
        load(rows, tokenizers_of["qwen3"]).train, tokenizers_of["qwen3"], True
    )[0]  # fmt: skip
    rows = [{"messages": [QUESTION, ANSWER], "tools": [{"name": "add"}]}]
    (text,) = texts(load(rows, tokenizers_of["llama3"], 300).train, tokenizers_of["llama3"])
    assert '[{"name": "add"}]' in text


def test_token_across_the_prompt_and_the_completion_has_loss(load, tokenizer):
    whole = tokenizer.backend.encode("for the").tokens
    assert whole[-1] == "Ġthe"
    train = load([{"prompt": "for t", "completion": "he"}]).train
    assert texts(train, tokenizer, True) == [" the</s>"]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 100])
def test_long_text_is_split(load, tokenizer, length):
    """Each token but the first is predicted once."""
    text = "abcdefgh12345678"
    data = load([{"text": text}], max_length=length)
    ids = [*tokenizer.beginning, *tokenizer.backend.encode(text).ids, *tokenizer.end]
    train = data.train
    assert train.lengths.max() <= length and train.lengths.min() >= 2
    assert train.tokens[train.has_loss].tolist() == ids[1:]
    firsts = train.offsets[:-1]
    assert not train.has_loss[firsts].any() and train.num_losses == len(ids) - 1
    assert (data.num_cut, data.num_skipped) == (0, 0)


def test_long_rows_are_cut_and_counted(load, tokenizer):
    rows = [
        {"prompt": "QXQXQXQX", "completion": "12345678"},
        {"prompt": "x", "completion": "y"},
        {"prompt": "QXQXQXQXQXQX", "completion": "1"},
        {"messages": [QUESTION, ANSWER]},
    ]
    data = load(rows, max_length=12)
    assert texts(data.train, tokenizer) == ["<s>QXQXQXQX123", "<s>xy</s>"]
    assert (data.num_rows, data.num_cut, data.num_skipped) == (4, 3, 2)
    message = r"no train row is left of 4 rows\. 4 lack a token with loss within `max_length` \(=2"
    with pytest.raises(DataError, match=message):
        load(rows, max_length=2)
    with pytest.raises(DataError, match=r"`max_length` \(=1\) must be at least 2"):
        load(rows, max_length=1)


GOOD = json.dumps({"text": "good"}).encode()
SURROGATE = b'{"text": "\\ud83c"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"is not JSON \(Expecting ',' delimiter, column 13\)"),
        (b'{"text": "a"} {"text": "b"}', "is not JSON .Extra data"),
        (b"text", "is not JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (SURROGATE, "contains half of a surrogate pair"),
        (b"[" * 100_000, "is not JSON that can be read"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"[", "is not JSON .*Write one JSON object into each line, or a JSON array of them"),
        (b"null", "must be a JSON object, not a null"),
        (b"{}", "must have one of these: `text`; .*It has nothing"),
        (b'{"' + b"k" * 10**6 + b'": 1}', r"must have .*It has `k{118}…\."),
        (b'{"tekst": "a", "id\\n": 1}', r"must have .*It has `tekst`, `id\\n`\."),
        (b'{"prompt": "a"}', r"must have .*It has `prompt`\."),
        (
            b'{"text": "a", "messages": []}',
            "must have only one of these: .*It has `text` and `messages`",
        ),
        (b'{"text": 1}', "`text` must be a string, not a number"),
        (b'{"text": ""}', "`text` must not be empty"),
        (b'{"prompt": "a", "completion": ""}', "`completion` must not be empty"),
        (b'{"prompt": ["a"], "completion": "b"}', "`prompt` must be a string, not a list"),
        (b'{"messages": []}', "`messages` must be a list of at least one message"),
        (b'{"messages": "a"}', "`messages` must be a list"),
        (b'{"messages": ["a"]}', "message 1 must be an object, not a string"),
        (b'{"messages": [{"content": "a"}]}', "message 1 must have a `role`"),
        (b'{"messages": [{"role": "user"}]}', "message 1 must have a string as its `content`"),
        (
            b'{"messages": [{"role": "user", "content": [1]}]}',
            "message 1 must have a string as its `content`, not list",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a"}]}',
            "`messages` must have a message of the role 'assistant'",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "`tools` must be a"),
    ],
)
def test_malformed_rows(tmp_path, tokenizer, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, GOOD, line, GOOD]))
    with pytest.raises(DataError, match=rf"rows\.jsonl: line 3: {message}") as raised:
        load_rows(path, tokenizer, 10, 0)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_refused_by_the_template(load, tokenizers_of):
    rows = [{"text": "good"}, {"messages": [QUESTION, QUESTION, ANSWER]}]
    with pytest.raises(DataError, match=r"line 2: the chat template does not .*Roles must alter"):
        load(rows, tokenizers_of["mistral"])


def test_files(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(No such file"):
        load_rows(path, tokenizer, 10)
    with pytest.raises(DataError, match="must be a regular file"):
        load_rows(tmp_path, tokenizer, 10)
    path.write_text("")
    with pytest.raises(DataError, match="contains no row"):
        load_rows(path, tokenizer, 10)
    # As some editors write it: a byte order mark, carriage returns, no last line end.
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "\xe2\x80\xa8"}')
    assert texts(load_rows(path, tokenizer, 10, 0).train, tokenizer) == [
        "<s>a</s>",
        "<s>\u2028</s>",
    ]


def numbered(count):
    return [{"text": f"row {i}"} for i in range(count)]


@pytest.mark.parametrize(("validation", "size"), [(0.1, 4), (0.25, 10), (7, 7), (0, 0)])
def test_validation_rows(load, tokenizer, validation, size):
    data = load(numbered(40), validation=validation)
    train, held_out = texts(data.train, tokenizer), texts(data.validation, tokenizer)
    assert len(held_out) == size and sorted(train + held_out) == sorted(
        f"<s>row {i}</s>" for i in range(40)
    )
    # The split depends neither on the order of the rows nor on other keys.
    again = load(
        [{"id": i, **row} for i, row in enumerate(numbered(40)[::-1])], validation=validation
    )
    assert set(texts(again.validation, tokenizer)) == set(held_out)
    assert ("validation_tokens" in data.describe()) == bool(size)


def test_same_rows_are_in_the_same_part(load, tokenizer):
    data = load(numbered(10) * 3, validation=0.3)
    train, held_out = texts(data.train, tokenizer), texts(data.validation, tokenizer)
    assert not set(train) & set(held_out) and len(held_out) == 9


def test_never_holds_out_more_than_asked(load, tokenizer):
    """Many equal rows are trained on, although some of them have the smallest hashes."""
    for name in range(8):
        rows = [{"text": f"{name}, row {max(i - 17, 0)}"} for i in range(20)]
        data = load(rows, validation=0.1)
        assert len(data.validation) == 2 and len(data.train) == 18
    with pytest.raises(DataError, match="at least one of the 20 rows .* and equal rows together"):
        load([{"text": f"row {i // 10}"} for i in range(20)], validation=0.1)


def test_validation_must_leave_rows(load):
    with pytest.raises(DataError, match=r"`validation` \(=0\.1\) must hold out at least one of"):
        load(numbered(4), validation=0.1)
    with pytest.raises(DataError, match=r"`validation` \(=4\) must be less than the 4 different"):
        load(numbered(4), validation=4)
    with pytest.raises(DataError, match="than the 1 different row of .* Use a smaller"):
        load(numbered(1) * 4, validation=0.5)


def test_second_file(load, tmp_path, tokenizer):
    second, third = tmp_path / "second.jsonl", tmp_path / "third.jsonl"
    second.write_text('{"text": "row 3"}')
    third.write_text('{"text": "another"}')
    data = load(numbered(5), validation_path=[str(second), str(third)])
    assert texts(data.validation, tokenizer) == ["<s>row 3</s>", "<s>another</s>"]
    assert texts(data.train, tokenizer) == [f"<s>row {i}</s>" for i in (0, 1, 2, 4)]
    assert (data.num_rows, data.num_repeated) == (7, 1)
    second.write_text("".join(json.dumps(row) + "\n" for row in numbered(5)))
    with pytest.raises(
        DataError, match="no train row is left of 10 rows.* 5 are also validation rows. Use other"
    ):
        load(numbered(5), validation_path=second)
    second.write_text('{"text": "row 3"}\nrow')
    with pytest.raises(DataError, match=r"second\.jsonl: line 2: is not JSON"):
        load(numbered(5), validation_path=second)


def test_chunks(load, monkeypatch):
    whole = load(numbered(10) + [{"text": "long " * 99}], validation=0.3)
    monkeypatch.setattr(rows_module, "CHUNK", 20)
    assert load(numbered(10) + [{"text": "long " * 99}], validation=0.3).digest == whole.digest


def test_digest(load):
    data = load(numbered(9), validation=3)
    assert data.describe()["sha256"] == load(numbered(9), validation=3).digest
    other = load([*numbered(8), {"prompt": "row", "completion": " 8"}], validation=3)
    no_loss = dataclasses.replace(data.train, has_loss=np.zeros_like(data.train.has_loss))
    digests = {data.digest, other.digest, dataclasses.replace(data, train=no_loss).digest}
    assert len(digests) == 3


def test_processes_agree(tmp_path):
    """Two processes read the same sequences, whatever their hash seeds and threads."""
    folder = write_tokenizer(tmp_path / "checkpoint")
    rows = [{"messages": [QUESTION, {**ANSWER, "content": f"no. {i}"}]} for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = f"""
import datetime
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
tokenizer = load_tokenizer({str(folder)!r}, datetime.date(2026, 1, 2))
print(load_rows({str(tmp_path / "rows.jsonl")!r}, tokenizer, 30).digest)
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed, parallel in (("1", "true"), ("2", "false"))
    }  # fmt: skip
    assert len(digests) == 1


def test_forms_of_other_programs(load, tokenizer):
    """They are read as `messages`, and the description says so."""
    sharegpt = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": ANSWER["content"]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("W", "hy?")]}]
    rows = [
        {"messages": [QUESTION, ANSWER]},
        {"conversations": sharegpt, "id": 1},
        {"instruction": "Why?", "input": "", "output": ANSWER["content"], "source": "a"},
        {"messages": [*parts, ANSWER]},
        {"prompt": [QUESTION], "completion": [ANSWER]},
    ]
    data = load(rows)
    assert (
        len(set(texts(data.train, tokenizer))) == len(set(texts(data.train, tokenizer, True))) == 1
    )
    assert data.notes == (
        "`conversations` are read as `messages`",
        "`from` and `value` are read as `role` and `content`",
        "`instruction`, `input` and `output` are read as `messages`",
        "unused fields: id, source",
    )
    named = load([{"q": "2 + 2 =", "a": " 4"}], columns="prompt=q, completion=a")
    assert texts(named.train, tokenizer) == ["<s>2 + 2 = 4</s>"] and not named.notes
    with pytest.raises(DataError, match="no row has the column 'b'"):
        load([{"text": "a"}], columns="tools=b")


@pytest.mark.parametrize("name", ["chatml", "generation", "qwen3"])
def test_turns_without_loss(load, tokenizers_of, name):
    tokenizer, second = tokenizers_of[name], {"role": "assistant", "content": "No"}
    for row in (
        {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, second]},
        {"messages": [QUESTION, {**ANSWER, "train": False}, QUESTION, second]},
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [second]},
    ):
        (trained,) = texts(load([row], tokenizer, 300).train, tokenizer, True)
        assert "No" in trained and "Because" not in trained


def test_variables_of_a_template(load, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "base"), TODAY, file)
    rows = [{"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"style": "short"}}]
    (text,) = texts(load(rows, tokenizer).train, tokenizer)
    assert text.startswith("shortWhy?Because")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "weight": 0.5}, "`weight` would change what is trained"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, r"`weight` \(=0\.5\) must be 0 or 1"),
        ({"messages": [{**ANSWER, "loss_mask": [1]}]}, "`loss_mask` would change the loss"),
        ({"messages": [{**ANSWER, "content": [{"type": "image"}]}]}, "must be text, not 'image'"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, r"`from` \(='bot'\) must be one of"),
        ({"messages": [ANSWER], "chat_template_kwargs": {"tools": []}}, "must not have `tools`"),
    ],
)
def test_refused_fields(load, row, message):
    with pytest.raises(DataError, match=message):
        load([row])


def test_several_data_sets(tmp_path, tokenizer):
    """JSON arrays and lines; an epoch repeats their train rows as the weights say."""
    (tmp_path / "a.json").write_text(json.dumps(numbered(10), indent=1))
    (tmp_path / "b.jsonl").write_text(
        "\n\n".join(json.dumps({"text": f"b {i}"}) for i in range(10))
    )
    names = [str(tmp_path / name) for name in ("a.json", "b.jsonl")]
    data = load_rows(names, tokenizer, 30, 4, weights=[0.5, 2])
    train, held_out = texts(data.train, tokenizer), set(texts(data.validation, tokenizer))
    assert len(held_out) == 4 and not held_out & set(train) and data.num_rows == 20
    of_a, of_b = ([text for text in train if name in text] for name in ("row", "b "))
    rows_of_b = 10 - sum("b " in text for text in held_out)
    assert len(of_b) == 2 * rows_of_b == 2 * len(set(of_b))
    assert len(of_a) == round((10 - 4 + 10 - rows_of_b) / 2) == len(set(of_a))
    equal = load_rows(names, tokenizer, 30, 4)
    assert set(texts(equal.validation, tokenizer)) == held_out


def test_tables(tmp_path, tokenizer, monkeypatch):
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist([{"messages": [QUESTION, ANSWER]}, {"messages": [ANSWER]}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text('text,note\n"a, b",1\n')
    names = [str(tmp_path / name) for name in ("rows.parquet", "rows.csv")]
    data = load_rows(names, tokenizer, 100, 0)
    assert texts(data.train, tokenizer)[2] == "<s>a, b</s>" and len(data.train) == 3
    assert data.notes == ("unused fields: note",)
    (tmp_path / "rows.csv").write_text("text\n")
    with pytest.raises(DataError, match="rows.csv: "):
        load_rows(names[1], tokenizer, 100, 0)
