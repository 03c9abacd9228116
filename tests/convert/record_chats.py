"""Recording of the chats and tokens of transformers.

`python -m tests.convert.record_chats` writes them to `recorded/chats.json`. The committed file was
written by transformers 5.24.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.convert.cases import RECORDED
from tests.train.text.tiny_checkpoint import SPECIAL, TEMPLATES, write_tokenizer

FILE = RECORDED / "chats.json"
VOCAB_SIZE = 256 + len(SPECIAL)  # bytes, so that tokens do not depend on the version of Python
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
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
TEXT = "for the <|im_end|> class"
PROCESSORS = None, "<s> $A", "<s> $A </s>"
ADDED: list[dict[str, bool]] = [{}, {"add_bos_token": True}, {"add_bos_token": False}]


def load(folder: Path, **options: Any) -> Any:
    """Write a tokenizer and load it by transformers."""
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, VOCAB_SIZE, **options)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def record(folder: Path) -> dict[str, Any]:
    """Return texts, tokens and masks."""
    chats: dict[str, Any] = {}
    for name, template in TEMPLATES.items():
        tokenizer = load(folder, template=template, processor="<s> $A")
        for key, messages in CONVERSATIONS.items():
            for count, prompts in ((len(messages) - 1, True), (len(messages), False)):
                text = tokenizer.apply_chat_template(
                    messages[:count], tokenize=False, add_generation_prompt=prompts,
                    tools=TOOLS if key == "tools" else None,
                )  # fmt: skip
                text = re.sub(r"(?<=Today Date: )\d+ \w+ \d+", "02 Jan 2026", text)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                chats[f"{name} {key} {count}"] = [text, ids]
    tokenizer = load(folder, template=TEMPLATES["generation"])
    masks = {
        key: tokenizer.apply_chat_template(
            CONVERSATIONS[key], return_assistant_tokens_mask=True, return_dict=True
        )["assistant_masks"]
        for key in ("plain", "turns")
    }
    texts = [
        load(folder, processor=processor, **added)(TEXT)["input_ids"]
        for processor in PROCESSORS
        for added in ADDED
    ]
    return {"chats": chats, "masks": masks, "texts": texts}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(record(Path(folder)), ensure_ascii=False) + "\n")
