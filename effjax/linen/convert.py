"""Running a model with synchronized BatchNorm layers in the place of Flax's."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from ..layers.batch_norm import Stats, converted_settings
from ..ops._common.arguments import describe
from .batch_norm import BatchNorm


def convert_batch_norm(
    model: nn.Module,
    axis_name: Any = ...,
    axis_index_groups: int | Sequence[Sequence[int]] | None = ...,  # type: ignore[assignment]
    *,
    unbiased_running_var: bool | None = None,
    stats: Stats | None = None,
) -> "ConvertedBatchNorm":
    """A model that computes every `flax.linen.BatchNorm` of another as `effjax.linen.BatchNorm`.

    It is called with the same arguments and has the same variables, so that `init`, `apply` and
    checkpoints fit. The model itself is unchanged, and is `.model` of the result.

    Args:
        model: a linen module, not bound.
        axis_name, axis_index_groups, unbiased_running_var, stats: as in
            `effjax.nnx.convert_batch_norm`.

    Returns:
        A linen module with a `__call__` alone.

    The layers are those of effjax and of Flax, but no other subclass of Flax's, that are called
    while the model is, whoever made them; a class of one's own is left as it is.

    Raises:
        TypeError, ValueError: if `model` is not a linen module, or has an `axis_name` of its own,
            as effjax's DenseNet has, or another argument is not what it must be.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a flax.linen.Module, not {describe(model)}.")
    if hasattr(model, "axis_name") and not isinstance(model, nn.BatchNorm):
        raise ValueError(
            f"`model` ({type(model).__name__}) has an `axis_name` of its own; make it with that, "
            "or say model.clone(axis_name=…)."
        )
    settings = converted_settings(axis_name, axis_index_groups, unbiased_running_var, stats)
    return ConvertedBatchNorm(model, tuple(settings.items()))


class ConvertedBatchNorm(nn.Module):
    """Calls `model` with these settings of its BatchNorm layers; see `convert_batch_norm`."""

    model: nn.Module
    settings: tuple[tuple[str, Any], ...]

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `model`."""
        with nn.intercept_methods(self._converted):
            return self.model(*args, **kwargs)

    @nn.nowrap
    def _converted(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, settings = context.module, dict(self.settings)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if type(layer) is nn.BatchNorm:
            names = {field.name for field in dataclasses.fields(layer)} - {"parent", "name"}
            kept = {name: getattr(layer, name) for name in names}
            twin = BatchNorm(**kept | settings, parent=layer.scope)  # type: ignore[arg-type]
        elif isinstance(layer, BatchNorm) and any(
            getattr(layer, name) != value for name, value in settings.items()
        ):
            twin = layer.clone(**settings, parent=layer.scope)
        else:
            return call(*args, **kwargs)
        return twin(*args, **kwargs)  # in the scope of the layer: its variables
