"""Turning the BatchNorm layers of a model into synchronized ones."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from flax import nnx

from ..layers.batch_norm import Stats, hashable_axes
from ..ops._arguments import as_flag, described, one_of
from ..ops.batch_norm.statistics import index_groups
from .batch_norm import BatchNorm

M = TypeVar("M", bound=nnx.Module)


def convert_batch_norm(
    model: M,
    axis_name: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    *,
    unbiased_running_var: bool | None = None,
    stats: Stats | None = None,
) -> M:
    """Makes every `flax.nnx.BatchNorm` of a model an `effjax.nnx.BatchNorm`, synchronized.

    What apex calls `convert_syncbn_model`.

    The layers are converted in place, wherever they are (attributes, lists, tuples, dicts,
    Sequential, or the model itself). A layer that is used in two places stays one layer in two
    places, its Variables stay the same objects with their metadata, and momentum, dtypes and
    train/eval flags stay as they are.

    Args:
        model: an nnx Module; it is changed.
        axis_name: the mapped axis, or axes, over which statistics are taken. None: each layer's
            own.
        axis_index_groups: groups of devices along `axis_name`. None: each layer's own.
        unbiased_running_var, stats: as in `effjax.nnx.BatchNorm`. None: each layer's own.

    Returns:
        `model`.

    Only layers whose class is exactly `flax.nnx.BatchNorm`, or effjax's BatchNorm and its
    subclasses, are touched. Another subclass of `flax.nnx.BatchNorm` may compute anything (an
    activation, say), so it is left as it is, with a warning that names it. Other normalizations
    (InstanceNorm, GroupNorm, LayerNorm, …) are never touched.

    Raises:
        TypeError, ValueError: if `model` is not an nnx Module, or another argument is not what it
            must be; the model is unchanged then.

    In training the layers must then be called where `axis_name` is mapped: inside pmap, shard_map
    or vmap. Evaluation needs no axis.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"`model` must be a flax.nnx.Module, not {described(model)}. A linen model is "
            "converted by constructing it with effjax.linen.BatchNorm: its variables fit unchanged."
        )
    settings = dict(
        axis_name=hashable_axes(axis_name),
        axis_index_groups=index_groups(axis_index_groups),
        unbiased_running_var=unbiased_running_var,
        stats=one_of("stats", stats, None, "auto", "gather", "two_psum"),
    )
    if unbiased_running_var is not None:
        as_flag("unbiased_running_var", unbiased_running_var)
    for path, layer in list(nnx.iter_graph(model, graph=True)):
        if not isinstance(layer, nnx.BatchNorm):
            continue
        if type(layer) is nnx.BatchNorm:
            # The attributes of Flax's class are a subset of ours and the rest have defaults in the
            # class, so the object itself changes its class: all references to it stay valid.
            object.__setattr__(layer, "__class__", BatchNorm)
        elif not isinstance(layer, BatchNorm):
            name = ".".join(map(str, path)) or "the model"
            warnings.warn(
                f"convert_batch_norm leaves {name} as it is: {type(layer).__name__} is a subclass "
                "of flax.nnx.BatchNorm. Derive it from effjax.nnx.BatchNorm to have it converted.",
                stacklevel=2,
            )
            continue
        for name, value in settings.items():
            if value is not None:
                setattr(layer, name, value)
    return model
