"""The command `effjax generate`, and the options of commands that generate."""

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ..train.config import MAX_COUNT
from ..train.errors import DataError, TrainError
from ..train.host_memory import set_pinned_limit
from .errors import CommandError

if TYPE_CHECKING:
    from ..models.generate import Options
    from ..train.text.model import TextModel
    from ..train.text.prompts import Prompt

GENERATED = "generated"  # the field of a row with the text

Checkpoint = Annotated[
    str,
    Argument(
        help="Folder of a Llama, Qwen, Gemma or other model in Hugging Face's layout, of a run "
        "of effjax finetune, or of a LoRA adapter; or the name of a model or an adapter on the "
        "Hub."
    ),
]
BaseModel = Annotated[
    str | None,
    Option(help="The base model of an adapter. (default: the one that the adapter names)"),
]
Template = Annotated[
    str | None,
    Option(help="A file with a chat template. (default: the checkpoint's)"),
]
Stops = Annotated[
    list[str] | None,
    Option(help="End before this text. Can be repeated."),
]
MaxTokens = Annotated[
    int, Option(help="Largest number of tokens to generate.", min=1, max=MAX_COUNT)
]
Temperature = Annotated[
    float, Option(help="Divisor of the logits. 0 takes the most probable token.")
]
TopK = Annotated[
    int | None,
    Option(help="Sample from this many most probable tokens. (default: all)", min=1, max=MAX_COUNT),
]
TopP = Annotated[
    float | None,
    Option(
        help="Sample from the most probable tokens that sum to this probability. (default: all)"
    ),
]
Seed = Annotated[int, Option(help="Seed of the sampling.", min=0, max=2**32 - 1)]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    Option(help="Dtype of the parameters and the computation. (default: the checkpoint's)"),
]
Offload = Annotated[
    bool,
    Option("--offload", help="Keep the layers in host memory, and load each one for each token."),
]
Devices = Annotated[
    str | None,
    Option(
        help="Shard the parameters over all devices, such as fsdp=4. (default: the first device)"
    ),
]


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None,
        Option(help="The text to continue, or the message to answer. Can be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(
            help="A file of prompts: .txt with one in each line, or .jsonl whose rows have "
            "`prompt` or `messages`."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help=f"Write the rows, with the texts as `{GENERATED}`, into this new .jsonl file."),
    ] = None,
    base: BaseModel = None,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--no-chat",
            help="Send the prompt as a message, by the checkpoint's chat template. (default: if "
            "it has one)",
        ),
    ] = None,
    chat_template: Template = None,
    system: Annotated[str | None, Option(help="System message before the prompt.")] = None,
    stop: Stops = None,
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    offload: Offload = False,
    mesh: Devices = None,
) -> None:
    """Generate text with a language model.

    The completion is printed while it is generated. It ends at EOS, the end of the turn, a --stop,
    or --max-tokens.
    """
    import datetime

    import jax
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.decode import decode, printable_lines, split_stops
    from ..train.text.generate import count_new_tokens, generate_tokens
    from ..train.text.model import find_model, generation_mesh
    from ..train.text.prompts import encode

    if chat_template is not None and chat is False:
        raise TrainError(f"--chat-template {chat_template} cannot be combined with --no-chat.")
    rows = _read_prompts(prompt, prompts, out)
    set_pinned_limit()
    devices = generation_mesh(mesh)
    model = find_model(checkpoint, dtype, datetime.date.today(), base, chat_template)
    has_template = model.tokenizer.template is not None
    chat = has_template if chat is None else chat
    if chat and not has_template:
        raise TrainError(f"--chat needs a chat template, which {model.base.folder} lacks.")
    if system is not None and not chat:
        raise TrainError("--system needs a chat template, and --chat.")
    stops, stop_tokens = split_stops(model.tokenizer, stop or ())
    encoded = [encode(model, row.content, system, chat) for row in rows]
    tokens = [ids for ids, _ in encoded]
    options = make_options(
        model, count_new_tokens(model, tokens, max_tokens), temperature, top_k, top_p,
        stop_tokens.union(*(ends for _, ends in encoded)),
    )  # fmt: skip
    # One size for all prompts, so that the programs are compiled once.
    size = max(map(len, tokens))
    with explain_memory(offload, "a smaller --max-tokens"):
        layers, others, scale = load_params(model, offload, devices)
        complete = functools.partial(
            generate_tokens, model.config, options._replace(lora_scale=scale), layers, others,
            size=size, num_slots=size + options.max_new_tokens,
        )  # fmt: skip
        key = jax.random.key(seed)
        texts = (
            decode(model.tokenizer, complete(ids, jax.random.fold_in(key, i)), stops)
            for i, ids in enumerate(tokens)
        )
        if out is not None:
            _write(out, rows, texts)
            return
        for row, pieces in zip(rows, texts, strict=True):
            if len(rows) > 1:
                print_line(Console(), f"> {row.title}")
            for piece in pieces:
                print(printable_lines(piece), end="", flush=True)
            print()


def _read_prompts(
    texts: Sequence[str] | None, file: Path | None, out: Path | None
) -> "list[Prompt]":
    """Return the prompts of the command line or a file; raise TrainError."""
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.prompts import Prompt, read_prompt_file

    if bool(texts) == (file is not None):
        raise TrainError("Give prompts with --prompt, or a file of them with --prompts.")
    if out is not None and out.exists():
        raise TrainError(f"--out {out}: exists. Give another file.")
    if file is None:
        return [Prompt(text, {"prompt": text}) for text in texts or ()]
    rows, notes = read_prompt_file(file)
    if out is not None and any(GENERATED in row.row for row in rows):
        raise DataError(f"{file}: rows must not have the field `{GENERATED}`, which --out adds.")
    for note in notes:
        print_line(Console(stderr=True), note)
    return rows


def _write(out: Path, rows: "Sequence[Prompt]", texts: Iterable[Iterable[str]]) -> None:
    """Write each row with its text as soon as that is complete."""
    from rich.console import Console

    from ..train.report import print_line

    try:
        with out.open("x", encoding="utf-8") as file:
            for row, pieces in zip(rows, texts, strict=True):
                line = row.row | {GENERATED: "".join(pieces)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
    except OSError as error:
        raise TrainError(f"--out {out}: cannot be written ({error.strerror or error}).") from error
    print_line(Console(), f"written: {out}")


def make_options(
    model: "TextModel",
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: set[int],
) -> "Options":
    """Return the options of `effjax.models.generate`, without an adapter; raise TrainError."""
    from ..models.generate import check_options

    try:
        return check_options(
            model.config, max_new_tokens=max_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, stop_tokens=sorted(stop_tokens),
        )  # fmt: skip
    except ValueError as error:
        raise TrainError(str(error)) from error


def load_params(model: "TextModel", offload: bool, mesh: Any) -> tuple[Any, Any, float]:
    """Load the parameters, with a bar on a terminal; return what `TextModel.load` does."""
    from rich.console import Console

    from ..train.report import LoadBar

    with LoadBar(Console(stderr=True)) as bar:
        return model.load(offload, bar.update, mesh)


@contextlib.contextmanager
def explain_memory(offload: bool, other: str) -> Iterator[None]:
    """Convert the error of a full device memory to one with remedies, `other` among them."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        remedies: Sequence[str] = [other, "--mesh over several devices"]
        remedies = remedies if offload else ["--offload", *remedies]
        raise CommandError(f"out of device memory. Try {', or '.join(remedies)}.") from error
