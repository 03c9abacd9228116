"""A tiny language model in Hugging Face's layout, to try `effjax finetune` without a download.

`python -m effjax.train.text.tiny FOLDER` writes the model, with random weights, and
FOLDER/rows.jsonl with sums to learn.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ..._extras import install_command
from ...convert import save_checkpoint
from ...models import DecoderConfig, init_decoder

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BOS, EOS = "<s>", "</s>"
SPECIAL_TOKENS = BOS, EOS, "<|im_start|>", "<|im_end|>"
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def write_checkpoint(
    folder: str | Path, family: str = "llama", vocab_size: int = 384, **config: Any
) -> DecoderConfig:
    """Write a language model with random weights and its tokenizer, in Hugging Face's layout.

    Args:
        folder: Where to write; must not exist, or be empty.
        family: The `model_type`, such as "llama" or "qwen3".
        vocab_size: As in `train_tokenizer`.
        config: Other settings of config.json, for tests.

    Returns:
        The configuration of the model, with the vocabulary of the tokenizer.
    """
    tokenizer = train_tokenizer(vocab_size)  # before anything is written: it may not be installed
    settings = {
        "model_type": family, "vocab_size": tokenizer.get_vocab_size(), **SIZES, **config
    }  # fmt: skip
    model = DecoderConfig.from_json(settings)
    save_checkpoint(folder, *init_decoder(model, jax.random.key(0)), model.to_json())
    write_tokenizer(folder, tokenizer)
    return model


def train_tokenizer(vocab_size: int = 384, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Any:
    """Return a byte-level `tokenizers.Tokenizer`, trained on Python's help.

    Args:
        vocab_size: The largest number of tokens, of which 256 are bytes.
        special_tokens: `BOS` and `EOS` among them. Tests have others.

    Raises:
        ValueError: if `vocab_size` is below the number of bytes and special tokens.
    """
    if vocab_size < (least := 256 + len(special_tokens)):
        raise ValueError(f"`vocab_size` (={vocab_size}) must be at least {least}.")
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    # A text that comes with Python, so that nothing is downloaded.
    tokenizer.train_from_iterator([topics["if"], topics["for"], topics["class"]], trainer)
    return tokenizer


def write_tokenizer(
    folder: str | Path, tokenizer: Any, template: str | None = CHATML, **config: Any
) -> None:
    """Write the files of a tokenizer of `train_tokenizer`.

    Args:
        folder: Where to write tokenizer.json and tokenizer_config.json; created if necessary.
        tokenizer: The tokenizer.
        template: The chat template, or None. Tests have others.
        config: Other settings of tokenizer_config.json, for tests.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **config
    }  # fmt: skip
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_rows(file: str | Path) -> None:
    """Write sums of the numbers up to 9 as rows of `messages`."""
    rows = [
        [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        ]
        for a in range(10)
        for b in range(10)
    ]
    Path(file).write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def main(argv: Sequence[str]) -> str | None:
    """Write the model and the rows to the folder `argv[0]`; return an error message, if any."""
    if len(argv) != 1 or argv[0].startswith("-"):
        return "usage: python -m effjax.train.text.tiny FOLDER"
    try:
        write_checkpoint(argv[0])
        write_rows(Path(argv[0]) / "rows.jsonl")
    except ModuleNotFoundError as error:
        return f"{error.name} is missing. Run {install_command('finetune')}."
    except OSError as error:
        return f"{str(error).rstrip('.')}. Give another folder."
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
