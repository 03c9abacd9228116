"""Rows for fine-tuning: conversations, prompts with completions, and texts, as tokens.

A row has one of these, or fields of other programs that `RowReader` reads as one of them:

- ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}``, with `tools`
  and `chat_template_kwargs` if the chat template knows them. It is rendered by the checkpoint's
  chat template. The loss is that of the assistant's turns, without those with ``"weight": 0`` or
  ``"train": false``.
- ``{"prompt": [...], "completion": [...]}`` of messages, the same with the loss of the completion.
- ``{"prompt": "...", "completion": "..."}``. The loss is that of the completion and of EOS. The
  completion follows the prompt without a separator: include the space or newline. A token that
  spans both has loss.
- ``{"text": "..."}``. The loss is that of all tokens.

A row of preferences has ``{"prompt": ..., "chosen": ..., "rejected": ...}``, of texts or of lists
of messages. Each answer becomes a sequence, as a completion does.

Rows that are cut lose their EOS.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, counted, quoted
from .chat import Spans, Tokenizer
from .encode import encode_texts
from .forms import Content, Conversation, RowReader, parse_columns
from .sources import read_rows

CHUNK = 2**22  # characters of rows that are tokenized at a time, in parallel


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
        return self.repeat(chosen.astype(np.int64))

    def repeat(self, counts: np.ndarray) -> "Sequences":
        """Return each sequence some number of times, int64 [number of sequences]."""
        # One mask over the tokens, without a loop in Python over millions of sequences.
        if counts.max(initial=0) <= 1:
            of_tokens = np.repeat(counts > 0, self.lengths)
            offsets = np.concatenate([[0], np.cumsum(self.lengths[counts > 0])])
            return Sequences(self.tokens[of_tokens], self.has_loss[of_tokens], offsets)
        return join([self.select(counts > i) for i in range(counts.max())])


def join(parts: Sequence[Sequences]) -> Sequences:
    """Return the sequences of all parts."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Sequences(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.has_loss for part in parts]),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
    )


@dataclass(frozen=True)
class FinetuneData:
    """Tokenized rows, from `load_rows`.

    Attributes:
        name: The files.
        train: Sequences to train on.
        validation: Sequences of other rows; may be empty.
        counts: Numbers of "rows" of the files; of those "cut", without a "text"; "skipped", without
            a token with loss in the part that was kept; "repeated", left out of the train rows
            because they are validation rows too; "split", which the template renders as several
            sequences; and of pairs with "equal" answers.
        notes: How fields were read, and which were not used.
        end_tokens: The special tokens with loss that end a text or a turn of the assistant.
    """

    name: str
    train: Sequences
    validation: Sequences
    counts: Counter[str]
    notes: tuple[str, ...]
    end_tokens: frozenset[int]

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
        prompt: Number of characters of the prompt, with which the text begins.
    """

    kind: str
    text: str
    spans: Spans
    prompt: int


class _TokenizedRows(NamedTuple):
    """The rows of a file.

    Attributes:
        sequences: All of them.
        row_of: int64 [number of sequences], the row of each sequence, from 0.
        hashes: uint64 [number of rows], of the texts.
        prompts: uint64 [number of rows], hashes of the prompts, or of the texts without one.
        counts, end_tokens: As in `FinetuneData`.
    """

    sequences: Sequences
    row_of: np.ndarray
    hashes: np.ndarray
    prompts: np.ndarray
    counts: Counter[str]
    end_tokens: set[int]


def load_rows(
    path: str | Path | Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
    validation: float = 0.1,
    validation_path: str | Path | Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    columns: str | None = None,
    pairs: bool = False,
) -> FinetuneData:
    """Read and tokenize rows, and split them into train and validation rows.

    Sequences have at most `max_length` tokens. A longer `text` is split into several sequences.
    Each begins with the last token of the one before, so that each token but the first is predicted
    once. Longer `messages` and a longer `prompt` with its `completion` are cut at the end. A row
    whose tokens with loss are all cut off is left out.

    The split depends on the texts of the rows only, as they are rendered before tokenization. Rows
    with the same prompt, which is what precedes the first tokens with loss, are in the same part,
    and so are rows with the same text, also if other keys differ.

    Args:
        path: A data set or several ones, as for `read_rows`.
        tokenizer: From `load_tokenizer`.
        max_length: Maximum number of tokens in a sequence.
        validation: Share of the rows to hold out if below 1, else a number of rows. 0 for none.
            Ignored with `validation_path`.
        validation_path: Data sets whose rows are the validation rows. Rows of `path` that are also
            in these are left out.
        weights: How often the train rows of each data set are repeated. Of 1.5, half of the rows
            are there twice; of 0.5, half of them are left out.
        columns: Names of columns, as for `parse_columns`.
        pairs: Whether rows are preferences. Each has two sequences, the chosen one and the rejected
            one. A row is left out if one of them has no token with loss.

    Raises:
        DataError: A file cannot be read, a row is malformed (the message has its line number), or a
            part would be empty.
    """
    names, validation_names = (
        [str(one)] if isinstance(one, str | Path) else [*(one or ())]
        for one in (path, validation_path)
    )
    weights = [1.0] * len(names) if weights is None else weights
    reader = RowReader(parse_columns(columns) if columns else {})
    options = tokenizer, max_length, reader, pairs
    parts = [_tokenize(name, *options) for name in names]
    shown, used, counts = ", ".join(names), parts, Counter()
    if validation_names:
        others = [_tokenize(name, *options) for name in validation_names]
        held_out = join([part.sequences for part in others])
        used, excluded = [*parts, *others], np.concatenate([part.hashes for part in others])
        is_train = [~np.isin(part.hashes, excluded) for part in parts]
        counts["repeated"] = sum(int((~mask).sum()) for mask in is_train)
    else:
        excluded = _hold_out(np.concatenate([part.prompts for part in parts]), validation, shown)
        is_train = [~np.isin(part.prompts, excluded) for part in parts]
        masks = zip(parts, is_train, strict=True)
        held_out = join([part.sequences.select(~mask[part.row_of]) for part, mask in masks])
    train = join(
        [
            part.sequences.repeat(_count(part.hashes, mask, weight)[part.row_of])
            for part, mask, weight in zip(parts, is_train, weights, strict=True)
        ]
    )
    counts = sum((part.counts for part in used), counts)
    # A column may be in some rows only, so that this is known after all of them.
    if missing := sorted(reader.columns.keys() - reader.found):
        raise DataError(f"{shown}: no row has the column {reader.columns[missing[0]]!r:.120}.")

    for name, part, wanted in (
        ("train", train, True),
        ("validation", held_out, validation > 0 or bool(validation_names)),
    ):
        if wanted and not len(part):
            remedy = "a larger `max_length`" if counts["skipped"] else "other validation rows"
            raise DataError(
                f"{shown}: no {name} row is left of {counted(counts['rows'], 'row')}. "
                f"{counts['skipped']} lack a token with loss within `max_length` (={max_length}), "
                f"and {counts['repeated']} are also validation rows. Use {remedy}."
            )
    notes = [*reader.recognized]
    if reader.unused:
        notes.append(f"unused fields: {quoted(', '.join(reader.unused))}")
    if counts["equal"]:
        notes.append(
            f"{counted(counts['equal'], 'pair')} without a preference: equal answers within "
            f"{counted(max_length, 'token')}"
        )
    end_tokens = frozenset().union(*(part.end_tokens for part in used))
    return FinetuneData(shown, train, held_out, counts, tuple(notes), end_tokens)


def _count(hashes: np.ndarray, is_train: np.ndarray, weight: float) -> np.ndarray:
    """Return how often each row is trained on in an epoch, int64 [number of rows]."""
    # The rows that are there once more than others are those with the smallest hashes.
    whole, number = int(weight), int(is_train.sum())
    counts = np.where(is_train, whole, 0).astype(np.int64)
    # Not by a seed: a run that resumes, and one with another seed, has the same rows.
    order = np.argsort(np.where(is_train, hashes, np.uint64(2**64 - 1)), kind="stable")
    counts[order[: round((weight - whole) * number)]] += 1
    return counts


def _hold_out(prompts: np.ndarray, validation: float, name: str) -> np.ndarray:
    """Return the hashes of the prompts whose rows are held out."""
    # Those with the smallest hashes: the choice is random, but neither a seed nor the order of the
    # files changes it, and rows that are added move few others. The rows of a prompt stay
    # together, or the model would be validated on what it has seen.
    total = len(prompts)
    count = round(validation * total) if validation < 1 else int(validation)
    different, sizes = np.unique(prompts, return_counts=True)
    taken, held_out = 0, []
    for prompt, size in zip(different, sizes, strict=True):
        # As near to `count` as whole prompts are.
        if size < 2 * (count - taken) and taken + size < total:
            held_out.append(prompt)
            taken += size
    if validation and (count >= total or not held_out):
        raise DataError(
            f"`validation` (={validation:g}) must hold out some of the {counted(total, 'row')} of "
            f"{name}, not all, and those with the same prompt or text together "
            f"({counted(len(different), 'group')}). Use another number, or 0 for no validation."
        )
    return np.array(held_out, prompts.dtype)


def _tokenize(
    name: str, tokenizer: Tokenizer, max_length: int, reader: RowReader, pairs: bool
) -> _TokenizedRows:
    """Read a data set and tokenize its rows."""
    tokens, losses, lengths, row_of, hashes, prompts = [], [], [], [], [], []
    special, end_tokens, counts = tokenizer.special_tokens, set(), Counter()
    rows = (row for _, row in read_examples(name, tokenizer, reader, pairs))
    for chunk in _chunk(rows):
        # The backend tokenizes the texts of a call in parallel.
        texts = [example.text for row in chunk for example in row]
        encodings = iter(encode_texts(tokenizer.backend, texts))
        pieces = []
        for row in chunk:
            before, is_cut = len(pieces), False
            for example in row:
                ids, has_loss, _ = mask_tokens(example, next(encodings), tokenizer)
                is_cut |= len(ids) > max_length and example.kind != "text"
                if not is_cut:
                    end_tokens |= _find_ends(ids, has_loss, special)
                pieces += split_tokens(ids, has_loss, max_length, example.kind == "text")
            # One answer of a pair has no token with loss within `max_length`, and a comparison
            # needs both.
            if pairs and len(pieces) < before + 2:
                del pieces[before:]
            elif pairs:
                counts["equal"] += np.array_equal(pieces[before][0], pieces[before + 1][0])
            row_of += [len(hashes)] * (len(pieces) - before)
            counts["rows"] += 1
            counts["cut"] += is_cut
            counts["split"] += len(row) > 1 and not pairs
            counts["skipped"] += len(pieces) == before
            hashes.append(_hash(repr(row)))
            prompts.append(_hash(row[0].text[: row[0].prompt or None]))
        lengths += [len(ids) for ids, _ in pieces]
        tokens.append(_concatenate([ids for ids, _ in pieces], np.int32))
        losses.append(_concatenate([has_loss for _, has_loss in pieces], bool))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return _TokenizedRows(
        Sequences(_concatenate(tokens, np.int32), _concatenate(losses, bool), offsets),
        np.array(row_of, np.int64),
        np.array(hashes, np.uint64),
        np.array(prompts, np.uint64),
        counts,
        end_tokens,
    )


def _hash(text: str) -> int:
    # Python's own hash of a string differs from process to process.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _chunk(rows: Iterator[list[_Example]]) -> Iterator[list[list[_Example]]]:
    """Yield lists of rows with about `CHUNK` characters."""
    # tokenizers encodes the texts of a list in parallel, to objects of about 300 bytes a character.
    chunk, size = [], 0
    for row in rows:
        chunk.append(row)
        size += sum(len(example.text) for example in row)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def split_tokens(
    ids: np.ndarray, has_loss: np.ndarray, max_length: int, keep_all: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the sequences of a text that have a token with loss."""
    # Each begins with the last token of the one before. The first of a sequence is not predicted.
    firsts = range(0, max(len(ids) - 1, 1) if keep_all else 1, max_length - 1)
    pieces = [(ids[i : i + max_length], has_loss[i : i + max_length].copy()) for i in firsts]
    for _, loss in pieces:
        loss[:1] = False
    return [(piece, loss) for piece, loss in pieces if loss.any()]


def mask_tokens(
    example: _Example, encoding: Any, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the tokens of a text with BOS and EOS, which have loss, and how many BOS are added."""
    ids = encoding.ids
    has_loss = np.full(len(ids), example.kind == "text")
    if example.kind != "text":
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for first, last in example.spans:
            # A token that begins in the prompt and ends in the answer is predicted: the model has
            # to write it.
            has_loss |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
    # Templates write BOS and EOS themselves.
    before, after = ((), ()) if example.kind == "messages" else tokenizer.missing_ends(ids)
    has_loss = np.pad(has_loss, (len(before), len(after)))
    # EOS is trained, so that the model learns to stop.
    has_loss[len(has_loss) - len(after) :] = True
    return np.array([*before, *ids, *after], np.int32), has_loss, len(before)


def _find_ends(ids: np.ndarray, has_loss: np.ndarray, special: set[int]) -> set[int]:
    """Return the special tokens that end the parts of a text with loss."""
    ends = set()
    for last in np.flatnonzero(has_loss & ~np.append(has_loss[1:], False)):
        # Templates write a line feed after the token of the end.
        pair = [int(ids[i]) for i in (last, last - 1) if i >= 0 and has_loss[i]]
        ends |= set([token for token in pair if token in special][:1])
    return ends


def _concatenate(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def read_examples(
    name: str, tokenizer: Tokenizer, reader: RowReader, pairs: bool
) -> Iterator[tuple[str, list[_Example]]]:
    """Yield the place and the examples of each row; of pairs, the chosen and the rejected one."""
    for row in read_rows(name, reader.columns.get("prompt", "prompt")):
        try:
            if not pairs:
                yield row.place, _render(reader.read(row.content), tokenizer)
                continue
            sides = [_render(side, tokenizer) for side in reader.read_pair(row.content)]
            if any(len(examples) > 1 for examples in sides):
                raise DataError(
                    "the chat template renders the conversation differently for each answer. Give "
                    "`chosen` and `rejected` with one answer each"
                )
            yield row.place, [example for (example,) in sides]
        except DataError as error:
            raise DataError(f"{name}: {row.place}: {error}") from error


def _render(content: Content, tokenizer: Tokenizer) -> list[_Example]:
    """Return the examples of the content of a row."""
    if isinstance(content, Conversation):
        turns = tokenizer.render_turns(
            content.messages, content.tools, content.has_loss, content.variables
        )
        return [
            _Example("messages", text, spans, spans[0][0] if content.has_prompt else 0)
            for text, spans in turns
        ]
    if isinstance(content, str):
        return [_Example("text", content, (), 0)]
    prompt, text = content[0], "".join(content)
    return [_Example("completion", text, ((len(prompt), len(text)),), len(prompt))]
