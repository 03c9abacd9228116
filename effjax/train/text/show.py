"""Rows as they are trained on, for people."""

import numpy as np
from rich.console import Console
from rich.text import Text

from ..errors import counted, printable
from .chat import Tokenizer
from .config import FinetuneConfig
from .packing import PackedRows, train_batches

LOSS, CONTEXT = "bold green", "dim"  # styles of tokens
OPEN, CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)


def show_rows(
    console: Console,
    config: FinetuneConfig,
    rows: PackedRows,
    tokenizer: Tokenizer,
    count: int,
    with_ids: bool = False,
) -> None:
    """Print the first rows of the first epoch, sequence by sequence.

    Tokens with loss are green on a terminal, and in white brackets elsewhere.

    Args:
        console: Where to print.
        config: The options of the run.
        rows: The rows.
        tokenizer: The tokenizer of the checkpoint.
        count: The number of rows.
        with_ids: Whether the id of each token follows it.
    """
    count = min(count, len(rows.train))
    batch = next(train_batches(rows.train, count, config.seed))
    sides = [""]
    if config.has_pairs:
        sides = [", chosen", ", rejected"]
        names = batch.keys() - {"pairs", "references"}
        batch = {name: batch[name].reshape(2 * count, -1) for name in names}
    for i in range(count * len(sides)):
        tokens, positions = batch["tokens"][i], batch["positions"][i]
        # The weight of a position is that of the next token, which it predicts.
        has_loss = np.append(False, batch["weights"][i, :-1] > 0)
        segments = batch["segment_ids"][i] if "segment_ids" in batch else None
        if segments is None:
            segments = (np.arange(len(tokens)) <= positions.argmax()).astype(int)
        number = int(segments.max())
        console.print(
            Text(
                f"row {i // len(sides) + 1}{sides[i % len(sides)]}: {counted(number, 'sequence')}, "
                f"{counted(int((segments > 0).sum()), 'token')}, {int(has_loss.sum())} with loss"
            )
        )
        for segment in range(1, number + 1):
            chosen = segments == segment
            text = _color(
                tokenizer, tokens[chosen], has_loss[chosen], with_ids, console.is_terminal
            )
            console.print(text, soft_wrap=True)


def _color(
    tokenizer: Tokenizer, tokens: np.ndarray, has_loss: np.ndarray, with_ids: bool, color: bool
) -> Text:
    """Return the text of a sequence."""
    # Neighbors are decoded together: a character may have several tokens.
    text, changes = Text(), np.flatnonzero(np.diff(has_loss)) + 1
    groups = [*range(1, len(tokens))] if with_ids else changes
    for ids, losses in zip(np.split(tokens, groups), np.split(has_loss, groups), strict=True):
        decoded = tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
        piece = "\n".join(map(printable, decoded.split("\n")))
        piece += f"({ids[0]})" if with_ids else ""
        if losses[0] and not color:
            piece = f"{OPEN}{piece}{CLOSE}"
        text.append(piece, style=LOSS if losses[0] else CONTEXT)
    return text
