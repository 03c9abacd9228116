"""The configuration of a training run on text. Imports no JAX."""

import dataclasses
import math
from typing import ClassVar, Literal

from ..config import RunConfig
from ..errors import TrainError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig(RunConfig):
    """Options of `effjax train lm`."""

    COMMAND: ClassVar[str] = "lm"

    data: str = "pydoc"
    context: int = 128

    layers: int = 4
    width: int = 128
    heads: int = 4
    offload: Literal["none", "activations", "params", "all"] = "none"
    fuse_update: bool = False
    policy: Literal["recompute", "dots", "everything"] = "recompute"
    num_microbatches: int = 1

    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # 0 means that gradients are not clipped
    report_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            nearest = max(self.width // (2 * self.heads), 1) * 2 * self.heads
            raise TrainError(
                f"`width` (={self.width}) must be divisible by 2 · `heads` (={self.heads}). Use "
                f"{nearest}."
            )
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
