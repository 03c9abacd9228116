"""Rows of JSON for fine-tuning: conversations, prompts with completions, and texts, as tokens.

Each line of a file is a JSON object with one of these:

- ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}``, and `tools` if
  the chat template knows them. It is rendered by the checkpoint's chat template. The loss is that
  of the assistant's turns.
- ``{"prompt": "...", "completion": "..."}``. The loss is that of the completion and of EOS. The
  completion follows the prompt without a separator: include the space or newline. A token that
  spans both has loss.
- ``{"text": "..."}``. The loss is that of all tokens.

Other keys are ignored. Rows that are cut lose their EOS.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, check_regular, counted, quoted, unreadable
from .chat import Spans, Tokenizer
from .encode import encode_texts

CHUNK = 2**22  # characters of rows that are tokenized at a time, in parallel
FORMS = "one of these: `text`; `prompt` with `completion`; or `messages`"
ARRAY = "Write one JSON object into each line, as `jq -c '.[]' FILE` does with a JSON array."


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens, one after another.

    Attributes:
        tokens: int32 [n].
        has_loss: bool [n], whether the token is to be predicted from those before it. False for
            the first of each sequence.
        offsets: int64 [number of sequences + 1], where each sequence begins in `tokens`.
    """

    tokens: np.ndarray
    has_loss: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def num_losses(self) -> int:
        """Number of tokens with loss."""
        return int(self.has_loss.sum())

    def select(self, chosen: np.ndarray) -> "Sequences":
        """Return the sequences of a mask, bool [number of sequences]."""
        of_tokens = np.repeat(chosen, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        return Sequences(self.tokens[of_tokens], self.has_loss[of_tokens], offsets)


@dataclass(frozen=True)
class FinetuneData:
    """Tokenized rows, from `load_rows`.

    Attributes:
        name: The file.
        train: Sequences to train on.
        validation: Sequences of other rows; may be empty.
        num_rows: Number of rows of the files.
        num_cut: Number of rows of `messages` or `completion` that were longer than the maximum.
        num_skipped: Number of rows that were left out because no token with loss is in the part
            that was kept.
        num_repeated: Number of train rows that were left out because they are validation rows too.
    """

    name: str
    train: Sequences
    validation: Sequences
    num_rows: int
    num_cut: int
    num_skipped: int
    num_repeated: int

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all sequences."""
        digest = sha256()
        for part in (self.train, self.validation):
            for array in (part.tokens, part.has_loss, part.offsets):
                digest.update(array.tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what distinguishes these data from others, for config.json."""
        description = {"train_tokens": len(self.train.tokens)}
        if len(self.validation):
            description["validation_tokens"] = len(self.validation.tokens)
        return description | {"sha256": self.digest}


class _Example(NamedTuple):
    """A text of a row.

    Attributes:
        kind: "text", "completion" or "messages".
        text: What is tokenized.
        spans: Characters with loss. A token has loss if one of its characters has. Unused for a
            "text", whose tokens all have loss.
    """

    kind: str
    text: str
    spans: Spans


class _TokenizedRows(NamedTuple):
    """The rows of a file.

    Attributes:
        sequences: All of them.
        row_of: int64 [number of sequences], the row of each sequence, from 0.
        hashes: uint64 [number of rows], of the texts.
        num_cut: Number of rows that were cut.
        num_skipped: Number of rows without a sequence.
    """

    sequences: Sequences
    row_of: np.ndarray
    hashes: np.ndarray
    num_cut: int
    num_skipped: int


def load_rows(
    path: str | Path,
    tokenizer: Tokenizer,
    max_length: int,
    validation: float = 0.1,
    validation_path: str | Path | None = None,
) -> FinetuneData:
    """Read and tokenize rows, and split them into train and validation rows.

    Sequences have at most `max_length` tokens. A longer `text` is split into several sequences.
    Each begins with the last token of the one before, so that each token but the first is predicted
    once. Longer `messages` and a longer `prompt` with its `completion` are cut at the end. A row
    whose tokens with loss are all cut off is left out.

    The split depends on the texts of the rows only, as they are rendered before tokenization. Rows
    with the same text are in the same part, also if other keys differ.

    Args:
        path: A file with a JSON object in each line.
        tokenizer: From `load_tokenizer`.
        max_length: Maximum number of tokens in a sequence.
        validation: Share of the rows to hold out if below 1, else a number of rows. 0 for none.
            Ignored with `validation_path`.
        validation_path: A second file whose rows are the validation rows. Rows of the first file
            that are also in this one are left out.

    Raises:
        DataError: A file cannot be read, a row is malformed (the message has its line number), or a
            part would be empty.
    """
    if max_length < 2:
        raise DataError(f"`max_length` (={max_length}) must be at least 2")
    rows = _tokenize(Path(path), tokenizer, max_length)
    num_rows, num_cut, num_skipped = len(rows.hashes), rows.num_cut, rows.num_skipped
    num_repeated = 0
    if validation_path is None:
        is_held_out = _hold_out(rows.hashes, validation, str(path))[rows.row_of]
        train, held_out = (rows.sequences.select(mask) for mask in (~is_held_out, is_held_out))
    else:
        second = _tokenize(Path(validation_path), tokenizer, max_length)
        is_repeated = np.isin(rows.hashes, second.hashes)
        train, held_out = rows.sequences.select(~is_repeated[rows.row_of]), second.sequences
        num_rows += len(second.hashes)
        num_cut += second.num_cut
        num_skipped += second.num_skipped
        num_repeated = int(is_repeated.sum())

    for name, part, wanted in (
        ("train", train, True),
        ("validation", held_out, validation > 0 or validation_path is not None),
    ):
        if wanted and not len(part):
            remedy = "a larger `max_length`" if num_skipped else "other validation rows"
            raise DataError(
                f"{path}: no {name} row is left of {counted(num_rows, 'row')}. {num_skipped} lack "
                f"a token with loss within `max_length` (={max_length}), and {num_repeated} are "
                f"also validation rows. Use {remedy}."
            )
    return FinetuneData(str(path), train, held_out, num_rows, num_cut, num_skipped, num_repeated)


def _hold_out(hashes: np.ndarray, validation: float, name: str) -> np.ndarray:
    """Return the mask of the validation rows: those with the smallest hashes, at most as asked.

    Equal rows stay together. Those that are too many are trained on.
    """
    count = round(validation * len(hashes)) if validation < 1 else int(validation)
    different, sizes = np.unique(hashes, return_counts=True)
    if count >= len(hashes) or (count and len(different) == 1):
        raise DataError(
            f"`validation` (={validation:g}) must be less than the "
            f"{counted(len(different), 'different row')} of {name}. Use a smaller number, or more "
            "rows."
        )
    room, held_out = count, []
    for row, size in zip(different, sizes, strict=True):
        if size <= room:
            held_out.append(row)
            room -= size
        if not room:
            break
    if validation and not held_out:
        raise DataError(
            f"`validation` (={validation:g}) must hold out at least one of the "
            f"{counted(len(hashes), 'row')} of {name}, and equal rows together. Use a larger "
            "number, or 0 for no validation."
        )
    return np.isin(hashes, np.array(held_out, hashes.dtype))


def _tokenize(path: Path, tokenizer: Tokenizer, max_length: int) -> _TokenizedRows:
    """Read a file and tokenize its rows."""
    tokens, losses, lengths, row_of, hashes = [], [], [], [], []
    num_cut = num_skipped = 0
    for chunk in _chunk(_read_rows(path, tokenizer)):
        texts = [example.text for row in chunk for example in row]
        encodings = iter(encode_texts(tokenizer.backend, texts))
        pieces = []
        for row in chunk:
            before, is_cut = len(pieces), False
            for example in row:
                ids, has_loss = _mask(example, next(encodings), tokenizer)
                is_cut |= len(ids) > max_length and example.kind != "text"
                pieces += _split(ids, has_loss, max_length, example.kind == "text")
            row_of += [len(hashes)] * (len(pieces) - before)
            num_cut += is_cut
            num_skipped += len(pieces) == before
            digest = blake2b(repr(row).encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
        lengths += [len(ids) for ids, _ in pieces]
        tokens.append(_concatenate([ids for ids, _ in pieces], np.int32))
        losses.append(_concatenate([has_loss for _, has_loss in pieces], bool))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return _TokenizedRows(
        Sequences(_concatenate(tokens, np.int32), _concatenate(losses, bool), offsets),
        np.array(row_of, np.int64),
        np.array(hashes, np.uint64),
        num_cut,
        num_skipped,
    )


def _chunk(rows: Iterator[list[_Example]]) -> Iterator[list[list[_Example]]]:
    """Yield lists of rows with about `CHUNK` characters."""
    chunk, size = [], 0
    for row in rows:
        chunk.append(row)
        size += sum(len(example.text) for example in row)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _split(
    ids: np.ndarray, has_loss: np.ndarray, max_length: int, keep_all: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the sequences of a text that have a token with loss."""
    # Each begins with the last token of the one before. The first of a sequence is not predicted.
    firsts = range(0, max(len(ids) - 1, 1) if keep_all else 1, max_length - 1)
    pieces = [(ids[i : i + max_length], has_loss[i : i + max_length].copy()) for i in firsts]
    for _, loss in pieces:
        loss[:1] = False
    return [(piece, loss) for piece, loss in pieces if loss.any()]


def _mask(example: _Example, encoding: Any, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a text and which of them have loss, with BOS and EOS."""
    ids = encoding.ids
    has_loss = np.full(len(ids), example.kind == "text")
    if example.kind != "text":
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for first, last in example.spans:
            has_loss |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
    before, after = tokenizer.beginning, tokenizer.end
    # Templates write BOS and EOS themselves, and so do texts that were rendered by one.
    if example.kind == "messages" or tuple(ids[: len(before)]) == before:
        before = ()
    if example.kind == "messages" or tuple(ids[len(ids) - len(after) :]) == after:
        after = ()
    has_loss = np.pad(has_loss, (len(before), len(after)))
    has_loss[len(has_loss) - len(after) :] = True
    return np.array([*before, *ids, *after], np.int32), has_loss


def _concatenate(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _read_rows(path: Path, tokenizer: Tokenizer) -> Iterator[list[_Example]]:
    """Yield the examples of each line."""
    check_regular(path)
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _parse(line.removeprefix(b"\xef\xbb\xbf"), tokenizer)
                except DataError as error:
                    raise DataError(f"{path}: line {number}: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not number:
        raise DataError(f"{path}: contains no row. Write a JSON object into each line.")


def _load(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        DataError: The line is malformed. The message does not name it.
    """
    if not line.strip():
        raise DataError("is empty. Remove it.")
    try:
        row = json.loads(line.rstrip().decode())
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 ({error.reason})") from error
    except UnicodeEncodeError as error:
        raise DataError("contains half of a surrogate pair, which is not a character") from error
    except json.JSONDecodeError as error:
        if line.lstrip().startswith(b"["):
            raise DataError(f"begins a JSON array. {ARRAY}") from error
        raise DataError(
            f"is not JSON ({error.msg}, column {error.colno}). Write one JSON object into each "
            "line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON that can be read ({quoted(error)})") from error
    if isinstance(row, list):
        raise DataError(f"is a JSON array. {ARRAY}")
    if not isinstance(row, dict):
        raise DataError(f"must be a JSON object with {FORMS}, not a {_json_type(row)}")
    return row


def _parse(line: bytes, tokenizer: Tokenizer) -> list[_Example]:
    """Return the examples of a line.

    Raises:
        DataError: The line is malformed. The message does not name it.
    """
    row = {name: value for name, value in _load(line).items() if value is not None}
    forms = [("text",), ("prompt", "completion"), ("messages",)]
    complete = [form for form in forms if all(name in row for name in form)]
    if not complete:
        have = quoted(", ".join(f"`{name}`" for name in row)) or "nothing"
        raise DataError(f"must have {FORMS}. It has {have}.")
    if len(complete) > 1:
        names = " and ".join(f"`{name}`" for form in complete for name in form)
        raise DataError(f"must have only {FORMS}. It has {names}.")
    if complete[0] == ("messages",):
        return _parse_messages(row, tokenizer)

    texts = {name: row[name] for name in complete[0]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"`{name}` must be a string, not a {_json_type(text)}")
        if not text and name != "prompt":
            raise DataError(f"`{name}` must not be empty")
    if "text" in texts:
        return [_Example("text", texts["text"], ())]
    text = texts["prompt"] + texts["completion"]
    return [_Example("completion", text, ((len(texts["prompt"]), len(text)),))]


def _parse_messages(row: dict[str, Any], tokenizer: Tokenizer) -> list[_Example]:
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` must be a list of at least one message")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"`tools` must be a list, not a {_json_type(tools)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise DataError(f"message {number} must be an object, not a {_json_type(message)}")
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} must have a `role`, such as 'user' or 'assistant'")
        # A turn may consist of calls of tools only.
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            kind = _json_type(content) if "content" in message else "nothing"
            raise DataError(f"message {number} must have a string as its `content`, not {kind}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("`messages` must have a message of the role 'assistant' to learn from")
    return [_Example("messages", *turns) for turns in tokenizer.render_turns(messages, tools)]


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
