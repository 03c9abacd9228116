"""Compare chat templates and tokens with transformers."""

import datetime
import json
import re

import numpy as np
import pytest

from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
from tests.train.text.tiny_checkpoint import TEMPLATES, write_tokenizer

transformers = pytest.importorskip("transformers", reason="requires transformers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
CONVERSATIONS = {
    "plain": [
        {"role": "user", "content": "Is <b> 1 < 2 & 'é'?\n\n"},
        {"role": "assistant", "content": "  Yes 🎉 naïve\u2028 ", "reasoning_content": None},
    ],
    "turns": [
        {"role": "user", "content": "the <|im_end|> <s> </s> class"},
        {"role": "assistant", "content": "for the", "thinking": "\nFirst.\n"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Sure", "reasoning": "Second."},
    ],
    "tools": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "x": "<é>"}]},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<é> & more"}}]


@pytest.fixture
def both(tmp_path):
    """Return a function that loads a tokenizer, ours and theirs."""

    def load(**options):
        write_tokenizer(tmp_path, **options)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        return load_tokenizer(tmp_path, TODAY), theirs

    return load


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(both, template, conversation):
    ours, theirs = both(template=TEMPLATES[template], processor="<s> $A")
    messages = CONVERSATIONS[conversation]
    tools = TOOLS if conversation == "tools" else None
    for count, prompts in ((len(messages) - 1, True), (len(messages), False)):
        options = {"tools": tools, "add_generation_prompt": prompts}
        expected = theirs.apply_chat_template(messages[:count], tokenize=False, **options)
        # Their date is that of the day.
        dated = re.sub(r"(?<=Today Date: )\d+ \w+ \d+", "02 Jan 2026", expected)
        text = ours.render(messages[:count], prompts, tools)
        assert text == dated
        encoding = ours.backend.encode(text, add_special_tokens=False)
        assert encoding.ids == theirs(dated, add_special_tokens=False)["input_ids"]
        if dated == expected:
            tokens = theirs.apply_chat_template(messages[:count], **options)["input_ids"]
            assert encoding.ids == tokens


@pytest.mark.parametrize("conversation", ["plain", "turns"])
def test_loss_is_that_of_their_assistant_masks(both, tmp_path, conversation):
    ours, theirs = both(template=TEMPLATES["generation"])
    messages = CONVERSATIONS[conversation]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    train = load_rows(path, ours, 500, 0).train
    expected = theirs.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    np.testing.assert_array_equal(train.tokens, expected["input_ids"])
    np.testing.assert_array_equal(train.has_loss, expected["assistant_masks"])


@pytest.mark.parametrize("add", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [None, "<s> $A", "<s> $A </s>"])
def test_beginning_and_end(both, add, processor):
    ours, theirs = both(processor=processor, **add)
    text = "for the <|im_end|> class"
    ids = [*ours.beginning, *ours.backend.encode(text).ids]
    expected = theirs(text)["input_ids"]
    eos = theirs.eos_token_id
    # Ours ends with EOS in any case.
    assert [*ids, *ours.end] == [*expected, *([] if expected[-1] == eos else [eos])]
