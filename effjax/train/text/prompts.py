"""Prompts: their files, and their tokens."""

import codecs
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, TrainError, check_regular, quoted, unreadable
from ..files import read_json
from .base import GENERATION_CONFIG, eos_tokens
from .forms import Conversation, RowReader
from .generate import count_new_tokens
from .model import TextModel
from .sources import read_json_rows

SUFFIXES = ".txt", ".jsonl"
LINE_END = re.compile(rb"\r?\n")  # `str.splitlines` has others, which texts may contain


class Prompt(NamedTuple):
    """A prompt of a file.

    Attributes:
        content: The text to continue or to answer, or a conversation to answer.
        row: The row of the file; of a line of text, `{"prompt": line}`.
        place: The file and the line; empty for one of the command line.
    """

    content: str | Conversation
    row: dict[str, Any]
    place: str = ""

    @property
    def title(self) -> str:
        """The text, or the last message."""
        if isinstance(self.content, str):
            return self.content
        return self.content.messages[-1].get("content") or ""


class Encoded(NamedTuple):
    """The tokens of a prompt, those that end its completion, and the largest number of new ones."""

    tokens: list[int]
    stop_tokens: set[int]
    max_tokens: int


def read_prompt_file(file: Path) -> tuple[list[Prompt | DataError], list[str]]:
    """Return the prompts of a file or their errors, and notes on how fields were read.

    Args:
        file: A .txt file for `read_lines`, or a .jsonl file whose rows have a `prompt`, a text or a
            list of messages, or `messages`.

    Raises:
        DataError: The file cannot be read, has another suffix, or no prompt.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{file}: must be a file of prompts, .txt or .jsonl.")
    if suffix == ".txt":
        return read_lines(file), []
    reader, prompts = RowReader({}), []
    for row in read_json_rows(file):
        if isinstance(row, DataError):
            prompts.append(row)
            continue
        place = f"{file}: {row.place}"
        try:
            prompts.append(Prompt(reader.read_prompt(row.content), row.content, place))
        except DataError as error:
            prompts.append(DataError(f"{place}: {error}"))
    if not prompts:
        raise DataError(f"{file}: contains no prompt.")
    notes = [*reader.recognized]
    if reader.unused:
        notes.append(f"unused fields: {quoted(', '.join(reader.unused))}")
    return prompts, notes


def read_lines(file: Path) -> list[Prompt | DataError]:
    """Return the lines of a text file, as they are, as prompts; those without a character are none.

    Raises:
        DataError: The file cannot be read, or has no prompt.
    """
    check_regular(file)
    try:
        content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise unreadable(file, error) from error
    prompts = []
    for number, line in enumerate(LINE_END.split(content), 1):
        place = f"{file}: line {number}"
        try:
            if text := line.decode():
                prompts.append(Prompt(text, {"prompt": text}, place))
        except UnicodeDecodeError as error:
            prompts.append(DataError(f"{place}: is not UTF-8 ({error.reason})"))
    if not prompts:
        raise DataError(f"{file}: contains no prompt. Write one into each line.")
    return prompts


def encode_prompt(
    model: TextModel, prompt: Prompt | DataError, system: str | None, chat: bool, max_tokens: int
) -> Encoded:
    """Return the tokens of a prompt, and how many the positions of the model leave of `max_tokens`.

    Raises:
        TrainError: As `encode`, with the place of the prompt; or the prompt is too long.
    """
    if isinstance(prompt, DataError):
        raise prompt
    try:
        tokens, stop_tokens = encode(model, prompt.content, system, chat)
        return Encoded(tokens, stop_tokens, count_new_tokens(model, tokens, max_tokens))
    except TrainError as error:
        if not prompt.place:
            raise
        raise DataError(f"{prompt.place}: {error}") from error


def encode(
    model: TextModel, prompt: str | Conversation, system: str | None, chat: bool
) -> tuple[list[int], set[int]]:
    """Return the tokens of a prompt, and those that end its completion.

    Args:
        model: The model.
        prompt: The text to continue, the message of the user, or a conversation.
        system: The message of the system, if there is one.
        chat: Whether to render the messages with the chat template.

    Raises:
        DataError: The template does not accept the messages, or the model lacks a token.
        TrainError: A conversation needs a template, or has a message of the system already. A text
            has no tokens.
    """
    tokenizer, stops = model.tokenizer, _stop_tokens(model)
    if isinstance(prompt, str):
        conversation = Conversation([{"role": "user", "content": prompt}])
    elif chat:
        conversation = prompt
    else:
        raise TrainError("A list of messages needs a chat template, and --chat.")
    messages = [*conversation.messages]
    # Python reads other bytes of a command line, and \ud800 in JSON, as halves of surrogate pairs,
    # which tokenizers refuse without saying where they are.
    contents = [("The prompt", message.get("content")) for message in messages]
    for name, text in (*contents, ("--system", system)):
        if text is not None and text.encode(errors="ignore").decode() != text:
            raise TrainError(f"{name} must be UTF-8.")
    if chat:
        if system is not None:
            if messages[0]["role"] == "system":
                raise TrainError("--system is given, and a conversation has a message of its own.")
            messages.insert(0, {"role": "system", "content": system})
        options: Any = {"tools": conversation.tools, "variables": conversation.variables}
        tokens = _encode(model, tokenizer.render(messages, add_generation_prompt=True, **options))
        # Templates may end a turn by another token than EOS.
        stops |= tokenizer.turn_ends(messages, **options)
    else:
        assert isinstance(prompt, str)
        ids = _encode(model, prompt)
        tokens = [*tokenizer.missing_ends(ids)[0], *ids]
    if not tokens:
        raise TrainError("An empty prompt needs a tokenizer with a BOS token. Give a text.")
    if max(tokens) >= model.config.vocab_size:
        raise DataError(
            f"{model.base.folder}: its tokenizer and its config.json belong to different models. "
            f"Token {max(tokens)} of the prompt is not below `vocab_size` "
            f"(={model.config.vocab_size})."
        )
    return tokens, stops


def _encode(model: TextModel, text: str) -> list[int]:
    return model.tokenizer.backend.encode(text, add_special_tokens=False).ids


def _stop_tokens(model: TextModel) -> set[int]:
    """Return the EOS tokens of the tokenizer, config.json and generation_config.json."""
    base, settings = model.base, [model.base.settings, model.base.generation_settings]
    if model.adapter is not None and (file := model.adapter / GENERATION_CONFIG).is_file():
        settings.append(read_json(file))
    tokens = {*model.tokenizer.end, *(token for one in settings for token in eos_tokens(one))}
    # One beyond the vocabulary is never generated, but one beyond 32 bits fails in JAX.
    if max(tokens, default=0) >= 2**31:
        raise DataError(
            f"{base.folder}: `eos_token_id` (={max(tokens)}) must be below `vocab_size` "
            f"(={model.config.vocab_size})."
        )
    return tokens
