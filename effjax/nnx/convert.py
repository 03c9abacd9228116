"""Turning the BatchNorm layers of a model into synchronized ones, and back."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from flax import nnx

from ..layers.batch_norm import Stats, converted_settings
from ..ops._common.arguments import describe
from .batch_norm import BatchNorm

M = TypeVar("M", bound=nnx.Module)


def convert_batch_norm(
    model: M,
    axis_name: Any = ...,
    axis_index_groups: int | Sequence[Sequence[int]] | None = ...,  # type: ignore[assignment]
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
        axis_name: the mapped axis, or axes, over which statistics are taken; None for no axis. By
            default each layer's own.
        axis_index_groups: groups of devices along `axis_name`, or the size of a group; None for no
            groups. By default each layer's own.
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
    layers = _batch_norms(
        model, "A linen model is converted by effjax.linen.convert_batch_norm: its variables fit."
    )
    settings = converted_settings(axis_name, axis_index_groups, unbiased_running_var, stats)
    for path, layer in layers:
        if type(layer) is nnx.BatchNorm:
            # The attributes of Flax's class are a subset of ours and the rest have defaults in the
            # class, so the object itself changes its class: all references to it stay valid.
            object.__setattr__(layer, "__class__", BatchNorm)
        elif not isinstance(layer, BatchNorm):
            warnings.warn(
                f"convert_batch_norm leaves {path} as it is: {type(layer).__name__} is a subclass "
                "of flax.nnx.BatchNorm. Derive it from effjax.nnx.BatchNorm to have it converted.",
                stacklevel=2,
            )
            continue
        for name, value in settings.items():
            setattr(layer, name, value)
    return model


# What Flax's class has not, and the values with which it does the same.
_OF_EFFJAX = dict(unbiased_running_var=False, track_running_stats=True, activation=None)


def revert_batch_norm(model: M) -> M:
    """Makes every `effjax.nnx.BatchNorm` of a model a `flax.nnx.BatchNorm`, in place.

    The reverse of `convert_batch_norm`, but for `axis_name` and its groups, which stay;
    ``convert_batch_norm(model, axis_name=None)`` takes these away.

    Args:
        model: an nnx Module; it is changed.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not an nnx Module.
        ValueError: for a layer with an option that Flax's has not, by name: an activation, several
            axes, groups by a size, `momentum=None`, `unbiased_running_var=True` or
            `track_running_stats=False`. The model is unchanged then.
    """
    layers = [
        (path, layer)
        for path, layer in _batch_norms(model, "A linen model has the converted one as `.model`.")
        if type(layer) is BatchNorm
    ]
    for path, layer in layers:
        options = {name: getattr(layer, name) for name in _OF_EFFJAX}
        odd = [name for name, value in options.items() if value != _OF_EFFJAX[name]]
        odd += ["momentum"] if layer.momentum is None else []
        odd += [] if isinstance(layer.axis, int) else ["axis"]
        odd += ["axis_index_groups"] if isinstance(layer.axis_index_groups, int) else []
        if odd:
            raise ValueError(
                f"`model` has {path} with `{odd[0]}` (={getattr(layer, odd[0])!r:.80}), which "
                "flax.nnx.BatchNorm has not."
            )
    for _, layer in layers:
        for name in (*_OF_EFFJAX, "stats", "num_batches"):
            if name in vars(layer):
                delattr(layer, name)
        object.__setattr__(layer, "__class__", nnx.BatchNorm)
    return model


def _batch_norms(model: Any, hint: str) -> list[tuple[str, nnx.BatchNorm]]:
    """The layers and where they are."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` must be a flax.nnx.Module, not {describe(model)}. {hint}")
    return [
        (".".join(map(str, path)) or "the model", layer)
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.BatchNorm)
    ]
