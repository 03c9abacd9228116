"""Tokenizers and chat templates."""

import dataclasses
import datetime
import json
import types

import pytest

from effjax.train.errors import DataError
from effjax.train.text.chat import load_tokenizer
from tests.train.text.tiny_checkpoint import CHATML, CHATML_GENERATION, TEMPLATES, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
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


TURNS = {
    "chatml": ["Yes.<|im_end|>\n", "Sure 🎉<|im_end|>\n"],
    "generation": ["Yes.<|im_end|>", "Sure 🎉<|im_end|>"],
    "llama3": ["Yes.<|eot_id|>", "Sure 🎉<|eot_id|>"],
    "mistral": [" Yes.</s>", " Sure 🎉</s>"],
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_of_the_assistant(load, name):
    tokenizer = load(TEMPLATES[name])
    assert tokenizer.marks_generation == (name == "generation")
    ((text, spans),) = tokenizer.render_turns(CONVERSATION)
    assert [text[first:last] for first, last in spans] == TURNS[name]
    assert text == tokenizer.render(CONVERSATION)


def test_turns_that_change_when_others_follow(load):
    """Reasoning is in the context of no later turn, so each turn gets the text it would see."""
    first, second = load(TEMPLATES["qwen3"]).render_turns(CONVERSATION)
    question = "<|im_start|>user\nIs <b> 1 < 2?<|im_end|>\n<|im_start|>assistant\n"
    answer = "<think>\nEasy.\n</think>\n\nYes.<|im_end|>\n"
    assert first == (question + answer, ((len(question), len(question + answer)),))
    text, ((begin, end),) = second
    assert text.startswith(question + "Yes.<|im_end|>\n<|im_start|>user\nSure?")
    assert text[begin:] == "<think>\n\n</think>\n\nSure 🎉<|im_end|>\n" and end == len(text)


def test_turn_must_begin_as_its_prompt_ends(load):
    thinking = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    template = CHATML[: CHATML.index("{%- if add_generation")] + thinking
    message = r"message 2 .assistant.: cannot find .* ends in '.*assistant\\n<think>\\n'\."
    with pytest.raises(DataError, match=message):
        load(template).render_turns(CONVERSATION[:2])


def test_generation_blocks_in_macros(load):
    """Spans do not depend on when a block is written."""
    template = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% set text %}{% for m in messages %}{{ m.role }}:{{ turn(m) }};{% endfor %}{% endset %}"
        "<{{ text }}>"
    )
    ((text, spans),) = load(template).render_turns(CONVERSATION[2:])
    assert text == "<user:Sure?;assistant:Sure 🎉;>"
    assert [text[first:last] for first, last in spans] == ["Sure?", "Sure 🎉"]
    with pytest.raises(DataError, match="removes one end of a .% generation %. block"):
        load(template.replace("{{ text }}", "{{ text[:9] }}")).render_turns(CONVERSATION[2:])


def test_names_of_templates(load):
    template = (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ tools is none }}"
        "{{ strftime_now('%Y-%m-%d') }}{{ messages | tojson }}{{ documents is none }}\n"
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{ m.nothing is defined }}\n{% endfor %}"
        "{% set n = namespace({'a': 1}, self=2) %}{% set n.b = 3 %}{{ [n.a, n.self, n.b] }}"
        "{{ dict(a=1) }}"
    )
    tokenizer = load(template, pad_token={"content": "<pad>"}, unk_token=None)
    content = [{"role": "user", "content": "<a> & 'é'", "nothing": None}] * 2
    without = [{"role": "user", "content": "<a> & 'é'"}] * 2
    expected = json.dumps(without, ensure_ascii=False)
    assert tokenizer.render(content) == (
        f"<s></s><pad>True2026-01-02{expected}True\n    False\n[1, 2, 3]{{'a': 1}}"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system role') }}",
            r"accept the first 4 messages \(no system role",
        ),
        ("{{ messages.append(1) }}", "not accept"),
        ("{{ ''.__class__.__mro__ }}", "not accept .* unsafe"),
        ("{% set n = namespace(_a=1) %}", "not accept .*_a must not begin with an underscore"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "not accept .*must not begin"),
        ("{{ dict.update(messages[0], role='a') }}", "not accept"),
        ("{{ messages[0].content + 1 }}", "not accept"),
        ("{{ messages[9].content }}", "not accept"),
        ("{% for %}", "the chat template is not valid"),
        ("{% generation %}", "the chat template is not valid"),
        ("{% if true %}" * 200 + "{% endif %}" * 200, "the chat template is not valid"),
        ("{{ (" * 1 + "(" * 2000 + "1" + ")" * 2001 + " }}", "the chat template is not valid"),
        (None, "lacks a chat template"),
    ],
)
def test_templates_that_fail(load, template, message):
    with pytest.raises(DataError, match=message):
        load(template).render(CONVERSATION)


def test_conversation_that_begins_with_the_assistant(load):
    ((text, spans),) = load().render_turns(CONVERSATION[1:])
    assert text[slice(*spans[0])] == "Yes.<|im_end|>\n"
    with pytest.raises(DataError, match="a conversation that begins with a turn of the assistant"):
        load("{{ messages[0].content }}").render_turns(CONVERSATION[1:])


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


def test_truncation_and_padding_of_the_file(load, tmp_path):
    load()
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    backend.save(str(tmp_path / "tokenizer.json"))
    backend = load_tokenizer(tmp_path, TODAY).backend
    assert backend.decode(backend.encode("a b c d").ids, skip_special_tokens=False) == "a b c d"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: cannot be read \(No such file"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: is not a tokenizer"),
        ("tokenizer_config.json", None, r"tokenizer_config\.json: cannot be read"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json: is not JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: must contain a JSON object"),
        (
            "tokenizer_config.json",
            b'{"eos_token": "<end>"}',
            r"`eos_token` \(='<end>'\) is not in tok",
        ),
        ("tokenizer_config.json", b'{"chat_template": 1}', "`chat_template` must be a string"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: is not UTF-8"),
    ],
)
def test_rejects_invalid_files(load, tmp_path, name, content, message):
    load(CHATML_GENERATION)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path, TODAY)


def test_missing_package(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(
        DataError, match=r"jinja2.* is missing\. Run pip install \"\.\[finetune\]\""
    ):
        load_tokenizer(folder, TODAY)


def test_generation_blocks_that_are_not_reached(load):
    template = (
        "{% for m in messages %}{% if m.role == 'model' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="marks no turn of the assistant.*Correct the template"):
        load(template).render_turns(CONVERSATION)


def test_template_without_memory(load):
    tokenizer = load("{{ messages }}")

    def render(**_):
        raise MemoryError

    tokenizer = dataclasses.replace(tokenizer, template=types.SimpleNamespace(render=render))
    with pytest.raises(DataError, match=r"does not accept the first 4 messages \(MemoryError\)"):
        tokenizer.render(CONVERSATION)
