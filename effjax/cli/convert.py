"""The command `effjax convert`."""

import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..train.config import MAX_SIZE
from ..train.errors import TrainError, check_orbax_path, printable


def convert(
    source: Annotated[
        Path,
        Argument(
            help="PyTorch weights: .safetensors, or a file of torch.save.",
            metavar="IN",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[str, Option(help="densenet121, resnet50, …")],
    to: Annotated[
        Path,
        Option(help="Output: a new folder for an Orbax checkpoint, or a .safetensors file."),
    ],
    flavor: Annotated[Literal["nnx", "linen"], Option(help="The Flax API.")] = "nnx",
    num_classes: Annotated[
        int | None, Option(help="Number of logits. (default: the model's)", min=1, max=MAX_SIZE)
    ] = None,
    prefix: Annotated[
        str, Option(help="Use only names that begin with this and a dot, such as module.")
    ] = "",
) -> None:
    """Convert the weights of a PyTorch network to Flax.

    If a name is missing or left over, or a shape does not match, the command fails and writes
    nothing. Names in a .safetensors file are the paths of the network's variables.

    Both outputs are weights for `effjax train resnet` and `effjax train densenet`, with
    `--init-from`. These also read PyTorch's file itself, if it needs no `--prefix`.
    """
    import jax
    from rich.console import Console

    from ..convert import DENSENET, load_weights
    from ..convert.files import TORCH_SUFFIXES
    from ..convert.networks import NETWORKS, as_nnx, network_variables, write_checkpoint
    from ..train.report import print_line, print_table

    if model not in NETWORKS:
        raise TrainError(f"--model {model} must be one of {', '.join(NETWORKS)}.")
    if to.exists():
        raise TrainError(f"{to} already exists. Give another --to.")
    if to.suffix.lower() in TORCH_SUFFIXES:
        raise TrainError(f"--to {to} must be a new folder or a .safetensors file.")
    if to.suffix.lower() != ".safetensors":
        check_orbax_path(to)
    console = Console()
    options = {} if num_classes is None else {"num_classes": num_classes}
    try:
        weights = load_weights(source)
        with warnings.catch_warnings(record=True) as caught:
            variables = network_variables(model, weights, prefix, options)
        write_checkpoint(to, as_nnx(variables) if flavor == "nnx" else variables)
    except OSError as error:
        reason = error.strerror or error
        raise TrainError(f"{error.filename or source}: {reason}. Check the paths.") from error
    except (ValueError, TypeError) as error:
        raise TrainError(str(error)) from error
    for warning in caught:
        print(printable(f"effjax: {warning.message}"), file=sys.stderr)
    leaves = jax.tree.leaves(variables)
    params = jax.tree.leaves(variables["params"])
    statistics = jax.tree.leaves(variables.get("batch_stats", {}))
    without_prefix = ", names without the prefix" if prefix else ""
    rows = {
        "model": f"{model}, {flavor}",
        "parameters": f"{sum(a.size for a in params):,}",
        "running statistics": f"{sum(a.size for a in statistics):,}",
        "arrays": f"{len(leaves)} of {len(weights)}",
        "left out": f"batch counters{without_prefix}",
        "size": f"{sum(a.nbytes for a in leaves) / 1e6:.1f} MB",
    }
    print_table(console, rows.items())
    print_line(console, f"written to {to}")
    kind = "densenet" if NETWORKS[model][1] is DENSENET else "resnet"
    command = f"effjax train {kind} --model {model} --init-from {shlex.quote(str(to))}"
    print_line(console, f"to train it on your images: {command} --data folder:PATH")
