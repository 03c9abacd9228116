"""Conversion of the batch norms of a model to synchronized ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from flax import linen as nn

from ..layers.batch_norm import Stats, conversion_settings
from ..layers.images import ImageLayerConfig
from .batch_norm import BatchNorm


def convert_batch_norm(
    model: nn.Module,
    axis_name: Any = ...,
    axis_index_groups: int | Sequence[Sequence[int]] | None = ...,  # type: ignore[assignment]
    *,
    unbiased_running_var: bool | None = None,
    stats: Stats | None = None,
) -> "ConvertedBatchNorm":
    """Return a model that runs every `flax.linen.BatchNorm` as `effjax.linen.BatchNorm`.

    The result takes the same arguments and has the same variables, so `init`, `apply` and
    checkpoints work as before. The model itself is unchanged, and is `.model` of the result.

    Only layers of exactly `flax.linen.BatchNorm`, and effjax's BatchNorm with its subclasses, are
    replaced, including those created during the call. Other subclasses are left unchanged.

    Args:
        model: an unbound linen module.
        axis_name: as in `effjax.nnx.convert_batch_norm`.
        axis_index_groups: as in `effjax.nnx.convert_batch_norm`.
        unbiased_running_var: as in `effjax.nnx.convert_batch_norm`.
        stats: as in `effjax.nnx.convert_batch_norm`.

    Returns:
        A linen module with only a `__call__` method.

    Raises:
        ValueError: if `model` has an `axis_name` itself, as effjax's DenseNet does, or for another
            invalid argument. When it is called, if it contains such a block or network of effjax
            with other settings.
    """
    if hasattr(model, "axis_name") and not isinstance(model, nn.BatchNorm):
        _raise_own_axis(model)
    settings = conversion_settings(axis_name, axis_index_groups, unbiased_running_var, stats)
    return ConvertedBatchNorm(model, tuple(settings.items()))


class ConvertedBatchNorm(nn.Module):
    """Module that calls `model` with these settings for its batch norms."""

    model: nn.Module
    settings: tuple[tuple[str, Any], ...]

    def setup(self) -> None:
        """Share the scope of the model, so that the variables have the same paths."""
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with nn.intercept_methods(self._converted):
            return self.model(*args, **kwargs)

    @nn.nowrap
    def _converted(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, settings = context.module, dict(self.settings)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if isinstance(layer, ImageLayerConfig) and any(
            getattr(layer, name, None) != value for name, value in settings.items()
        ):
            _raise_own_axis(layer)  # its operators do not call the norms
        if type(layer) is nn.BatchNorm:
            names = {field.name for field in dataclasses.fields(layer)} - {"parent", "name"}
            options = {name: getattr(layer, name) for name in names}
            twin = BatchNorm(**options | settings, parent=layer.scope)  # type: ignore[arg-type]
        elif isinstance(layer, BatchNorm) and any(
            getattr(layer, name) != value for name, value in settings.items()
        ):
            twin = layer.clone(**settings, parent=layer.scope)
        else:
            return call(*args, **kwargs)
        return twin(*args, **kwargs)  # `parent` gives it the variables of the layer


def _raise_own_axis(model: Any) -> NoReturn:
    raise ValueError(
        f"`model` ({type(model).__name__}) must not have an `axis_name` itself. Pass the axis "
        "to its constructor, or use model.clone(axis_name=…)."
    )
