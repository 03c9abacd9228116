"""The command `effjax merge`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..train.errors import TrainError
from .generation import describe_base


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
    dequantized: Annotated[
        bool,
        Option(
            "--dequantized",
            help="Merge into the base model that the adapter of a run with --quantize was trained "
            "on, quantized and dequantized. (default: the base model as it is)",
        ),
    ] = False,
) -> None:
    """Add an adapter to the weights of its base model, as a checkpoint.

    The model must fit on the first device. JAX_PLATFORMS=cpu uses the host memory instead.
    """
    import datetime

    from rich.console import Console

    from ..train.report import print_line
    from ..train.text.merge import merge as write
    from ..train.text.model import find_model

    # Not at the end, after minutes of reading and writing.
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainError(f"--out {out}: exists and is not empty. Give another folder.")
    model = find_model(adapter, dtype, datetime.date.today(), base)
    if model.adapter is None:
        raise TrainError(f"{adapter}: a checkpoint, not a LoRA adapter.")
    if not dequantized and (note := describe_base(model)) is not None:
        hint = "; --dequantized merges into what it was trained on" if model.trained_on else ""
        print_line(Console(), f"{note}{hint}")
    try:
        write(model, out, dequantized)
    except OSError as error:
        raise TrainError(f"--out {out}: cannot be written ({error.strerror or error}).") from error
    print_line(Console(), f"written: {out}")
