"""Options shared by the offload operators."""

import dataclasses
from collections.abc import Callable
from typing import Any

from .._common.arguments import as_dtype, as_integer, check_choice
from .placement import SPACES, MemoryName, Space


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """Options of `offload_scan`, documented there; the other operators take some of them."""

    num_slices: int | None = None
    num_microbatches: int = 1
    params_in: MemoryName = "host"
    activations: MemoryName = "host"
    grads: MemoryName | None = None
    prefetch: int = 1
    resident_slices: int = 0
    compute_dtype: Any = None
    has_aux: bool = False
    policy: Callable[..., Any] | None = None
    # Whether layers are called as layer(params, x, key, i, m) with the numbers of the layer and of
    # the microbatch, int32 []. The Flax modules select the variables and the keys of a layer by
    # them.
    pass_index: bool = False

    def __post_init__(self) -> None:
        minimum = {"num_slices": 1, "num_microbatches": 1, "prefetch": 0, "resident_slices": 0}
        if self.num_slices is None:
            del minimum["num_slices"]
        for name, least in minimum.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least))
        check_choice("params_in", self.params_in, *SPACES)
        check_choice("activations", self.activations, *SPACES)
        check_choice("grads", self.grads, *SPACES, None)
        if self.compute_dtype is not None:
            as_dtype("compute_dtype", self.compute_dtype)

    @property
    def activations_space(self) -> Space:
        """The memory of the residuals of the slices."""
        return SPACES[self.activations]

    @property
    def grads_space(self) -> Space:
        """The memory in which gradients are collected."""
        return SPACES[self.grads or self.params_in]

    def count_slices(self, num_layers: int, equal: bool) -> int:
        """Return the number of slices; with `equal` they must have the same number of layers."""
        count = num_layers if self.num_slices is None else self.num_slices
        if count > num_layers or (equal and num_layers % count):
            requirement = "divide" if equal else "be at most"
            raise ValueError(
                f"`num_slices` (={count}) must {requirement} the number of layers (={num_layers})."
            )
        if self.resident_slices > count:
            raise ValueError(
                f"`resident_slices` (={self.resident_slices}) must be at most the number of slices "
                f"(={count})."
            )
        return count
