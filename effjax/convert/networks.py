"""Networks and checkpoint formats of the command `effjax convert`."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from .._files import check
from ..models.densenet import DENSENET_OPTIONS
from ..models.linen import DenseNet, ResNet
from ..models.resnet import RESNET_OPTIONS
from .files import replacing, save_weights
from .tables import DENSENET, RESNET, Table, nnx_path
from .weights import from_torch, path_of

# Constructor and table of each published network.
NETWORKS: dict[str, tuple[Callable[..., Any], Table]] = {
    name: (functools.partial(module, **options), table)
    for module, options_by_name, table in (
        (DenseNet, DENSENET_OPTIONS, DENSENET),
        (ResNet, RESNET_OPTIONS, RESNET),
    )
    for name, options in options_by_name.items()
}
# Shapes of parameters do not depend on the image, which must only survive five strides of 2.
IMAGE_SHAPE = (1, 64, 64, 3)


def network_variables(
    name: str, weights: Mapping[str, Any], prefix: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables of a linen network with these weights; errors as in `from_torch`."""
    make, table = NETWORKS[name]
    images = jax.ShapeDtypeStruct(IMAGE_SHAPE, np.float32)
    shapes = jax.eval_shape(make(**options).init, jax.random.key(0), images)
    return from_torch(weights, shapes, table, prefix=prefix)


def as_nnx(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return linen's variables as the pure dict of the nnx network, with string keys."""
    flat = jax.tree_util.tree_leaves_with_path(variables)
    return unflatten_dict({nnx_path(path_of(keys)): leaf for keys, leaf in flat}, sep=".")


def write_checkpoint(path: Path, variables: Mapping[str, Any]) -> None:
    """Write an Orbax directory, or a `.safetensors` file with dotted names, atomically."""
    if path.suffix.lower() == ".safetensors":
        return save_weights(path, flatten_dict(variables, sep="."))
    import orbax.checkpoint as ocp

    with replacing(path) as partial, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(partial.absolute(), jax.device_get(variables))
        checkpointer.wait_until_finished()


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Read an Orbax directory of `write_checkpoint`, with dotted names.

    Raises:
        ValueError: It is not one.
    """
    import orbax.checkpoint as ocp

    for file in path.rglob("*"):  # Orbax would wait for a pipe
        check(file.is_file() or file.is_dir(), f"{file} must be a regular file.")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(path.absolute())
    except Exception as error:  # Orbax raises many types
        raise ValueError(
            f"{path}: neither a weight file nor a folder that effjax convert wrote "
            f"({type(error).__name__})."
        ) from error
    return {name: np.asarray(a) for name, a in flatten_dict(tree, sep=".").items()}
