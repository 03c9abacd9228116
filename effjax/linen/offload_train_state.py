"""A train state of Flax whose parameters live in host memory."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from flax.core import unfreeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict

from ..layers.offload import check_on_host
from ..layers.offload_optimizer import Parts, init_state, updated
from ..ops.offload.checks import as_arrays, check_alike
from ..ops.offload.optimizer import check_clip_norm
from ..ops.offload.placement import Space, space_of


class OffloadTrainState(TrainState):
    """Flax's ``TrainState`` for models whose parameters, or some of them, are in host memory.

    The state of the optimizer is where the parameters are. Those on the host are updated one module
    after the other on the device, which holds one or two of them with their gradients and state;
    all others are updated on the device::

        variables = model.init(key, x)  # a linen.OffloadModel, or with one inside
        state = effjax.linen.OffloadTrainState.create(
            apply_fn=model.apply, params=effjax.to_host(variables["params"]), tx=optax.adam(1e-3)
        )

        @effjax.offload_jit
        def train_step(state, x, y):
            loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
            return state.apply_gradients(grads=grads), loss

    Attributes:
        step, apply_fn, params, tx, opt_state: as of ``flax.training.train_state.TrainState``.
        stacks: the paths of parameters [L, ...] of like layers, see `create`.
        clip_norm: the largest global norm of the gradients; None: they are not scaled.

    References:
        ZeRO-Offload: Ren et al., 2021 (arXiv:2101.06840).
    """

    stacks: tuple[str, ...] = struct.field(pytree_node=False, default=())
    clip_norm: float | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: Any,
        stacks: Sequence[str] = (),
        clip_norm: float | None = None,
        **kwargs: Any,
    ) -> "OffloadTrainState":
        """The state before the first step.

        Args:
            apply_fn: such as ``model.apply``.
            params: nested dicts of arrays, some of them on the host: see `effjax.to_host`.
            tx: an ``optax.GradientTransformation`` that treats every parameter on its own, as of
                `effjax.stream_update`. It sees the parameters of one module on the host, or all
                others together, as nested dicts from the model down.
            stacks: which parts of params are those of an OffloadModel with `num_layers`, or of
                ``nn.scan``, and so are updated layer by layer: paths such as "decoder/layers".
            clip_norm: the largest global norm of the gradients, above 0, in place of
                ``optax.clip_by_global_norm``, which mixes parameters.
            **kwargs: the fields of a subclass.

        Returns:
            The state, of step 0.

        Raises:
            TypeError, ValueError: for arguments that do not fit, and a tx that mixes parameters.
        """
        check_clip_norm(clip_norm)
        params = as_arrays("params", unfreeze(params))
        parts = _parts(params, params, stacks)
        check_on_host(parts.stacks, "Put them there with effjax.to_host, or leave them out.")
        return cls(
            step=jnp.int32(0), apply_fn=apply_fn, params=params, tx=tx,
            opt_state=init_state(tx, parts), stacks=tuple(stacks), clip_norm=clip_norm, **kwargs,
        )  # fmt: skip

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "OffloadTrainState":
        """The state after a step; compile it with `effjax.offload_jit`.

        Args:
            grads: those of `params`.
            **kwargs: other fields to be replaced.

        Raises:
            TypeError, ValueError: for gradients that do not fit.
        """
        check_alike("grads", as_arrays("grads", grads), "`params`", self.params)
        state: Any = self.opt_state
        both = _parts(self.params, self.params, self.stacks), state
        new, opt_state = updated(
            self.tx, self.clip_norm, both, _parts(self.params, grads, self.stacks)
        )
        flat = {}
        for part in (*new.layers, *new.stacks, new.others):
            flat |= flatten_dict(part)
        params = unflatten_dict({path: flat[path] for path in flatten_dict(self.params)})
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


def _parts(params: Mapping, arrays: Mapping, stacks: Sequence[str]) -> Parts:
    """The `arrays` of `params` by how they are updated, in nested dicts from the model down."""
    left, where = flatten_dict(arrays), flatten_dict(params)
    taken = []
    for name in stacks:
        at = tuple(name.split("/"))
        found = [path for path in left if path[: len(at)] == at]
        if not found:
            raise ValueError(
                f"`stacks` (={stacks!r}) must be paths such as 'decoder/layers', but params have "
                f"no {name!r} besides the ones before it."
            )
        taken.append({path: left.pop(path) for path in found})
    modules = defaultdict(dict)
    for path in [path for path in left if space_of(where[path]) == Space.Host]:
        modules[path[:-1]][path] = left.pop(path)
    nested = lambda parts: [unflatten_dict(part) for part in parts]  # noqa: E731
    return Parts(nested(modules.values()), nested(taken), unflatten_dict(left))
