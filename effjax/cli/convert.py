"""`effjax convert`."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..train.errors import TrainError


def convert(
    source: Annotated[
        Path,
        Argument(
            help="Weights of PyTorch: .safetensors, .npz, or what torch.save wrote.",
            metavar="IN",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[str, Option(help="densenet121, resnet50, …")],
    to: Annotated[
        Path,
        Option(help="A folder that is made, for a checkpoint of Orbax, or a .safetensors file."),
    ],
    flavor: Annotated[Literal["nnx", "linen"], Option(help="Of Flax.")] = "nnx",
    num_classes: Annotated[
        int | None, Option(help="Size of the logits. (default: the model's)")
    ] = None,
    prefix: Annotated[
        str, Option(help="Only what begins with it and a dot: module, of DataParallel, say.")
    ] = "",
) -> None:
    """Bring the weights of a PyTorch network to Flax.

    A name that is missing or left over, or a shape that does not fit, is an error, and then nothing
    is written. A .safetensors file has the paths of the network's variables as names.
    """
    import jax
    from rich.console import Console
    from rich.progress import Progress

    from ..convert import load_weights
    from ..convert.files import TORCH_SUFFIXES, suffix_of
    from ..convert.networks import NETWORKS, as_nnx, network_variables, write_checkpoint
    from ..train.report import print_line, result_table

    if model not in NETWORKS:
        raise TrainError(f"model (={model}) must be one of {', '.join(NETWORKS)}")
    if num_classes is not None and num_classes < 1:
        raise TrainError(f"num_classes (={num_classes}) must be at least 1")
    if to.exists():
        raise TrainError(f"{to}: is there already; give another --to")
    if suffix_of(to) in (".npz", *TORCH_SUFFIXES):
        raise TrainError(f"{to}: a folder or a .safetensors file is made; give another --to")
    if not to.absolute().parent.is_dir():
        raise TrainError(f"{to}: there is no folder {to.parent}; give another --to")
    console = Console()
    options = {} if num_classes is None else {"num_classes": num_classes}
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            step = bar.add_task("read", total=3)
            weights = load_weights(source)
            bar.update(step, description="fit", advance=1)
            variables = network_variables(model, weights, prefix, options)
            bar.update(step, description="write", advance=1)
            write_checkpoint(to, as_nnx(variables) if flavor == "nnx" else variables)
            bar.advance(step)
    except ModuleNotFoundError as error:
        raise TrainError(f'{error.name} is missing; run pip install "effjax[train]"') from error
    except OSError as error:
        said = error.strerror or error
        raise TrainError(f"{error.filename or source}: {said}; check the paths") from error
    except (ValueError, TypeError) as error:
        raise TrainError(str(error)) from error
    used, table = jax.tree.leaves(variables), result_table()
    of_kind = {kind: jax.tree.leaves(tree) for kind, tree in variables.items()}
    outside = ", and names without the prefix" if prefix else ""
    rows = {
        "model": f"{model}, {flavor}",
        "parameters": f"{sum(a.size for a in of_kind['params']):,}",
        "running statistics": f"{sum(a.size for a in of_kind.get('batch_stats', [])):,}",
        "arrays": f"{len(used)} of {len(weights)}",
        "left out": f"counters of batches{outside}",
        "size": f"{sum(a.nbytes for a in used) / 1e6:.1f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    print_line(console, f"written to {to}")
