"""Steps whose batch is split over devices, without a word in the step itself."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ops._common.arguments import as_callable
from ._compile import mesh_to_plan_for
from ._modules import opened
from .compare import as_step


def data_parallel(
    step_for_batch: Callable[[int], tuple[Any, ...]], num_devices: int
) -> Callable[[int], tuple[Any, ...]]:
    """The same steps with their batch split over devices, for `plan` and `max_batch_size`.

    Of each argument, the axis that grows with the batch is split over the devices; an argument
    without one is whole on each of them. That is what data parallelism is, and what it costs.

    Args:
        step_for_batch: makes the program for a batch size, `(fun, *args)`. It is called twice: with
            twice the batch, to see what grows.
        num_devices: how many devices the batch is split over, along the axis `"data"` of a mesh.

    Returns:
        A function like `step_for_batch`, whose arguments are shapes with shardings.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if nothing grows with the batch, or what grows cannot be split evenly.
    """
    as_callable("step_for_batch", step_for_batch)
    mesh = mesh_to_plan_for(num_devices)

    def split(batch_size: int) -> tuple[Any, ...]:
        fun, *args = as_step("step_for_batch(…)", step_for_batch(batch_size))
        _, *more = as_step("step_for_batch(…)", step_for_batch(2 * batch_size))
        (arrays, close), (larger, _) = opened(args), opened(more)
        specs = jax.tree.map(_axis_that_grows, arrays, larger)
        if not any(spec for spec in jax.tree.leaves(specs, is_leaf=_is_spec)):
            raise ValueError(
                "`step_for_batch` gives arguments of which none grows with the batch: there is "
                f"nothing to split over {num_devices} devices."
            )

        def sharded(path: Any, a: Any, spec: PartitionSpec) -> Any:
            if not isinstance(a, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
                return a  # a number
            for size, name in zip(a.shape, spec, strict=False):
                if name and size % num_devices:
                    raise ValueError(
                        f"args{jax.tree_util.keystr(path)} of shape {tuple(a.shape)} grows with "
                        f"the batch, and {size} cannot be split over {num_devices} devices; give "
                        "a batch size that is a multiple."
                    )
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

        return fun, *close(jax.tree_util.tree_map_with_path(sharded, arrays, specs))

    return split


def _axis_that_grows(a: Any, larger: Any) -> PartitionSpec:
    before, after = np.shape(a), np.shape(larger)
    grows = [i for i, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    return PartitionSpec(*[None] * grows[0], "data") if grows else PartitionSpec()


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
