"""Conversion of the batch norms of a model to synchronized ones."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from flax import linen as nn

from ..layers.batch_norm import Stats, conversion_settings
from ..layers.images import ImageLayerConfig
from ..ops._common.arguments import describe
from .batch_norm import BatchNorm

M = TypeVar("M", bound=nn.Module)


def convert_batch_norm(
    model: M,
    axis_name: Any = ...,
    axis_index_groups: int | Sequence[Sequence[int]] | None = ...,  # type: ignore[assignment]
    *,
    unbiased_running_var: bool | None = None,
    stats: Stats | None = None,
) -> M:
    """Return a model that runs every `flax.linen.BatchNorm` as `effjax.linen.BatchNorm`.

    The class of the result is a subclass of the model's class. It has the same fields, methods and
    variables, so programs and checkpoints work as before. The model itself is unchanged. If a
    converted model is converted again, or is part of a converted model, the later settings count.

    Only layers of exactly `flax.linen.BatchNorm`, and effjax's BatchNorm with its subclasses, are
    replaced, including those created during the call. Other subclasses are left unchanged.

    Args:
        model: a linen module.
        axis_name: as in `effjax.nnx.convert_batch_norm`.
        axis_index_groups: as in `effjax.nnx.convert_batch_norm`.
        unbiased_running_var: as in `effjax.nnx.convert_batch_norm`.
        stats: as in `effjax.nnx.convert_batch_norm`.

    Returns:
        A linen module.

    Raises:
        TypeError: if `model` is not a linen module.
        ValueError: if `model` has an `axis_name` itself, as effjax's DenseNet does, or for another
            invalid argument. When it is called, if it contains such a block or network of effjax
            with other settings.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a flax.linen.Module, not {describe(model)}. Convert an nnx model "
            "with effjax.nnx.convert_batch_norm."
        )
    if hasattr(model, "axis_name") and not isinstance(model, nn.BatchNorm):
        _raise_own_axis(model)
    settings = conversion_settings(axis_name, axis_index_groups, unbiased_running_var, stats)
    if _is_convertible(model):
        return _recreate(model, _norm_class(model), settings)
    model_class = type(model)
    if issubclass(model_class, _Converted):
        model_class, settings = model_class._original, model_class._settings | settings
    return _recreate(model, _converted_class(model_class, tuple(settings.items())))


def _recreate(model: Any, new_class: type, updates: dict[str, Any] | None = None) -> Any:
    """Return the model as an instance of another class with the same fields."""
    if model.scope is None:
        return new_class(**_field_values(model) | (updates or {}))
    # The name and the scope of a bound module are taken, so its constructor would fail.
    bound = object.__new__(new_class)
    vars(bound).update(vars(model), **updates or {})
    return bound


# The settings of the converted models that are being called.
_active: contextvars.ContextVar[dict[str, Any] | None]
_active = contextvars.ContextVar("active", default=None)


class _Converted:
    """Mixin of a linen module that replaces its batch norms while one of its methods runs."""

    _original: type
    _settings: dict[str, Any]

    def _call_wrapped_method(self, *args: Any) -> Any:
        # Flax calls this for each method of a module, by whichever way it is reached.
        call = super()._call_wrapped_method  # type: ignore[misc]
        outer = _active.get()
        settings = self._settings | (outer or {})
        if settings == outer:
            return call(*args)
        token = _active.set(settings)
        try:
            with nn.intercept_methods(functools.partial(_run_converted, settings)):
                return call(*args)
        finally:
            _active.reset(token)


@functools.cache  # equal models have equal classes, for the caches of jit
def _converted_class(model_class: type, settings: tuple[tuple[str, Any], ...]) -> type:
    kept = ("__module__", "__qualname__", "__doc__", "__init__", "__eq__", "__hash__")
    namespace = {name: getattr(model_class, name) for name in kept}
    namespace |= dict(_original=model_class, _settings=dict(settings))
    return type(model_class)(model_class.__name__, (_Converted, model_class), namespace)


def _run_converted(
    settings: dict[str, Any], call: Any, args: Any, kwargs: Any, context: Any
) -> Any:
    """Call a method; if it is that of a batch norm, call the batch norm of effjax instead."""
    layer, scope = context.module, context.module.scope
    if context.method_name == "__call__":
        changed = any(getattr(layer, name, None) != value for name, value in settings.items())
        if isinstance(layer, ImageLayerConfig) and changed:
            _raise_own_axis(layer)  # its operators do not call the norms
        if _is_convertible(layer) and (changed or type(layer) is nn.BatchNorm):
            # `parent` gives it the variables of the layer.
            options = _field_values(layer) | settings | dict(parent=scope, name=None)
            return _norm_class(layer)(**options)(*args, **kwargs)
    with _flagged(scope, settings):
        return call(*args, **kwargs)


@contextlib.contextmanager
def _flagged(scope: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Add the settings to the flags of a scope, which are in the cache key of `nn.jit`."""
    if scope is None:
        yield
        return
    flags = scope.flags
    scope.flags = {**flags, "convert_batch_norm": tuple(settings.items())}
    try:
        yield
    finally:
        scope.flags = flags


def _field_values(layer: Any) -> dict[str, Any]:
    return {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.init}


def _is_convertible(layer: Any) -> bool:
    return type(layer) is nn.BatchNorm or isinstance(layer, BatchNorm)


def _norm_class(layer: Any) -> type:
    return BatchNorm if type(layer) is nn.BatchNorm else type(layer)


def _raise_own_axis(model: Any) -> NoReturn:
    raise ValueError(
        f"`model` ({type(model).__name__}) must not have an `axis_name` itself. Pass the axis "
        "to its constructor, or use model.clone(axis_name=…)."
    )
