"""Decoding of tokens to text while they are generated, up to texts that end it."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from ..errors import TrainError, printable
from .chat import Tokenizer

# Characters that are shown although they are not printable; two of them join letters and emoji.
KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the bytes of a character
CONTEXT = 16  # tokens before a text that decide how it begins


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


def decode(
    tokenizer: Tokenizer,
    tokens: Iterable[int],
    stops: Sequence[str] = (),
    before: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the text of tokens in pieces, as soon as each is complete.

    Special tokens have no text.

    Args:
        tokenizer: The tokenizer.
        tokens: The tokens, of which no more are taken than the text needs.
        stops: Texts before which the text ends.
        before: The tokens that the text continues. Without them, decoders that begin each text with
            a space, such as that of Llama 2, remove it from the first token.
    """
    text = ""  # what may be the beginning of a stop
    for piece in _decode_pieces(tokenizer, tokens, before):
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


def _decode_pieces(
    tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int]
) -> Iterator[str]:
    from tokenizers.decoders import DecodeStream

    def text_of(ids: Sequence[int]) -> str:
        return tokenizer.backend.decode([*ids], skip_special_tokens=True)

    context, held = [*before[-CONTEXT:]], []
    # The stream would also give out a context that ends within a character.
    context = [] if text_of(context).endswith(INCOMPLETE) else context
    stream = DecodeStream(ids=context, skip_special_tokens=True)
    for token in tokens:
        held.append(token)
        try:
            piece = stream.step(tokenizer.backend, token)
        # Bytes that are no character change the text of bytes before them, and end the stream. Its
        # errors have no type of their own.
        except Exception:
            piece, stream = text_of(held), DecodeStream(ids=held, skip_special_tokens=True)
        if piece:
            yield piece
            context, held = held, []
    # The stream holds back an incomplete character, whose rest may follow.
    if rest := text_of([*context, *held])[len(text_of(context)) :]:
        yield rest


def printable_lines(text: str) -> str:
    """Return a text with its control characters, which could change what a terminal shows, escaped.

    Lines and tabs stay.
    """

    def is_kept(char: str) -> bool:
        return char in KEPT or unicodedata.category(char) == "Zs"  # any kind of space

    return "".join(char if is_kept(char) else printable(char) for char in text)
