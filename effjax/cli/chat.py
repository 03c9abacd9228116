"""The command `effjax chat`."""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

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
    from ..train.text.decode import decode, printable_lines, split_stops
    from ..train.text.forms import Conversation
    from ..train.text.generate import count_positions, generate_tokens
    from ..train.text.model import find_model, generation_mesh
    from ..train.text.prompts import CONTENT, encode

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
    _, ends = encode(model, CONTENT, system, True)
    options = make_options(
        model, min(max_tokens, context), temperature, top_k, top_p, stop_tokens | ends
    )
    console = Console(stderr=True)
    messages: list[dict[str, str]] = []
    with explain_memory(offload, "a smaller --context"):
        layers, others, scale = load_params(model, offload, devices)
        options = options._replace(lora_scale=scale)
        key, turn = jax.random.key(seed), 0
        while (text := read_message()) not in (None, "/exit"):
            assert text is not None
            if text == "/clear":
                messages = []
                continue
            conversation = [*messages, {"role": "user", "content": text}]
            try:
                ids, _ = encode(model, Conversation(conversation), system, True)
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
                model.config, options, layers, others, ids, jax.random.fold_in(key, turn),
                size=size, num_slots=context,
            )  # fmt: skip
            answer = ""
            with until_ctrl_c(new_tokens) as tokens:
                for piece in decode(model.tokenizer, tokens, stops):
                    answer += piece
                    print(printable_lines(piece), end="", flush=True)
            print()
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
