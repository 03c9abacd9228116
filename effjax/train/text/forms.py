"""The forms of rows, and the fields that each one has."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..errors import DataError, quoted
from .sources import json_type

TEXT, PROMPT, MESSAGES = ("text",), ("prompt", "completion"), ("messages",)
PAIR = "chosen", "rejected"  # of preferences
ALPACA, SHAREGPT = ("instruction", "output"), ("conversations",)
FORMS = "one of these: `text`; `prompt` with `completion`; or `messages`"
OPTIONAL = "tools", "chat_template_kwargs"  # beside messages
# Columns that `--columns` may name.
COLUMNS = (*TEXT, *PROMPT, *PAIR, *MESSAGES, *OPTIONAL, *ALPACA, "input", "system", *SHAREGPT)
# Fields of other programs that would change what is trained.
REFUSED = {
    "assistant_masks", "audio", "completion_mask", "history", "image", "images", "input_ids",
    "labels", "loss_mask", "sample_weight", "video", "videos", "weight",
}  # fmt: skip
REFUSED_OF_TURNS = {"loss", "loss_mask", "loss_weight", "mask", "train_detail", "train_on_turn"}
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages and how they are rendered.

    Attributes:
        messages: The turns.
        has_loss: Whether each turn has loss if it is one of the assistant.
        tools: JSON schemas of functions.
        variables: Further variables of the chat template.
    """

    messages: Sequence[dict[str, Any]]
    has_loss: Sequence[bool] = ()
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_prompt(self) -> bool:
        """True if a turn other than the system's is before the first one with loss."""
        turns = zip(self.messages, self.has_loss, strict=True)
        before = takewhile(lambda turn: turn[0]["role"] != "assistant" or not turn[1], turns)
        return any(message["role"] not in ("system", "developer") for message, _ in before)


# A text, a prompt with its completion, or a conversation.
Content = str | tuple[str, str] | Conversation


@dataclasses.dataclass
class RowReader:
    """Finds the texts or conversations in rows, and remembers what it has not used.

    Attributes:
        columns: The columns of a data set by the names of `COLUMNS`.
        unused: Fields that were not used.
        recognized: Descriptions of forms of other programs.
        found: Names of `columns` that a row had.
    """

    columns: Mapping[str, str]
    unused: dict[str, None] = dataclasses.field(default_factory=dict)
    recognized: dict[str, None] = dataclasses.field(default_factory=dict)
    found: set[str] = dataclasses.field(default_factory=set)

    def read(self, content: Mapping[str, Any]) -> Content:
        """Return a text, a prompt and its completion, or a conversation.

        Raises:
            DataError: The row is malformed. The message does not name it.
        """
        row = self._translate(self._read_trained(content))
        complete = [f for f in (TEXT, PROMPT, MESSAGES) if all(name in row for name in f)]
        if not complete:
            have = quoted(", ".join(f"`{name}`" for name in row)) or "nothing"
            remedy = "--columns gives other names."
            if all(name in row for name in PAIR):
                remedy = "--loss dpo trains on `chosen` and `rejected`."
            raise DataError(f"must have {FORMS}. It has {have}. {remedy}")
        if len(complete) > 1:
            names = " and ".join(f"`{name}`" for form in complete for name in form)
            raise DataError(f"must have only {FORMS}. It has {names}.")
        (form,) = complete
        is_chat = form != TEXT and all(isinstance(row[name], list) for name in form)
        self._note_unused(row, *form, *(OPTIONAL if is_chat else ()))
        if is_chat:
            return self._read_conversation(row, form)
        if form == MESSAGES:
            raise DataError("`messages` must be a list of at least one message")
        texts = _read_texts(row, form)
        return texts[0] if form == TEXT else (texts[0], texts[1])

    def read_pair(self, content: Mapping[str, Any]) -> tuple[Content, Content]:
        """Return the chosen and the rejected answer, each with its prompt.

        Without a `prompt` of messages, the prompt is what the two lists of messages begin with.

        Raises:
            DataError: The row is malformed. The message does not name it.
        """
        row = self._read_trained(content)
        if missing := [name for name in PAIR if name not in row]:
            have = quoted(", ".join(f"`{name}`" for name in row)) or "nothing"
            raise DataError(
                f"must have `prompt`, `chosen` and `rejected`. It lacks `{missing[0]}`, and has "
                f"{have}. --columns gives other names."
            )
        is_chat = [isinstance(row[name], list) for name in PAIR]
        prompt = row.get("prompt")
        if all(is_chat):
            if not isinstance(prompt, list):
                row |= _find_prompt(row["chosen"], row["rejected"])
                self.recognized["the prompt is what `chosen` and `rejected` begin with"] = None
            self._note_unused(row, "prompt", *PAIR, *OPTIONAL)
            chosen, rejected = (self._read_conversation(row, ("prompt", name)) for name in PAIR)
            return chosen, rejected
        if prompt is None:
            raise DataError(
                "must have a `prompt`, unless `chosen` and `rejected` are lists of messages"
            )
        self._note_unused(row, "prompt", *PAIR)
        first, chosen, rejected = _read_texts(row, ("prompt", *PAIR))
        return (first, chosen), (first, rejected)

    def _read_trained(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row by the names of `COLUMNS`, without fields that are null."""
        row = self._rename({name: value for name, value in content.items() if value is not None})
        if refused := sorted(REFUSED & row.keys()):
            raise DataError(
                f"`{refused[0]}` would change what is trained, and is not supported. Remove it "
                "from the rows."
            )
        return row

    def _note_unused(self, row: Mapping[str, Any], *used: str) -> None:
        self.unused |= {name: None for name in row if name not in used}

    def read_prompt(self, content: Mapping[str, Any]) -> str | Conversation:
        """Return a text to continue, or a conversation to answer.

        Raises:
            DataError: The row is malformed. The message does not name it.
        """
        row = self._rename({name: value for name, value in content.items() if value is not None})
        given = [name for name in ("prompt", "messages") if name in row]
        if len(given) != 1:
            raise DataError("must have one of `prompt` and `messages`")
        (name,) = given
        is_chat = isinstance(row[name], list)
        self._note_unused(row, name, *(OPTIONAL if is_chat else ()))
        if not is_chat:
            if name == "messages" or not isinstance(row[name], str):
                kind = "a list" if name == "messages" else "a string or a list"
                raise DataError(f"`{name}` must be {kind}, not a {json_type(row[name])}")
            return row[name]
        conversation = self._read_turns(row, (name,))
        if conversation.messages[-1]["role"] == "assistant":
            raise DataError(
                f"`{name}` must end before a turn of the role 'assistant', which is generated"
            )
        return conversation

    def _rename(self, row: dict[str, Any]) -> dict[str, Any]:
        sources = {column: name for name, column in self.columns.items() if column in row}
        self.found |= set(sources.values())
        replaced = set(sources.values()) - sources.keys()
        self.unused |= {name: None for name in replaced if name in row}
        return {
            sources.get(name, name): value for name, value in row.items() if name not in replaced
        }

    def _translate(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row in the forms of other programs as one with `messages`."""
        row = dict(row)
        if SHAREGPT[0] in row and MESSAGES[0] not in row:
            row["messages"] = row.pop("conversations")
            self.recognized["`conversations` are read as `messages`"] = None
        if all(name in row for name in ALPACA) and MESSAGES[0] not in row and "text" not in row:
            texts = {name: row.pop(name, "") for name in (*ALPACA, "input", "system")}
            for name, text in texts.items():
                if not isinstance(text, str):
                    raise DataError(f"`{name}` must be a string, not a {json_type(text)}")
            question = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
            turns = ("system", texts["system"]), ("user", question), ("assistant", texts["output"])
            row["messages"] = [
                {"role": role, "content": text} for role, text in turns if text or role != "system"
            ]
            self.recognized["`instruction`, `input` and `output` are read as `messages`"] = None
        return row

    def _read_conversation(self, row: dict[str, Any], form: tuple[str, ...]) -> Conversation:
        """Return the messages of a row, of which one at least has loss."""
        conversation = self._read_turns(row, form)
        turns = zip(conversation.messages, conversation.has_loss, strict=True)
        if not any(message["role"] == "assistant" and loss for message, loss in turns):
            where = "`messages`" if form == MESSAGES else f"`{form[-1]}`"
            raise DataError(f"{where} must have a message of the role 'assistant' to learn from")
        return conversation

    def _read_turns(self, row: dict[str, Any], form: tuple[str, ...]) -> Conversation:
        messages, has_loss = [], []
        for name in form:
            turns = row[name]
            if not isinstance(turns, list) or not turns:
                raise DataError(f"`{name}` must be a list of at least one message")
            for turn in turns:
                message, is_trained = self._read_message(len(messages) + 1, turn)
                messages.append(message)
                has_loss.append(is_trained and name != "prompt")
        tools, variables = _from_json(row.get("tools")), row.get("chat_template_kwargs", {})
        if tools is not None and not isinstance(tools, list):
            raise DataError(f"`tools` must be a list, not a {json_type(tools)}")
        if not isinstance(variables, dict):
            raise DataError(
                f"`chat_template_kwargs` must be an object, not a {json_type(variables)}"
            )
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in variables:
                raise DataError(f"`chat_template_kwargs` must not have `{name}`")
        return Conversation(messages, has_loss, tools, variables)

    def _read_message(self, number: int, message: Any) -> tuple[dict[str, Any], bool]:
        """Return a message, and whether it has loss."""
        if not isinstance(message, dict):
            raise DataError(f"message {number} must be an object, not a {json_type(message)}")
        message = {name: value for name, value in message.items() if value is not None}
        if "from" in message and "role" not in message:
            role = message.pop("from")
            if not isinstance(role, str) or role not in ROLES:
                raise DataError(
                    f"message {number}: `from` (={role!r:.80}) must be one of {[*ROLES]}"
                )
            message = {"role": ROLES[role], "content": message.pop("value", None), **message}
            self.recognized["`from` and `value` are read as `role` and `content`"] = None
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} must have a `role`, such as 'user' or 'assistant'")
        if refused := sorted(REFUSED_OF_TURNS & message.keys()):
            raise DataError(
                f"message {number}: `{refused[0]}` would change the loss, and is not supported. "
                "Use `train`: false, or `weight`: 0, for a turn without loss."
            )
        weight, train = message.pop("weight", 1), message.pop("train", True)
        if weight not in (0, 1) or not isinstance(train, bool):
            raise DataError(
                f"message {number}: `weight` (={weight!r:.80}) must be 0 or 1, and `train` "
                f"(={train!r:.80}) true or false"
            )
        content = _join_parts(number, message.get("content"))
        # A turn may consist of calls of tools only.
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            kind = json_type(content) if "content" in message else "nothing"
            raise DataError(f"message {number} must have a string as its `content`, not {kind}")
        if content is not None:
            message["content"] = content
        return message, bool(weight) and train


def _read_texts(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the strings of some fields, of which the prompt may be empty."""
    for name in names:
        if not isinstance(row[name], str):
            raise DataError(f"`{name}` must be a string, not a {json_type(row[name])}")
        if not row[name] and name != "prompt":
            raise DataError(f"`{name}` must not be empty")
    return [row[name] for name in names]


def _find_prompt(chosen: list[Any], rejected: list[Any]) -> dict[str, list[Any]]:
    """Return the messages that both begin with as `prompt`, and the rest of each."""
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    if chosen == rejected:
        count -= 1  # equal answers are counted
    if not count:
        raise DataError("`chosen` and `rejected` must begin with the same messages, the prompt")
    if count in (len(chosen), len(rejected)):
        raise DataError("`chosen` and `rejected` must end with different answers")
    return {"prompt": chosen[:count], "chosen": chosen[count:], "rejected": rejected[count:]}


def _join_parts(number: int, content: Any) -> Any:
    """Return the text of a content of parts; other contents as they are."""
    # Templates of models without images take strings only.
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"message {number}: parts of `content` must be text, not {part.get('type')!r:.80}"
            )
    return "".join(part["text"] for part in content)


def _from_json(value: Any) -> Any:
    """Return the value of a string of JSON; other values as they are."""
    # A column of Parquet has one type, so data sets store schemas of functions as strings.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`tools` is not JSON ({quoted(error)})") from error


def parse_columns(text: str) -> dict[str, str]:
    """Return the columns in a text such as `prompt=question,completion=answer`.

    Raises:
        DataError: It has another form, or names a column that rows do not have.
    """
    columns = {}
    for pair in text.split(","):
        name, _, column = (part.strip() for part in pair.partition("="))
        if name not in COLUMNS or not column or name in columns:
            raise DataError(
                f"`columns` (={text!r:.120}) must be NAME=COLUMN,…, with each name once, of "
                f"{', '.join(COLUMNS)}"
            )
        columns[name] = column
    return columns
