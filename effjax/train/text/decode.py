"""Decoding of tokens to text while they are generated, up to texts that end it."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from ..errors import TrainError, printable
from .chat import Tokenizer

# Characters that are shown although they are not printable; two of them join letters and emoji.
KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the bytes of a character


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[str], set[int]]:
    """Return the texts among those that end a completion, and the special tokens.

    Special tokens have no text, so that they are compared as tokens.

    Raises:
        TrainError: A text is empty, or has more than a special token.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    texts, tokens = [], set()
    for stop in stops:
        if not stop or stop.encode(errors="ignore").decode() != stop:
            raise TrainError(f"`stop` (={stop!r:.120}) must be a text in UTF-8, and not empty.")
        if stop in special:
            tokens.add(special[stop])
        elif inside := [name for name in special if name in stop]:
            raise TrainError(
                f"`stop` (={stop!r:.120}) must be a text, or a special token alone, such as "
                f"{inside[0]}, which has no text."
            )
        else:
            texts.append(stop)
    return texts, tokens


def decode(tokenizer: Tokenizer, tokens: Iterable[int], stops: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of tokens in pieces, as soon as each is complete.

    Special tokens have no text.

    Args:
        tokenizer: The tokenizer.
        tokens: The tokens, of which no more are taken than the text needs.
        stops: Texts before which the text ends.
    """
    text = ""  # what may be the beginning of a stop
    for piece in _decode_pieces(tokenizer, tokens):
        text += piece
        if found := [text.index(stop) for stop in stops if stop in text]:
            text = text[: min(found)]
            break
        ready = next(
            i
            for i in range(len(text) + 1)
            if i == len(text) or any(stop.startswith(text[i:]) for stop in stops)
        )
        if ready:
            yield text[:ready]
        text = text[ready:]
    if text:
        yield text


def _decode_pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    ids: list[int] = []
    done = 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.backend.decode(ids, skip_special_tokens=True)
        if len(text) > done and not text.endswith(INCOMPLETE):
            yield text[done:]
            done = len(text)
    rest = tokenizer.backend.decode(ids, skip_special_tokens=True)[done:]
    if rest:
        yield rest


def printable_lines(text: str) -> str:
    """Return a text with its control characters, which could change what a terminal shows, escaped.

    Lines and tabs stay.
    """

    def is_kept(char: str) -> bool:
        return char in KEPT or unicodedata.category(char) == "Zs"  # any kind of space

    return "".join(char if is_kept(char) else printable(char) for char in text)
