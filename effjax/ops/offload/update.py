"""Optimizers whose state lives on the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._common.arguments import as_flag
from . import update_list, update_stack
from .checks import as_arrays, check_alike, check_optimizer
from .optimizer import check_clip_norm, clip_scale
from .trees import Tree


class StreamUpdate(NamedTuple):
    """``init(params)`` and ``update(grads, state, params, clip_norm=None)``."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def stream_update(tx: Any, *, stacked: bool = True) -> StreamUpdate:
    """An optimizer for parameters in host memory, applied layer by layer on the device.

    Every layer gets what ``tx`` gives it alone: the same as optax on a list of layers, but for
    noise. The device holds the parameters, gradients and state of two layers, whatever the depth;
    under `offload_jit` parameters and state are written where they were.

    Noise (``optax.add_noise``, ``optax.noisy_sgd``): each layer has an optimizer of its own, and
    draws its own. The PRNG keys in the state of layer i, counted from 0, are made of those of
    ``tx.init`` by ``fold_in(key, 2**32 - 1 - i)``; for a list optax would split one key among all
    parameters. They are part of the state, and so a run that is resumed draws what it would have.

    Args:
        tx: an ``optax.GradientTransformation`` that treats every parameter on its own: adamw, lion,
            sgd, schedules, masks, chains of them, ``optax.MultiSteps``. It sees the parameters of
            one layer.
        stacked: whether params are a stack of like layers, a pytree of arrays [L, ...], as of
            `offload_scan`; else a list of pytrees, one for each layer, as of `offload_sequential`.

    Returns:
        ``init(params) -> state``: arrays [L, ...] where the parameters are, counts [L] on the
        device; of a list the states of the layers, but for scalars where they are. And
        ``update(grads, state, params, clip_norm=None) -> (params, state)``, which differs from
        optax in that it applies the updates. With clip_norm gradients are scaled as
        ``optax.clip_by_global_norm`` does; their norm takes a pass of its own over them, which
        `offload_train_step` does not need.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
        ValueError: from both, if tx is not leaf by leaf, with the entry of its state in which
            parameters or layers meet; if it needs more arguments; or if it draws numbers that
            would be the same in every layer: from a key that is not in its state.
    """
    check_optimizer(tx)
    form = update_stack if as_flag("stacked", stacked) else update_list

    def update(grads: Tree, state: Tree, params: Tree, clip_norm: float | None = None):
        check_clip_norm(clip_norm)
        params, grads = form.checked(params), as_arrays("grads", grads)
        check_alike("grads", grads, "`params`", params)
        form.check_state("state", tx, state, params)
        scale = None if clip_norm is None else clip_scale(form.sum_of_squares(grads), clip_norm)
        return form.update(tx, grads, state, params, scale)

    return StreamUpdate(lambda params: form.init(tx, form.checked(params)), update)
