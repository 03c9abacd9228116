"""Weights of a file, for `--init-from`: torchvision's, or those that `effjax convert` wrote."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from ...convert import DENSENET, RESNET, Table, from_torch, load_weights, to_torch
from ...convert.networks import read_checkpoint
from ..errors import TrainError, unreadable
from ..mesh import put
from ..run_directory import RunDirectory
from .config import ImageConfig, ResNetRunConfig

HEAD = "classifier"
OFFSETS = ".offset_conv."  # in paths; layers of `--dcn` that predict offsets
STEM = {3: True, 7: False}  # size of the stem's kernel: whether images are small


@dataclasses.dataclass(frozen=True)
class SourceWeights:
    """Weights of a file in PyTorch's names and layouts.

    Attributes:
        path: The file, or the folder of an Orbax checkpoint.
        weights: The arrays.
        table: The names of the network.
        num_classes: The classes of its head; None if it has no head.
    """

    path: str
    weights: Mapping[str, np.ndarray]
    table: Table
    num_classes: int | None

    @property
    def small_inputs(self) -> bool | None:
        """True if the network has a stem for small images, None if the stem is unknown."""
        (stem,) = (name for name, ours in self.table.rows.items() if ours == "stem_conv")
        kernel = self.weights.get(f"{stem}.weight")
        return None if kernel is None or kernel.ndim == 0 else STEM.get(kernel.shape[-1])

    def load(self, build: Callable[..., nnx.Module]) -> dict[str, np.ndarray]:
        """Return the arrays by path, in host memory, without a head of other classes.

        Args:
            build: From `model_builder`.

        Raises:
            TrainError: A name is missing or left over, or a shape does not match.
        """
        model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        own = {
            path: np.broadcast_to(np.zeros((), shape.dtype), shape.shape)
            for path, shape in _flat(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))).items()
        }
        shapes = to_torch(unflatten_dict(own, sep="."), self.table)
        # `from_torch` needs all arrays: pass zeros for those of a new head and for missing layers
        # that predict offsets. They are dropped below.
        weights, new = dict(self.weights), []
        new_head = self.num_classes != own[f"{HEAD}.bias"].size
        for path in own:
            of_head = path.startswith(f"{HEAD}.")
            if not (of_head or OFFSETS in path):
                continue
            (name,) = to_torch(unflatten_dict({path: own[path]}, sep="."), self.table)
            if (of_head and new_head) or (not of_head and name not in weights):
                weights[name] = shapes[name]
                new.append(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # float16 files are rounded
                from_torch(weights, model, self.table)
        except (ValueError, TypeError) as error:
            raise TrainError(f"--init-from {self.path}: {error}") from error
        loaded = _flat(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
        # A task keeps them, so they must not stay on the device.
        return {path: np.asarray(array) for path, array in loaded.items() if path not in new}


def read_source(config: ImageConfig) -> SourceWeights | None:
    """Read the file `config.init_from`, if that is given.

    Raises:
        TrainError: It cannot be read, or holds no weights.
    """
    if config.init_from is None:
        return None
    path = Path(config.init_from)
    table = RESNET if isinstance(config, ResNetRunConfig) else DENSENET
    if (path / RunDirectory.CONFIG).exists():
        raise TrainError(
            f"--init-from {path} is a run of effjax train. Give a weight file or the output of "
            "effjax convert."
        )
    try:
        weights = read_checkpoint(path) if path.is_dir() else load_weights(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, TypeError) as error:
        raise TrainError(f"--init-from {error}") from error
    if any(name.endswith(".kernel") for name in weights):  # written by `effjax convert`
        try:
            weights = to_torch(unflatten_dict(dict(weights), sep="."), table)
        except (ValueError, TypeError, IndexError) as error:
            raise TrainError(
                f"--init-from {path}: its names are not those of {config.network}. Give weights "
                "of this network."
            ) from error
    (head,) = [name for name, ours in table.rows.items() if ours == HEAD] or [HEAD]
    bias = weights.get(f"{head}.bias")
    return SourceWeights(str(path), weights, table, None if bias is None else bias.size)


def overlay(state: nnx.State, weights: Mapping[str, np.ndarray], shardings: nnx.State) -> nnx.State:
    """Return the state with the arrays of these paths, each with the sharding of its place."""
    flat, places = _flat(state), _flat(shardings)
    new = {
        path: put(weights[path], places[path]) if path in weights else array
        for path, array in flat.items()
    }
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(unflatten_dict(new, sep=".")))
    return state


def _flat(state: nnx.State) -> dict[str, Any]:
    flat = flatten_dict(nnx.to_pure_dict(state))
    return {".".join(map(str, path)): leaf for path, leaf in flat.items()}
