"""`effjax chat`."""

import contextlib
import signal
import sys
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Annotated, Self

from typer import Option

from ..train.config import MAX_COUNT
from ..train.errors import TrainError
from ..train.host_memory import set_pinned_limit
from .generate import (
    BaseModel,
    Checkpoint,
    Devices,
    Dtype,
    MaxTokens,
    Offload,
    Seed,
    Stops,
    Temperature,
    Template,
    TopK,
    TopP,
    explain_memory,
    load_params,
    make_options,
)

CONTEXT = 4096  # tokens of a conversation


def chat(
    checkpoint: Checkpoint,
    base: BaseModel = None,
    chat_template: Template = None,
    system: Annotated[str | None, Option(help="System message before the conversation.")] = None,
    stop: Stops = None,
    max_tokens: MaxTokens = 1000,
    context: Annotated[
        int | None,
        Option(
            help=f"Tokens of a conversation, with its answers. (default: {CONTEXT}, or the "
            "positions of the model if they are fewer)",
            min=2,
            max=MAX_COUNT,
            show_default=False,
        ),
    ] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    offload: Offload = False,
    mesh: Devices = None,
) -> None:
    """Talk with a language model.

    A message is one line. Answers are printed while they are generated. Ctrl-C stops an answer,
    Ctrl-D or /exit ends, and /clear starts a new conversation.
    """
    import datetime

    import jax
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.forms import Conversation
    from ..train.text.generate import (
        CONTENT,
        ChatGenerator,
        count_new_tokens,
        count_positions,
        decode,
        find_model,
        generation_mesh,
        printable_lines,
        split_stops,
    )

    set_pinned_limit()
    devices = generation_mesh(mesh)
    model = find_model(checkpoint, dtype, datetime.date.today(), base, chat_template)
    if model.tokenizer.template is None:
        raise TrainError(
            f"{model.base.folder}: lacks a chat template. Give one with --chat-template, or use "
            "effjax generate."
        )
    positions = count_positions(model)
    if context is None:
        context = min(CONTEXT, positions or CONTEXT)
    elif positions is not None and context > positions:
        raise TrainError(f"--context {context} must be at most {positions}, the model's positions.")
    stops, stop_tokens = split_stops(model.tokenizer, stop or ())
    ids, ends = model.encode(CONTENT, system, True)
    count_new_tokens(model, [ids], 1)  # checks the tokens of the template
    options = make_options(
        model, min(max_tokens, context), temperature, top_k, top_p, stop_tokens | ends
    )
    console = Console(stderr=True)
    messages: list[dict[str, str]] = []
    with explain_memory(offload, "a smaller --context"), Interrupt() as interrupt:
        layers, others, scale = load_params(model, offload, devices)
        sampling = options(lora_scale=scale)
        generator = ChatGenerator(model.config, sampling, layers, others, context, devices)
        key, turn = jax.random.key(seed), 0
        while (text := read_message()) not in (None, "/exit"):
            assert text is not None
            if text == "/clear":
                messages = []
                continue
            conversation = [*messages, {"role": "user", "content": text}]
            try:
                ids, _ = model.encode(Conversation(conversation), system, True)
                if len(ids) >= context:
                    raise TrainError(
                        f"the conversation has {len(ids)} tokens, and must have fewer than "
                        f"{context}. /clear starts a new one, or give a larger --context."
                    )
                count_new_tokens(model, [ids], 1)
            except TrainError as error:  # such as a text that is not UTF-8
                print_line(console, f"effjax: {error}")
                continue
            answer, turn_key = "", jax.random.fold_in(key, turn)
            # Closed, because a stop ends the text before the tokens end.
            with contextlib.closing(interrupt.stop(generator.answer(ids, turn_key))) as tokens:
                for piece in decode(model.tokenizer, tokens, stops):
                    answer += piece
                    print(printable_lines(piece), end="", flush=True)
            print()
            messages, turn = [*conversation, {"role": "assistant", "content": answer}], turn + 1


class Interrupt:
    """A context in which Ctrl-C stops an answer.

    A second one during the answer raises KeyboardInterrupt, and so does one at any other time.
    """

    def __init__(self) -> None:
        self._answers = self._pressed = False

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._pressed or not self._answers:
            raise KeyboardInterrupt
        self._pressed = True

    def stop(self, tokens: Iterable[int]) -> Generator[int]:
        """Yield the tokens until Ctrl-C is pressed."""
        self._answers, self._pressed = True, False
        try:
            for token in tokens:
                yield token
                if self._pressed:
                    return
        finally:
            self._answers = self._pressed = False


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
