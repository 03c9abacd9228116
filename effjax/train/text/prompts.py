"""Files of prompts."""

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, check_regular, quoted, unreadable
from .forms import Conversation, RowReader
from .sources import read_rows

SUFFIXES = ".txt", ".jsonl"


class Prompt(NamedTuple):
    """A prompt of a file.

    Attributes:
        content: The text to continue or to answer, or a conversation to answer.
        row: The row of the file; of a line of text, `{"prompt": line}`.
    """

    content: str | Conversation
    row: dict[str, Any]

    @property
    def title(self) -> str:
        """The text, or the last message."""
        if isinstance(self.content, str):
            return self.content
        return self.content.messages[-1].get("content") or ""


def read_prompt_file(file: Path) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a file, and notes on how fields were read.

    Args:
        file: A .txt file with a prompt in each line, or a .jsonl file whose rows have a `prompt`, a
            text or a list of messages, or `messages`.

    Raises:
        DataError: The file cannot be read, has another suffix or no prompt, or a row is malformed.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{file}: must be a file of prompts, .txt or .jsonl.")
    if suffix == ".txt":
        lines = read_lines(file)
        if not lines:
            raise DataError(f"{file}: contains no prompt. Write one into each line.")
        return [Prompt(line, {"prompt": line}) for line in lines], []
    reader, prompts = RowReader({}), []
    for row in read_rows(str(file)):
        try:
            prompts.append(Prompt(reader.read_prompt(row.content), row.content))
        except DataError as error:
            raise DataError(f"{file}: {row.place}: {error}") from error
    notes = [*reader.recognized]
    if reader.unused:
        notes.append(f"unused fields: {quoted(', '.join(reader.unused))}")
    return prompts, notes


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty.

    Raises:
        DataError: It cannot be read.
    """
    check_regular(file)
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 ({error.reason})") from error
    return [line for line in lines if line]
