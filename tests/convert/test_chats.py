"""Chat templates and tokens are those of transformers."""

import datetime
import json

import numpy as np
import pytest

from effjax.train.text.chat import load_tokenizer
from effjax.train.text.rows import load_rows
from tests.convert import record_chats
from tests.convert.record_chats import ADDED, CONVERSATIONS, PROCESSORS, TEXT, TOOLS
from tests.train.text.tiny_checkpoint import TEMPLATES, write_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

TODAY = datetime.date(2026, 1, 2)
RECORDED = json.loads(record_chats.FILE.read_text())


def load(folder, **options):
    return load_tokenizer(write_tokenizer(folder, record_chats.VOCAB_SIZE, **options), TODAY)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(tmp_path, template, conversation):
    tokenizer = load(tmp_path, template=TEMPLATES[template], processor="<s> $A")
    messages, tools = CONVERSATIONS[conversation], TOOLS if conversation == "tools" else None
    for count, prompts in ((len(messages) - 1, True), (len(messages), False)):
        text, ids = RECORDED["chats"][f"{template} {conversation} {count}"]
        assert tokenizer.render(messages[:count], prompts, tools) == text
        assert tokenizer.backend.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("conversation", ["plain", "turns"])
def test_loss_is_that_of_their_assistant_masks(tmp_path, conversation):
    tokenizer = load(tmp_path, template=TEMPLATES["generation"])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[conversation]}))
    train = load_rows(path, tokenizer, 500, 0).train
    _, ids = RECORDED["chats"][f"generation {conversation} {len(CONVERSATIONS[conversation])}"]
    np.testing.assert_array_equal(train.tokens, ids)
    np.testing.assert_array_equal(train.has_loss, RECORDED["masks"][conversation])


@pytest.mark.parametrize("added", range(3))
@pytest.mark.parametrize("processor", range(3))
def test_beginning_and_end(tmp_path, added, processor):
    tokenizer = load(tmp_path, processor=PROCESSORS[processor], **ADDED[added])
    ids = [*tokenizer.beginning, *tokenizer.backend.encode(TEXT).ids]
    expected, (eos,) = RECORDED["texts"][3 * processor + added], tokenizer.end
    # Ours ends with EOS in any case.
    assert [*ids, eos] == [*expected, *([] if expected[-1] == eos else [eos])]
