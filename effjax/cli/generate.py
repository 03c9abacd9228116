"""`effjax generate` and `effjax merge`."""

import functools
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..train.config import MAX_COUNT
from ..train.errors import TrainError
from ..train.host_memory import set_pinned_limit
from .errors import CommandError


def generate(
    checkpoint: Annotated[
        str,
        Argument(
            help="Folder of a Llama, Mistral or Qwen model in Hugging Face's layout, of a run of "
            "effjax finetune, or of a LoRA adapter; or the name of a model or an adapter on the "
            "Hub.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str],
        Option(
            help="The text to continue, or the message to answer. Can be repeated.",
            metavar="TEXT",
        ),
    ],
    base: Annotated[
        str | None,
        Option(
            help="The base model of an adapter. (default: the one that the adapter names)",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--no-chat",
            help="Send the prompt as a message, by the checkpoint's chat template. (default: if "
            "it has one)",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        Option(help="A file with a chat template. (default: the checkpoint's)", show_default=False),
    ] = None,
    system: Annotated[str | None, Option(help="System message before the prompt.")] = None,
    max_tokens: Annotated[
        int, Option(help="Largest number of tokens to generate.", min=1, max=MAX_COUNT)
    ] = 100,
    temperature: Annotated[
        float, Option(help="Divisor of the logits. 0 takes the most probable token.")
    ] = 0.7,
    top_k: Annotated[
        int | None,
        Option(
            help="Sample from this many most probable tokens. (default: all)", min=1, max=MAX_COUNT
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(
            help="Sample from the most probable tokens that sum to this probability. (default: all)"
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the sampling.", min=0, max=2**32 - 1)] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Dtype of the parameters and the computation. (default: the checkpoint's)"),
    ] = None,
    offload: Annotated[
        bool,
        Option(
            "--offload", help="Keep the layers in host memory, and load each one for each token."
        ),
    ] = False,
) -> None:
    """Generate text with a language model.

    The completion is printed while it is generated. It ends at EOS, the end of the turn, or
    --max-tokens.
    """
    import datetime

    from rich.console import Console

    from ..models.generate import check_options
    from ..train.report import LoadBar, print_line
    from ..train.text.generate import count_new_tokens, decode, find_model, generate_tokens

    if chat_template is not None and chat is False:
        raise TrainError(f"--chat-template {chat_template} cannot be combined with --no-chat.")
    set_pinned_limit()
    model = find_model(checkpoint, dtype, datetime.date.today(), base, chat_template)
    has_template = model.tokenizer.template is not None
    chat = has_template if chat is None else chat
    if chat and not has_template:
        raise TrainError(f"--chat needs a chat template, which {model.base.folder} lacks.")
    if system is not None and not chat:
        raise TrainError("--system needs a chat template, and --chat.")
    encoded = [model.encode(text, system, chat) for text in prompt]
    prompts = [tokens for tokens, _ in encoded]
    max_tokens = count_new_tokens(model, prompts, max_tokens)
    stop_tokens = sorted(set.union(*(ends for _, ends in encoded)))
    make_options = functools.partial(
        check_options, model.config, max_new_tokens=max_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, stop_tokens=stop_tokens,
    )  # fmt: skip
    try:
        make_options()
    except ValueError as error:
        raise TrainError(str(error)) from error
    try:
        with LoadBar(Console(stderr=True)) as bar:
            layers, others, scale = model.load(offload, bar.update)
        sampling = make_options(lora_scale=scale)
        runs = generate_tokens(model.config, sampling, layers, others, prompts, seed)
        for text, tokens in zip(prompt, runs, strict=True):
            if len(prompt) > 1:
                print_line(Console(), f"> {text}")
            for piece in decode(model.tokenizer, tokens):
                print(piece, end="", flush=True)
            print()
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        remedy = "a smaller --max-tokens" if offload else "--offload, or a smaller --max-tokens"
        raise CommandError(f"out of device memory. Try {remedy}.") from error


def merge(
    adapter: Annotated[
        str,
        Argument(
            help="A LoRA adapter: its folder, a run of effjax finetune --lora, or a name on the "
            "Hub.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Option(help="The folder of the new checkpoint.")],
    base: Annotated[
        str | None,
        Option(help="The base model. (default: the one that the adapter names)"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Dtype of the parameters. (default: the base model's)"),
    ] = None,
) -> None:
    """Add an adapter to the weights of its base model, as a checkpoint.

    The model must fit on the first device. JAX_PLATFORMS=cpu uses the host memory instead.
    """
    import datetime

    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.generate import find_model
    from ..train.text.generate import merge as write

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainError(f"--out {out}: exists and is not empty. Give another folder.")
    model = find_model(adapter, dtype, datetime.date.today(), base)
    if model.adapter is None:
        raise TrainError(f"{adapter}: a checkpoint, not a LoRA adapter.")
    try:
        write(model, out)
    except OSError as error:
        raise TrainError(f"--out {out}: cannot be written ({error.strerror or error}).") from error
    print_line(Console(), f"written: {out}")
