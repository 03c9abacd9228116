"""The command `effjax chat`."""

import contextlib
import dataclasses
import itertools
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..train.config import MAX_COUNT, Check, inherit, option
from ..train.errors import TrainError
from .generation import GenerationOptions

CONTEXT = 4096  # tokens of a conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    """Options of `effjax chat`."""

    max_tokens: int = inherit(GenerationOptions, "max_tokens", default=1000)
    context: int | None = option(
        None,
        help=f"Tokens of a conversation, with its answers. (default: {CONTEXT}, or the positions "
        "of the model if they are fewer)",
        check=Check(f"be between 2 and {MAX_COUNT}", lambda value: 2 <= value <= MAX_COUNT),
    )


def chat(given: dict[str, Any]) -> None:
    """Talk with a language model.

    A message is one line. Answers are printed while they are generated. Ctrl-C stops an answer,
    Ctrl-D or /exit ends, and /clear starts a new conversation.
    """
    import jax
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.chat import CONTENT
    from ..train.text.decode import decode, printable_lines, split_stops
    from ..train.text.forms import Conversation
    from ..train.text.generate import count_positions, generate_tokens
    from ..train.text.prompts import encode

    options = ChatOptions(**given)
    model = options.find_model()
    if model.tokenizer.template is None:
        raise TrainError(
            f"{model.base.folder}: lacks a chat template. Give one with --chat-template, or use "
            "effjax generate."
        )
    positions = count_positions(model)
    context = options.context or min(CONTEXT, positions or CONTEXT)
    if positions is not None and context > positions:
        raise TrainError(f"--context {context} must be at most {positions}, the model's positions.")
    stops, stop_tokens = split_stops(model.tokenizer, options.stop or ())
    _, ends = encode(model, CONTENT, options.system, True)
    # The cache of keys and values has `context` slots, for the conversation and its answer.
    max_tokens = min(options.max_tokens, context)
    sampling = options.sampling(model, max_tokens, stop_tokens | ends)
    console = Console(stderr=True)
    messages: list[dict[str, str]] = []
    with options.explain_memory("a smaller --context"):
        layers, others, scale = options.load(model)
        sampling = sampling._replace(lora_scale=scale)
        key, turn = jax.random.key(options.seed), 0
        while (text := read_message()) not in (None, "/exit"):
            assert text is not None
            if text == "/clear":
                messages = []
                continue
            # The model reads the whole conversation in each turn: a template may change earlier
            # turns, as that of Qwen 3 does.
            conversation = [*messages, {"role": "user", "content": text}]
            try:
                ids, _ = encode(model, Conversation(conversation), options.system, True)
                if len(ids) >= context:
                    raise TrainError(
                        f"the conversation has {len(ids)} tokens, and must have fewer than "
                        f"{context}. /clear starts a new one, or give a larger --context."
                    )
            except TrainError as error:  # such as a text that is not UTF-8
                print_line(console, f"effjax: {error}")
                continue
            # Few sizes: a program is compiled for each.
            size = min(context, 1 << (len(ids) - 1).bit_length())
            new_tokens = generate_tokens(
                model.config, sampling, layers, others, ids, jax.random.fold_in(key, turn),
                size=size, num_slots=context,
            )  # fmt: skip
            answer = ""
            with until_ctrl_c(new_tokens) as tokens:
                for piece in decode(model.tokenizer, tokens, stops, ids):
                    answer += piece
                    print(printable_lines(piece), end="", flush=True)
            print()
            # The text and not the tokens: a template may change earlier turns.
            messages, turn = [*conversation, {"role": "assistant", "content": answer}], turn + 1


@contextlib.contextmanager
def until_ctrl_c(tokens: Iterable[int]) -> Iterator[Iterator[int]]:
    """Yield the tokens up to the first Ctrl-C; the second one is handled as outside of it."""
    pressed = False

    # A flag, because JAX loses exceptions that are raised while it compiles.
    def receive(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, handler)

    handler = signal.signal(signal.SIGINT, receive)
    try:
        yield itertools.takewhile(lambda _: not pressed, tokens)
    finally:
        signal.signal(signal.SIGINT, handler)


def read_message() -> str | None:
    """Return the next line that is not empty; None at the end of the input.

    Ctrl-C discards what is typed.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (`input` then edits lines, and has a history)
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            continue
        if text:
            return text
