"""What the forms of offloading can be told, checked once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._common.arguments import as_dtype, as_flag, as_integer, check_choice, describe
from .placement import SPACES, Space, Where


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """The options of `offload_scan`, see there; `offload_sequential` has some of them.

    Raises:
        ValueError, TypeError: for a value that fits no model. What depends on the model is checked
            with it, and where the parameters are is checked with them.
    """

    num_slices: int | None = None
    num_microbatches: int = 1
    params_in: Where = "host"
    activations: Where = "host"
    grads: Where | None = None
    prefetch: int = 1
    resident_slices: int = 0
    compute_dtype: Any = None
    has_aux: bool = False
    policy: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        least = {"num_slices": 1, "num_microbatches": 1, "prefetch": 0, "resident_slices": 0}
        if self.num_slices is None:
            del least["num_slices"]
        for name, number in least.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), number))
        for name in ("params_in", "activations"):
            check_choice(name, getattr(self, name), *SPACES)
        check_choice("grads", self.grads, *SPACES, None)
        if self.compute_dtype is not None:
            as_dtype("compute_dtype", self.compute_dtype)
        as_flag("has_aux", self.has_aux)
        _check_policy(self.policy)

    @property
    def activations_in(self) -> Space:
        """Where what is kept of the slices for the backward pass is."""
        return SPACES[self.activations]

    @property
    def grads_in(self) -> Space:
        """Where gradients are collected."""
        return SPACES[self.grads or self.params_in]

    def slices_of(self, num_layers: int) -> int:
        """The number of slices of a stack; raises ValueError if they are not equal."""
        found = num_layers if self.num_slices is None else self.num_slices
        if found > num_layers or num_layers % found:
            raise ValueError(
                f"`num_slices` (={self.num_slices}) must divide the number of layers "
                f"(={num_layers})."
            )
        if self.resident_slices > found:
            raise ValueError(
                f"`resident_slices` (={self.resident_slices}) must be at most the number of slices "
                f"(={found})."
            )
        return found


def _check_policy(policy: Any) -> None:
    if policy is not None and not callable(policy):
        raise TypeError(
            "`policy` must be None or a policy of jax.checkpoint, such as "
            f"jax.checkpoint_policies.dots_saveable, not {describe(policy)}."
        )
    for name, function in vars(jax.checkpoint_policies).items():
        if function is policy and name.startswith(("save_", "offload_")):
            raise TypeError(
                f"`policy` must be what jax.checkpoint_policies.{name} returns, not that function; "
                "call it."
            )
