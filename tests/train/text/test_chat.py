"""Tokenizers and chat templates."""

import datetime
import json
import os

import pytest

from effjax.train.errors import DataError
from effjax.train.text.chat import load_tokenizer
from tests.train.text.tiny_checkpoint import CHATML, TEMPLATES, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
ADDED = {"__type": "AddedToken", "special": True, "normalized": False}
CONVERSATION = [
    {"role": "user", "content": "Is <b> 1 < 2?"},
    {"role": "assistant", "content": "Yes.", "reasoning": "Easy."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Sure 🎉"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def load(folder, tmp_path):
    """Return a function that loads the tokenizer with another configuration."""

    def load(template=CHATML, **config):
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template} | config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path, TODAY)

    return load


# Spans do not depend on when a block is written.
MACRO = (
    "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% set text %}{% for m in messages %}{{ m.role }}:{{ turn(m) }};{% endfor %}{% endset %}"
    "<{{ text }}>"
)


@pytest.mark.parametrize(
    ("template", "first", "turns"),
    [
        (TEMPLATES["chatml"], 0, ["Yes.<|im_end|>\n", "Sure 🎉<|im_end|>\n"]),
        (TEMPLATES["chatml"], 1, ["Yes.<|im_end|>\n", "Sure 🎉<|im_end|>\n"]),
        (TEMPLATES["generation"], 0, ["Yes.<|im_end|>", "Sure 🎉<|im_end|>"]),
        (TEMPLATES["llama3"], 0, ["Yes.<|eot_id|>", "Sure 🎉<|eot_id|>"]),
        (TEMPLATES["mistral"], 0, [" Yes.</s>", " Sure 🎉</s>"]),
        (MACRO, 2, ["Sure?", "Sure 🎉"]),
    ],
    ids=range(6),
)
def test_turns_of_the_assistant(load, template, first, turns):
    tokenizer, messages = load(template), CONVERSATION[first:]
    assert tokenizer.marks_generation == ("generation %}" in template)
    ((text, spans),) = tokenizer.render_turns(messages)
    assert [text[first:last] for first, last in spans] == turns
    assert text == tokenizer.render(messages)


def test_turns_that_change_when_others_follow(load):
    """Reasoning is in the context of no later turn, so each turn gets the text it would see."""
    first, second = load(TEMPLATES["qwen3"]).render_turns(CONVERSATION)
    question = "<|im_start|>user\nIs <b> 1 < 2?<|im_end|>\n<|im_start|>assistant\n"
    answer = "<think>\nEasy.\n</think>\n\nYes.<|im_end|>\n"
    assert first == (question + answer, ((len(question), len(question + answer)),))
    text, ((begin, end),) = second
    assert text.startswith(question + "Yes.<|im_end|>\n<|im_start|>user\nSure?")
    assert text[begin:] == "<think>\n\n</think>\n\nSure 🎉<|im_end|>\n" and end == len(text)


def test_names_of_templates(load):
    template = (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ tools is none }}"
        "{{ strftime_now('%Y-%m-%d') }}{{ messages | tojson }}{{ documents is none }}\n"
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{ m.nothing is defined }}\n{% endfor %}"
        "{% set n = namespace({'a': 1}, self=2) %}{% set n.b = 3 %}{{ [n.a, n.self, n.b] }}"
        "{{ dict(a=1) }}"
    )
    tokenizer = load(template, pad_token=ADDED | {"content": "<pad>"}, unk_token=None)
    message = {"role": "user", "content": "<a> & 'é'"}
    expected = json.dumps([message] * 2, ensure_ascii=False)
    assert tokenizer.render([{**message, "nothing": None}] * 2) == (
        f"<s></s><pad>True2026-01-02{expected}True\n    False\n[1, 2, 3]{{'a': 1}}"
    )


REFUSED, INVALID = "the chat template does not accept", "the chat template is not valid"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system') }}", f"{REFUSED} the first 4 messages (no system"),
        ("{{ messages.append(1) }}", REFUSED),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(_a=1) %}", "_a must not begin with an underscore"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "must not begin"),
        ("{{ dict.update(messages[0], role='a') }}", REFUSED),
        ("{{ messages[0].content + 1 }}", REFUSED),
        ("{{ messages[9].content }}", REFUSED),
        ("{{ 'a' * 10**15 }}", "(MemoryError)"),
        ("{% for %}", INVALID),
        ("{% generation %}", INVALID),
        ("{% if true %}" * 200 + "{% endif %}" * 200, INVALID),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", INVALID),
        (None, "lacks a chat template"),
    ],
    ids=range(14),
)
def test_templates_that_fail(load, template, words):
    with pytest.raises(DataError) as error:
        load(template).render(CONVERSATION)
    assert words in str(error.value)


NOT_REACHED = (
    "{% for m in messages %}{% if m.role == 'model' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
THINKING = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "first", "message"),
    [
        (NOT_REACHED, 0, "marks no turn of the assistant.*Correct the template"),
        (MACRO.replace("{{ text }}", "{{ text[:9] }}"), 2, "removes one end"),
        ("{{ messages[0].content }}", 1, "that begins with a turn of the assistant"),
        (
            CHATML[: CHATML.index("{%- if add_generation")] + THINKING,
            0,
            r"message 2 .assistant.: cannot find .* ends in '.*assistant\\n<think>\\n'\.",
        ),
    ],
)
def test_turns_that_are_not_found(load, template, first, message):
    with pytest.raises(DataError, match=message):
        load(template).render_turns(CONVERSATION[first:])


def test_sources_of_templates(load, tmp_path):
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    assert load(named).render(CONVERSATION) == "a"
    assert load(named[:1]).template is None
    (tmp_path / "chat_template.jinja").write_text("é{{ messages | length }}\n", encoding="utf-8")
    assert load(named).render(CONVERSATION) == "é4"


def tokens_around(tokenizer):
    names = tokenizer.backend.id_to_token
    return [*map(names, tokenizer.beginning)], [*map(names, tokenizer.end)]


def test_beginning_and_end(load, tmp_path):
    assert tokens_around(load()) == ([], ["</s>"])
    assert tokens_around(load(eos_token="<|im_end|>")) == ([], ["<|im_end|>"])
    assert tokens_around(load(eos_token=None)) == ([], [])
    for processor, end in (("<s> $A", []), ("<s> $A </s>", ["</s>"])):
        write_tokenizer(tmp_path, processor=processor, eos_token=None)
        assert tokens_around(load_tokenizer(tmp_path, TODAY)) == (["<s>"], end)
        write_tokenizer(tmp_path, processor=processor)
        assert tokens_around(load_tokenizer(tmp_path, TODAY)) == (["<s>"], ["</s>"])


def test_tokens_that_only_other_files_name(load, tmp_path):
    """They are tokens and no pieces, as in transformers."""
    number = load().backend.get_vocab_size()
    added = ADDED | {"content": "<|end|>"}
    named = {"added_tokens_decoder": {str(number): {k: added[k] for k in added if k != "__type"}}}

    def check(tokenizer):
        assert tokenizer.backend.encode("a<|end|>").ids[1:] == [number]
        assert number in tokenizer.special_tokens

    check(load(**named))
    assert load(**named, eos_token="<|end|>").end == (number,)
    load(eos_token=None)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": number}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": added}))
    tokenizer = load_tokenizer(tmp_path, TODAY)
    check(tokenizer)
    assert tokenizer.end == (number,) and tokenizer.variables["eos_token"] == "<|end|>"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": number + 3}))
    with pytest.raises(DataError, match=rf"'<\|end\|>' is token {number}, and .* {number + 3}"):
        load_tokenizer(tmp_path, TODAY)


def test_flag_that_only_another_file_sets(load, tmp_path):
    """tokenizer.json has an ordinary token, and tokenizer_config.json a special one."""
    backend = load().backend
    number = backend.get_vocab_size()
    backend.add_tokens([tokenizers.AddedToken("<|end|>", special=False, normalized=False)])
    flags = {"content": "<|end|>", "special": True, "normalized": False}
    load(added_tokens_decoder={str(number): flags})
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, TODAY)
    assert number in tokenizer.special_tokens
    assert tokenizer.backend.decode([number], skip_special_tokens=True) == ""


def test_truncation_and_padding_of_the_file(load, tmp_path):
    backend = load().backend
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    backend.save(str(tmp_path / "tokenizer.json"))
    backend = load_tokenizer(tmp_path, TODAY).backend
    assert backend.decode(backend.encode("a b c d").ids, skip_special_tokens=False) == "a b c d"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{}", "is not a tokenizer"),
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer_config.json", b"{", "must be a JSON object"),
        ("tokenizer_config.json", b"[]", "must be a JSON object"),
        ("added_tokens.json", b"[]", "must be a JSON object"),
        ("special_tokens_map.json", b"", "must be a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "`chat_template` must be a string"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_invalid_files(load, tmp_path, name, content, words):
    load(TEMPLATES["generation"])
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path, TODAY)
    assert f"{name}: {words}" in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.4.json", "additional_chat_templates/tool_use.jinja"])
def test_pipes_that_transformers_would_read(load, tmp_path, name):
    load(TEMPLATES["generation"])
    settings = tmp_path / "tokenizer_config.json"
    versions = {"fast_tokenizer_files": ["tokenizer.4.json"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | versions))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} must be a regular file"):
        load_tokenizer(tmp_path, TODAY)
