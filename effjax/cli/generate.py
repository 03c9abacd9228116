"""The command `effjax generate`."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.config import DATA, option
from ..train.errors import DataError, TrainError
from .errors import USAGE, CommandError
from .generation import GenerationOptions

if TYPE_CHECKING:
    from ..train.text.prompts import Prompt

GENERATED = "generated"  # the field of a row with the text


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """Options of `effjax generate`."""

    prompt: list[str] | None = option(
        None,
        help="The text to continue, or the message to answer. A text gets BOS, unless it begins "
        "with BOS. Can be repeated.",
        group=DATA,
    )
    prompts: Path | None = option(
        None,
        help="A file of prompts: .txt with one in each line, or .jsonl whose rows have `prompt` or "
        "`messages`.",
        group=DATA,
    )
    out: Path | None = option(
        None,
        help=f"Write the rows, with the texts as `{GENERATED}`, into this new .jsonl file.",
        group=DATA,
    )
    chat: bool | None = option(
        None,
        help="Send the prompt as a message, by the checkpoint's chat template. (default: if it has "
        "one)",
    )


def generate(given: dict[str, Any]) -> None:
    """Generate text with a language model.

    The completion is printed while it is generated. It ends at EOS, the end of the turn, a --stop,
    or --max-tokens.
    """
    options = GenerateOptions(**given)
    if (template := options.chat_template) is not None and options.chat is False:
        raise TrainError(f"--chat-template {template} cannot be combined with --no-chat.")
    rows = _read_prompts(options)

    import jax
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.decode import decode, printable_lines, split_stops
    from ..train.text.generate import count_new_tokens, generate_tokens
    from ..train.text.prompts import encode

    model = options.find_model()
    has_template = model.tokenizer.template is not None
    chat = has_template if options.chat is None else options.chat
    if chat and not has_template:
        raise TrainError(f"--chat needs a chat template, which {model.base.folder} lacks.")
    if options.system is not None and not chat:
        raise TrainError("--system needs a chat template, and --chat.")
    stops, stop_tokens = split_stops(model.tokenizer, options.stop or ())
    encoded = [encode(model, row.content, options.system, chat) for row in rows]
    tokens = [ids for ids, _ in encoded]
    sampling = options.sampling(
        model, count_new_tokens(model, tokens, options.max_tokens),
        stop_tokens.union(*(ends for _, ends in encoded)),
    )  # fmt: skip
    # One size for all prompts, so that the programs are compiled once.
    size, key = max(map(len, tokens)), jax.random.key(options.seed)
    with options.explain_memory("a smaller --max-tokens"):
        layers, others, scale = options.load(model)
        complete = functools.partial(
            generate_tokens, model.config, sampling._replace(lora_scale=scale), layers, others,
            size=size, num_slots=size + sampling.max_new_tokens,
        )  # fmt: skip
        texts = (
            decode(model.tokenizer, complete(ids, jax.random.fold_in(key, i)), stops, ids)
            for i, ids in enumerate(tokens)
        )
        if options.out is not None:
            _write(options.out, rows, texts)
            return
        for row, pieces in zip(rows, texts, strict=True):
            if len(rows) > 1:
                print_line(Console(), f"> {row.title}")
            for piece in pieces:
                print(printable_lines(piece), end="", flush=True)
            print()


def _read_prompts(options: GenerateOptions) -> "list[Prompt]":
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.prompts import Prompt, read_prompt_file

    file, out = options.prompts, options.out
    if bool(options.prompt) == (file is not None):
        raise TrainError("Give prompts with --prompt, or a file of them with --prompts.")
    if out is not None and out.exists():
        raise TrainError(f"--out {out}: exists. Give another file.")
    if file is None:
        return [Prompt(text, {"prompt": text}) for text in options.prompt or ()]
    try:
        rows, notes = read_prompt_file(file)
    except DataError as error:
        # A TrainError would name the field `prompt` of a row as the option --prompt.
        raise CommandError(str(error), USAGE) from error
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
