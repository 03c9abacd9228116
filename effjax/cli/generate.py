"""The command `effjax generate`."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._files import append_whole
from ..train.config import DATA, option
from ..train.errors import DataError, TrainError, counted
from .errors import INTERRUPTED, CommandError, ctrl_c, report
from .generation import GenerationOptions

if TYPE_CHECKING:
    from ..train.text.model import TextModel
    from ..train.text.prompts import Encoded, Prompt

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
        help="A file of prompts: .txt with one in each line, spaces included, or .jsonl whose rows "
        "have `prompt` or `messages`. Those that are invalid or too long are named and left out, "
        "and the exit code is 1.",
        group=DATA,
    )
    out: Path | None = option(
        None,
        help=f"Write the rows, with the texts as `{GENERATED}`, into this new .jsonl file. Its "
        "name ends in .part until it is complete.",
        group=DATA,
    )
    chat: bool | None = option(
        None,
        help="Send the prompt as a message, by the checkpoint's chat template. (default: if it has "
        "one)",
    )


class _Row(NamedTuple):
    number: int  # among all prompts, so that the sampling does not depend on those left out
    prompt: "Prompt"
    encoded: "Encoded"


def generate(given: dict[str, Any]) -> None:
    """Generate text with a language model.

    The completion is printed while it is generated. It ends at EOS, the end of the turn, a --stop,
    or --max-tokens.
    """
    options = GenerateOptions(**given)
    if (template := options.chat_template) is not None and options.chat is False:
        raise TrainError(f"--chat-template {template} cannot be combined with --no-chat.")
    prompts = _read_prompts(options)

    import jax
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.decode import decode, printable_lines, split_stops
    from ..train.text.generate import generate_tokens

    model = options.find_model()
    has_template = model.tokenizer.template is not None
    chat = has_template if options.chat is None else options.chat
    if chat and not has_template:
        raise TrainError(f"--chat needs a chat template, which {model.base.folder} lacks.")
    if options.system is not None and not chat:
        raise TrainError("--system needs a chat template, and --chat.")
    stops, stop_tokens = split_stops(model.tokenizer, options.stop or ())
    rows = _encode_prompts(options, model, prompts, chat)
    left_out = f"{len(prompts) - len(rows)} of {counted(len(prompts), 'prompt')} left out."
    if not rows:
        raise CommandError(left_out)
    encoded = [row.encoded for row in rows]
    sampling = options.sampling(
        model, max(one.max_tokens for one in encoded),
        stop_tokens.union(*(one.stop_tokens for one in encoded)),
    )  # fmt: skip
    # One size for all prompts, so that the programs are compiled once. The last slot is the last
    # position of the model, or leaves room for --max-tokens after each prompt.
    size = max(len(one.tokens) for one in encoded)
    num_slots = max(len(one.tokens) + one.max_tokens for one in encoded)
    key = jax.random.key(options.seed)
    with options.explain_memory("a smaller --max-tokens"):
        layers, others, scale = options.load(model)
        complete = functools.partial(
            generate_tokens, model.config, sampling._replace(lora_scale=scale), layers, others,
            size=size, num_slots=num_slots,
        )  # fmt: skip

        def texts_of(row: _Row) -> Iterator[str]:
            tokens = row.encoded.tokens
            new_tokens = complete(tokens, jax.random.fold_in(key, row.number))
            return decode(model.tokenizer, new_tokens, stops, tokens)

        if options.out is not None:
            _write(options.out, ((row.prompt.row, texts_of(row)) for row in rows))
        else:
            for row in rows:
                if len(prompts) > 1:
                    print_line(Console(), f"> {row.prompt.title}")
                for piece in texts_of(row):
                    print(printable_lines(piece), end="", flush=True)
                print()
    if len(rows) < len(prompts):
        raise CommandError(left_out)


def _read_prompts(options: GenerateOptions) -> "list[Prompt | DataError]":
    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.prompts import Prompt, read_prompt_file

    file, out = options.prompts, options.out
    if bool(options.prompt) == (file is not None):
        raise TrainError("Give prompts with --prompt, or a file of them with --prompts.")
    for path in () if out is None else (out, _part(out)):
        if path.exists():
            raise TrainError(f"--out {out}: {path} exists. Give another file.")
    if file is None:
        return [Prompt(text, {"prompt": text}) for text in options.prompt or ()]
    prompts, notes = read_prompt_file(file)
    for note in notes:
        print_line(Console(stderr=True), note)
    return prompts


def _encode_prompts(
    options: GenerateOptions, model: "TextModel", prompts: "list[Prompt | DataError]", chat: bool
) -> list[_Row]:
    """Return the prompts that can be completed, and print the errors of the others."""
    from ..train.text.prompts import Prompt, encode_prompt

    rows = []
    for number, prompt in enumerate(prompts):
        try:
            encoded = encode_prompt(model, prompt, options.system, chat, options.max_tokens)
            assert isinstance(prompt, Prompt)
            if options.out is not None and GENERATED in prompt.row:
                raise DataError(f"{prompt.place}: has `{GENERATED}`, the field that --out adds.")
            rows.append(_Row(number, prompt, encoded))
        except TrainError as error:
            if options.prompts is None:
                raise
            report(CommandError(str(error)))
    return rows


def _part(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def _write(out: Path, rows: Iterable[tuple[dict[str, Any], Iterable[str]]]) -> None:
    """Write each row with its text as soon as that is complete, and name the file at the end."""
    from rich.console import Console

    from ..train.report import print_line

    part = _part(out)
    try:
        with part.open("xb", buffering=0) as file:
            for row, pieces in rows:
                line = row | {GENERATED: "".join(pieces)}
                append_whole(file, (json.dumps(line, ensure_ascii=False) + "\n").encode())
        part.rename(out)
    except OSError as error:
        reason = error.strerror or error
        kept = f" {part} has the rows before that." if part.is_file() else ""
        raise TrainError(f"--out {out}: cannot be written ({reason}).{kept}") from error
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) or ctrl_c):
            raise
        raise CommandError(f"interrupted. {part} has what was generated.", INTERRUPTED) from error
    print_line(Console(), f"written: {out}")
