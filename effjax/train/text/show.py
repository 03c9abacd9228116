"""Rows as they are trained on, for people."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.segment import Segment, Segments

from ..errors import counted, printable
from .chat import Tokenizer
from .config import FinetuneConfig
from .decode import printable_lines
from .encode import encode_texts
from .forms import PAIR, RowReader, parse_columns
from .rows import mask_tokens, read_examples, split_tokens

LOSS, CONTEXT = "bold green", "dim"  # styles of tokens


class _Token(NamedTuple):
    number: int
    name: str
    text: str
    has_loss: bool


def show_rows(
    console: Console, config: FinetuneConfig, tokenizer: Tokenizer, count: int, with_ids: bool
) -> None:
    """Print the first rows of each data set, and which of their tokens have loss.

    A line of text begins with `+` if it has loss, else with a space, and then with `|`, or with `>`
    if it continues the line above.

    Args:
        console: Where to print. On a terminal, tokens with loss are green.
        config: The options of the run.
        tokenizer: The tokenizer of the checkpoint.
        count: The number of rows of each data set.
        with_ids: Whether to print the ids and the names of the tokens in place of their text.
    """
    reader = RowReader(parse_columns(config.columns) if config.columns else {})
    for name in config.data or ():
        rows = read_examples(name, tokenizer, reader, config.has_pairs)
        for place, examples in itertools.islice(rows, count):
            place, parts = printable(f"{name}: {place}"), _tokenize(examples, tokenizer, config)
            if not parts:
                limit = counted(config.max_length, "token")
                _print(console, f"{place}: left out, no token with loss in the first {limit}")
            for i, (tokens, num_cut) in enumerate(parts):
                title = f"sequence {i + 1} of {len(parts)}, " if len(parts) > 1 else ""
                title = f"{PAIR[i]}, " if config.has_pairs else title
                num_losses = sum(token.has_loss for token in tokens)
                sizes = f"{counted(len(tokens), 'token')}, {num_losses} with loss"
                cut = f", {counted(num_cut, 'token')} cut off" if num_cut else ""
                _print(console, f"{place}: {title}{sizes}{cut}")
                for line, has_loss in _name_tokens(tokens) if with_ids else _split_lines(tokens):
                    mark, style = ("+", LOSS) if has_loss else (" ", CONTEXT)
                    _print(console, f"{mark}{line}", style)


def _print(console: Console, text: str, style: str = "") -> None:
    # A segment, because a text of rich has spaces in place of tabs.
    segment = Segment(printable_lines(text), console.get_style(style))
    console.print(Segments([segment], new_lines=True), end="", soft_wrap=True)


def _tokenize(
    examples: Sequence[Any], tokenizer: Tokenizer, config: FinetuneConfig
) -> list[tuple[list[_Token], int]]:
    """Return the sequences of a row, and how many tokens of each are cut off.

    There are none if the row is left out.
    """
    parts = []
    encodings = encode_texts(tokenizer.backend, [example.text for example in examples])
    for example, encoding in zip(examples, encodings, strict=True):
        ids, has_loss, num_added = mask_tokens(example, encoding, tokenizer)
        names = [tokenizer.backend.id_to_token(token) for token in ids.tolist()]
        # The text as it is in the row. Decoders drop or add spaces.
        starts = [0, *(first for first, _ in encoding.offsets[1:]), len(example.text)]
        texts = [example.text[first:last] for first, last in itertools.pairwise(starts)]
        texts = names[:num_added] + texts + names[num_added + len(texts) :]
        is_text = example.kind == "text"
        numbers = np.arange(len(ids))
        for chosen, losses in split_tokens(numbers, has_loss, config.max_length, is_text):
            values = ((int(ids[i]), names[i], texts[i]) for i in chosen)
            tokens = [_Token(*of, loss) for of, loss in zip(values, losses, strict=True)]
            parts.append((tokens, 0 if is_text else len(ids) - len(tokens)))
    return [] if config.has_pairs and len(parts) < 2 else parts


def _name_tokens(tokens: list[_Token]) -> Iterator[tuple[str, bool]]:
    for token in tokens:
        yield f" {token.number} {token.name!r}", token.has_loss


def _split_lines(tokens: list[_Token]) -> Iterator[tuple[str, bool]]:
    mark = "|"
    for has_loss, group in itertools.groupby(tokens, lambda token: token.has_loss):
        *lines, rest = "".join(token.text for token in group).split("\n")
        for line in [*lines, rest] if rest else lines:
            yield f"{mark}{line}", has_loss
            mark = "|"
        mark = ">" if rest else "|"
