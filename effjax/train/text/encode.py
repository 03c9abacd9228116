"""Tokenization of texts of any length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

PART = 2**20  # characters that are tokenized at once, which take about 300 bytes each meanwhile
MARGIN = 4096  # characters of a part that are tokenized again in the next one


class Tokens(NamedTuple):
    """The tokens of a long text.

    Attributes:
        ids: int32 [n].
        offsets: int64 [n, 2], the first character of each token and that after its last one.
    """

    ids: np.ndarray
    offsets: np.ndarray


def encode_texts(backend: Any, texts: Sequence[str]) -> list[Any]:
    """Return objects with the `ids` and the `offsets` of each text, without special tokens.

    Args:
        backend: `tokenizers.Tokenizer`, without truncation and padding.
        texts: The texts. Those of more than `PART` characters are tokenized in parts, to the same
            tokens.
    """
    short = [text for text in texts if len(text) <= PART]
    encodings = iter(backend.encode_batch(short, add_special_tokens=False))
    return [next(encodings) if len(text) <= PART else _encode_long(backend, text) for text in texts]


def _encode_long(backend: Any, text: str) -> Tokens:
    parts, start, expected = [], 0, np.zeros(0, np.int32)
    while True:
        part = text[start : start + PART]
        encoding = backend.encode(part, add_special_tokens=False)
        tokens = _as_tokens(encoding)
        # Where a part begins, a tokenizer may add a space or remove one. It is seen here.
        if not np.array_equal(tokens.ids[: len(expected)], expected):
            return _as_tokens(backend.encode(text, add_special_tokens=False))
        first = Tokens(tokens.ids, tokens.offsets + start)
        if start + PART >= len(text):
            return Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, first, strict=True)))
        count = _count_before_cut(part, encoding, tokens)
        if count is None:
            return _as_tokens(backend.encode(text, add_special_tokens=False))
        parts.append(Tokens(first.ids[:count], first.offsets[:count]))
        last = np.searchsorted(tokens.offsets[:, 1], PART - MARGIN // 2)
        expected = tokens.ids[count:last]
        start += int(tokens.offsets[count - 1, 1])


def _as_tokens(encoding: Any) -> Tokens:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return Tokens(np.array(encoding.ids, np.int32), offsets)


# Tokenizers split a text into words before they look up tokens, most by a regular expression that
# reads from left to right and at most one character ahead. After the end of a word, the words are
# those of the rest of the text. Words near the end of a part may continue in the next one. A
# tokenizer without this step makes one word of the text, which cannot be cut.
def _count_before_cut(part: str, encoding: Any, tokens: Tokens) -> int | None:
    """Return how many tokens of a part to keep, or None if there is no place to cut the text."""
    words = np.array([-1 if word is None else word for word in encoding.word_ids])
    ends, starts = tokens.offsets[:-1, 1], tokens.offsets[1:, 0]
    may_cut = (words[1:] != words[:-1]) & (starts >= ends) & (ends > 0) & (ends < PART - MARGIN)
    places = np.flatnonzero(may_cut)[::-1]

    def is_before_space(end: int) -> bool:
        return part[end] == " " and not part[end - 1].isspace() and not part[end + 1].isspace()

    def is_after_line(end: int) -> bool:
        return part[end - 1] == "\n" and not part[end].isspace()

    # Later places are tried only if there is none of the kind before. A space between two letters
    # is a boundary for every tokenizer; after a line feed, for most of them.
    for accepts in (is_before_space, is_after_line, lambda end: True):
        for place in places:
            if accepts(int(ends[place])):
                return int(place) + 1
    return None
