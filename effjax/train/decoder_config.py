"""The options of all runs that train a decoder. Imports no JAX."""

import dataclasses
import math
from typing import Literal

from .config import RunConfig
from .errors import TrainError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRunConfig(RunConfig):
    """Options of `effjax train lm` and `effjax finetune`, for `DecoderLearner`."""

    offload: Literal["none", "activations", "params", "all"] = "none"
    fuse_update: bool = False
    policy: Literal["recompute", "dots", "everything"] = "recompute"
    num_microbatches: int = 1
    clip_norm: float = 1.0  # 0 means that gradients are not clipped

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_norm < math.inf:
            raise TrainError(f"`clip_norm` (={self.clip_norm}) must be at least 0 and finite")
        if self.fuse_update and self.on_nan == "skip":
            raise TrainError(
                "`on_nan` (=skip) cannot be combined with `fuse_update`, which updates the last "
                "layers before the gradients of the first ones exist"
            )
        if self.batch_size % self.num_microbatches:
            raise TrainError(
                f"`num_microbatches` (={self.num_microbatches}) must divide `batch_size` "
                f"(={self.batch_size})"
            )

    def check_devices(self, num_devices: int) -> None:
        """Raise TrainError if the devices do not support the options."""
        if self.num_microbatches > 1 < num_devices:
            raise TrainError(
                f"`num_microbatches` (={self.num_microbatches}) needs a single device, not "
                f"{num_devices}"
            )
