"""The tokenizer and the chat template of a checkpoint in Hugging Face's layout."""

import contextlib
import datetime
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from ..._extras import install_command
from ..errors import DataError, check_regular, counted, quoted
from ..files import read_json, read_text

Spans = tuple[tuple[int, int], ...]  # of characters: first, last + 1
Message = Mapping[str, Any]

CONTENT = "effjax-turn"  # content of a turn; no template contains this text
MARK = "\ud800"  # half of a surrogate pair, which no valid text contains
GENERATION_TAG = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
REASONING = "reasoning_content", "thinking", "reasoning"  # names of a field in data sets


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its chat template, from `load_tokenizer`.

    Attributes:
        backend: `tokenizers.Tokenizer`. It adds no tokens to a text.
        beginning: The tokens that begin a text: BOS, or none.
        end: The tokens that end a text: EOS, or none.
        template: The chat template, a `jinja2.Template`. None for a checkpoint without one.
        marks_generation: Whether the template has ``{% generation %}`` tags.
        variables: Special tokens that the template may read, such as `bos_token`.
    """

    backend: Any
    beginning: tuple[int, ...]
    end: tuple[int, ...]
    template: Any
    marks_generation: bool
    variables: dict[str, str]

    @property
    def special_tokens(self) -> set[int]:
        """The special tokens, such as those that end a turn, and EOS."""
        added = self.backend.get_added_tokens_decoder()
        return {*self.end, *(number for number, token in added.items() if token.special)}

    def missing_ends(self, ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens to put before and after a text, which may have them already."""
        # A text that was rendered by a template spells them.
        has_beginning = tuple(ids[: len(self.beginning)]) == self.beginning
        has_end = tuple(ids[len(ids) - len(self.end) :]) == self.end
        return () if has_beginning else self.beginning, () if has_end else self.end

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """Return a conversation as text, as `apply_chat_template` of transformers does.

        Args:
            messages: The turns. Each has a `role` and a `content`.
            add_generation_prompt: Whether to end with the beginning of an assistant turn.
            tools: JSON schemas of functions.
            variables: Further variables of the template, as `chat_template_kwargs` of transformers.

        Raises:
            DataError: The checkpoint lacks a template, or it does not accept the messages.
        """
        return self._render(messages, add_generation_prompt, tools, variables).replace(MARK, "")

    def turn_ends(
        self, messages: Sequence[Message] = ({"role": "user", "content": CONTENT},), **options: Any
    ) -> set[int]:
        """Return the special token that the template writes after an answer, if it writes one.

        There is none if the template does not accept the messages.

        Args:
            messages: The turns before the answer.
            **options: Those of `render`.
        """
        answer = {"role": "assistant", "content": CONTENT}
        with contextlib.suppress(DataError):
            after = self.render([*messages, answer], **options).rpartition(CONTENT)[2]
            first = self.backend.encode(after, add_special_tokens=False).ids[:1]
            return self.special_tokens.intersection(first)
        return set()

    def render_turns(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        has_loss: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = {},
    ) -> list[tuple[str, Spans]]:
        """Return the texts of a conversation to train on, with the spans of the assistant's turns.

        The spans are those that the template marks with ``{% generation %}``. Without such marks,
        the conversation is rendered up to each turn of the assistant, with the turn and with a
        prompt for it instead. The turn is what the former adds to the latter.

        There is one text, the whole conversation, unless the template changes a turn when others
        follow it, as that of Qwen 3, which removes reasoning. The result then has one text for each
        turn: the conversation that a model has read when it generates the turn.

        Args:
            messages: The turns.
            tools: JSON schemas of functions.
            has_loss: Whether each turn has loss if it is one of the assistant. By default all have.
            variables: Further variables of the template.

        Raises:
            DataError: As for `render`. Or the text with a turn does not begin with its prompt.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in answers if has_loss is None or has_loss[i]]
        # Marks of the template itself are exact, also if it changes turns that others follow.
        if self.marks_generation:
            pieces = self._render(messages, False, tools, variables).split(MARK)
            # Each block has a mark at both ends: an odd number of pieces, of which every second one
            # is trained.
            if len(pieces) % 2 == 0:
                raise DataError(
                    "the chat template removes one end of a {% generation %} block, for example "
                    "with a filter"
                )
            if len(pieces) == 1:
                raise DataError(
                    "the chat template marks no turn of the assistant: it has {% generation %} "
                    "blocks, and none is reached with these messages. Correct the template."
                )
            ends = list(accumulate(map(len, pieces)))
            spans = [*zip(ends[:-1:2], ends[1::2], strict=True)]
            if len(trained) < len(answers):
                if len(spans) != len(answers):
                    raise DataError(
                        f"the chat template marks {counted(len(spans), 'turn')} of "
                        f"{counted(len(answers), 'answer')}, so that those without loss are unknown"
                    )
                spans = [spans[answers.index(i)] for i in trained]
            return [("".join(pieces), tuple(spans))]

        texts, spans = [], []
        for i in trained:
            prompt = self.render(messages[:i], True, tools, variables)
            text = self.render(messages[: i + 1], False, tools, variables)
            if not text.startswith(prompt):
                raise DataError(
                    f"message {i + 1} (assistant): cannot find where the turn begins. The "
                    "conversation rendered with this turn must begin with the prompt for it, which "
                    f"ends in {prompt[-40:]!r}. Mark the assistant's turns in the template with "
                    "{% generation %} and {% endgeneration %}."
                )
            texts.append(text)
            spans.append((len(prompt), len(text)))
        # If the whole conversation begins with the text of every turn, one sequence trains all of
        # them, at the cost of one pass.
        whole = self.render(messages, False, tools, variables)
        if all(whole.startswith(text) for text in texts):
            return [(whole, tuple(spans))]
        return [(text, (span,)) for text, span in zip(texts, spans, strict=True)]

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: list[Any] | None,
        variables: Mapping[str, Any],
    ) -> str:
        if self.template is None:
            raise DataError(
                "the checkpoint lacks a chat template, which `messages` need. Use another one, "
                "give one with --chat-template, or use `prompt` and `completion`."
            )
        try:
            return self.template.render(
                messages=[_normalize(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **{**self.variables, **variables},
            )
        # A template is a program: messages of another form than it expects raise any type of error.
        except Exception as error:
            what = f"the first {counted(len(messages), 'message')}"
            if not messages:
                what = "a conversation that begins with a turn of the assistant"
            raise DataError(
                f"the chat template does not accept {what} ({quoted(error)})"
            ) from error


def load_tokenizer(
    folder: str | Path, today: datetime.date, template: str | Path | None = None
) -> Tokenizer:
    """Load the tokenizer of a checkpoint, and its chat template.

    The files are read as by `transformers.PreTrainedTokenizerFast`: tokenizer.json, the tokens that
    tokenizer_config.json, added_tokens.json or special_tokens_map.json add to it, and the template
    in chat_template.jinja or tokenizer_config.json. The template is a program from the checkpoint.
    It runs in Jinja's sandbox without access to files or the network, but may use any amount of
    time and memory. Load checkpoints that you trust.

    A text begins and ends with the tokens that tokenizer.json adds to it, such as BOS; as in
    transformers, `add_bos_token` in tokenizer_config.json is ignored. Rows of `text` and of
    `prompt` with `completion` end with EOS. For `messages` the chat template must write it; if it
    does not, the model does not learn to stop. Text in which a special token is spelled out
    contains this token, as in transformers.

    Args:
        folder: The folder of the checkpoint.
        today: The date that templates may write into a system prompt. A run that continues needs
            that of its beginning, or its data differ.
        template: A file with another chat template.

    Raises:
        DataError: A file is missing or invalid, or a package.
    """
    folder = Path(folder)
    tokenizer = _read_tokenizer(folder)
    from tokenizers import processors

    backend = tokenizer.backend_tokenizer
    # Sequences are cut and padded by the functions that read rows.
    backend.no_truncation()
    backend.no_padding()
    beginning, end = _added_tokens(backend)
    # tokenizer.json of most checkpoints adds no EOS, but a model that does not see one does not
    # learn to stop.
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in end:
        end = *end, tokenizer.eos_token_id
    # Byte-level processors would also shorten the offsets of tokens by their spaces.
    backend.post_processor = processors.Sequence([])
    source = tokenizer.chat_template if template is None else read_text(Path(template))
    if isinstance(source, dict):  # several, by name
        source = source.get("default")
    if not isinstance(source, str | None):
        raise DataError(f"{folder / TOKENIZER_CONFIG}: `chat_template` must be a string")
    compiled = None if source is None else _compile(source, today)
    marks_generation = source is not None and bool(GENERATION_TAG.search(source))
    variables = tokenizer.special_tokens_map
    return Tokenizer(backend, beginning, end, compiled, marks_generation, variables)


def _read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint, a `transformers.PreTrainedTokenizerFast`."""
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401

        # On its import, transformers advises to install PyTorch, which no tokenizer needs.
        logging.getLogger("transformers").addFilter(_is_not_advice)
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:  # also of versions that transformers does not accept
        problem = f"transformers cannot be used ({quoted(error)})"
        if isinstance(error, ModuleNotFoundError):
            problem = f"{error.name} is missing"
        raise DataError(f"{problem}. Run {install_command('finetune')}.") from error

    file = folder / "tokenizer.json"
    check_regular(file)
    if not file.exists():  # transformers would convert other files, by packages for each kind
        raise DataError(f"{file}: does not exist. Give a checkpoint with this file.")
    # Of files beside it, transformers also reads other versions and templates.
    for other in (*folder.glob("tokenizer*.json"), *folder.glob("additional_chat_templates/*")):
        check_regular(other)
    # transformers names no file in its errors.
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            read_json(folder / name)
    if (folder / CHAT_TEMPLATE).exists():
        read_text(folder / CHAT_TEMPLATE)
    try:
        # Not AutoTokenizer, which replaces a tokenizer by the class of `model_type`.
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises no other type
        raise DataError(f"{file}: is not a tokenizer ({quoted(error)})") from error
    # Tokens that only other files name get the next free numbers.
    for number, token in tokenizer.init_kwargs["added_tokens_decoder"].items():
        actual = tokenizer.backend_tokenizer.token_to_id(str(token))
        if actual != number:
            raise DataError(
                f"{file}: {str(token)!r:.120} is token {actual}, and {TOKENIZER_CONFIG} or "
                f"added_tokens.json says {number}. Correct the files."
            )
    return tokenizer


def _is_not_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _added_tokens(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer adds before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    tokens = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
    before = [number for number, _ in takewhile(lambda token: token[1], tokens)]
    after = [number for number, _ in takewhile(lambda token: token[1], reversed(tokens))]
    return tuple(before), tuple(reversed(after))


def _compile(source: str, today: datetime.date) -> Any:
    """Compile a chat template, in the environment that transformers has for them."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTags(Extension):
        """Put marks around what is between ``{% generation %}`` and ``{% endgeneration %}``."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{MARK}{caller()}{MARK}"

    class Namespace(jinja2.utils.Namespace):
        """Like Jinja's, without names that a template could hide the type of an object behind."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"{name} must not begin with an underscore")
            super().__setitem__(name, value)

    def namespace(*args: Any, **kwargs: Any) -> Namespace:
        result = Namespace()
        for name, value in dict(*args, **kwargs).items():
            result[name] = value
        return result

    def make_dict(*args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.combine(today, datetime.time()).strftime(form)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals |= {
        "dict": make_dict,  # the methods of the type could change what they are given
        "namespace": namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    try:
        return environment.from_string(source)
    # Jinja compiles to Python, which refuses deeply nested blocks by other types of errors.
    except Exception as error:
        raise DataError(f"the chat template is not valid ({quoted(error)})") from error


def _normalize(message: Message) -> dict[str, Any]:
    """Return a message without fields that are null, and with all names of reasoning."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
