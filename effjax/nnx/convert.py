"""Conversion of the batch norms of a model to synchronized ones, and back."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from flax import nnx

from ..layers.batch_norm import Stats, conversion_settings
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
    """Convert every `flax.nnx.BatchNorm` of a model to `effjax.nnx.BatchNorm`, in place.

    This is apex's `convert_syncbn_model`.

    Layers are converted wherever they are: attributes, lists, tuples, dicts, Sequential, or the
    model itself. Shared layers stay shared, Variables stay the same objects with their metadata,
    and momentum, dtypes and train/eval flags do not change.

    Only layers whose class is exactly `flax.nnx.BatchNorm`, and effjax's BatchNorm with its
    subclasses, are converted. Other subclasses of `flax.nnx.BatchNorm` may compute something else,
    so they are skipped with a warning.

    In training, call the layers where `axis_name` is mapped: inside pmap, shard_map or vmap.
    Evaluation needs no axis.

    Args:
        model: an nnx Module; it is modified.
        axis_name: the mapped axis or axes over which statistics are taken. None means no axis. By
            default each layer keeps its own.
        axis_index_groups: groups of devices along `axis_name`, or the size of a group. None means
            no groups. By default each layer keeps its own.
        unbiased_running_var: as in `effjax.nnx.BatchNorm`. If None, each layer keeps its own.
        stats: as in `effjax.nnx.BatchNorm`. If None, each layer keeps its own.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not an nnx Module.
        ValueError: for another invalid argument. The model is unchanged after an error.
    """
    layers = _batch_norms(model, "Convert a linen model with effjax.linen.convert_batch_norm.")
    settings = conversion_settings(axis_name, axis_index_groups, unbiased_running_var, stats)
    for path, layer in layers:
        if type(layer) is nnx.BatchNorm:
            # Changing the class of the object keeps all references to it valid. The attributes that
            # Flax's class lacks have defaults in ours.
            object.__setattr__(layer, "__class__", BatchNorm)
        elif not isinstance(layer, BatchNorm):
            warnings.warn(
                f"convert_batch_norm skips {path}: {type(layer).__name__} is a subclass of "
                "flax.nnx.BatchNorm. Derive it from effjax.nnx.BatchNorm to convert it.",
                stacklevel=2,
            )
            continue
        for name, value in settings.items():
            setattr(layer, name, value)
    return model


# Attributes that flax.nnx.BatchNorm lacks, with the values that match its behavior.
_EXTRA_OPTIONS = dict(unbiased_running_var=False, track_running_stats=True, activation=None)


def revert_batch_norm(model: M) -> M:
    """Convert every `effjax.nnx.BatchNorm` of a model back to `flax.nnx.BatchNorm`, in place.

    `axis_name` and its groups stay; ``convert_batch_norm(model, axis_name=None)`` removes them.

    Args:
        model: an nnx Module; it is modified.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not an nnx Module.
        ValueError: for a layer with an option that Flax does not support: an activation, several
            axes, groups by size, `momentum=None`, `unbiased_running_var=True` or
            `track_running_stats=False`. The model is unchanged after an error.
    """
    layers = [
        (path, layer)
        for path, layer in _batch_norms(
            model, "For linen, use the model that was converted; it is unchanged."
        )
        if type(layer) is BatchNorm
    ]
    for path, layer in layers:
        options = {name: getattr(layer, name) for name in _EXTRA_OPTIONS}
        unsupported = [name for name, value in options.items() if value != _EXTRA_OPTIONS[name]]
        unsupported += ["momentum"] if layer.momentum is None else []
        unsupported += [] if isinstance(layer.axis, int) else ["axis"]
        unsupported += ["axis_index_groups"] if isinstance(layer.axis_index_groups, int) else []
        if unsupported:
            name = unsupported[0]
            raise ValueError(
                f"`{name}` (={getattr(layer, name)!r:.80}) of {path} is not supported by "
                "flax.nnx.BatchNorm."
            )
    for _, layer in layers:
        for name in (*_EXTRA_OPTIONS, "stats", "num_batches"):
            if name in vars(layer):
                delattr(layer, name)
        object.__setattr__(layer, "__class__", nnx.BatchNorm)
    return model


def _batch_norms(model: Any, hint: str) -> list[tuple[str, nnx.BatchNorm]]:
    """Return the batch norms of a model with their paths."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` must be a flax.nnx.Module, not {describe(model)}. {hint}")
    return [
        (".".join(map(str, path)) or "the model", layer)
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.BatchNorm)
    ]
