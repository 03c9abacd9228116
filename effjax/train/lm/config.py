"""The options of a run, checked. Imports nothing heavy: the help of the command needs this."""

import dataclasses
import math
from typing import Any, Literal

from ..errors import TrainError


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """What `effjax train lm` can be asked for."""

    data: str = "pydoc"
    context: int = 128

    layers: int = 4
    width: int = 128
    heads: int = 4
    bias: bool = False
    dropout: float = 0.0
    remat: bool = False
    offload: Literal["none", "activations", "params", "all"] = "none"
    fuse_update: bool = False
    num_microbatches: int = 1

    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    report_every: int = 100
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = "context", "layers", "width", "heads", "steps", "batch_size", "report_every"
        for name in (*counts, "num_microbatches"):
            if getattr(self, name) < 1:
                raise TrainError(f"{name} (={getattr(self, name)}) must be at least 1")
        if self.width % (2 * self.heads):
            raise TrainError(
                f"width (={self.width}) must be divisible by 2 · heads (={self.heads}); use "
                f"{max(self.width // (2 * self.heads), 1) * 2 * self.heads}"
            )
        self._check_offload()
        if not 0 <= self.dropout < 1:
            raise TrainError(f"dropout (={self.dropout}) must lie in [0, 1)")
        if not 0 < self.learning_rate < math.inf:
            raise TrainError(f"learning_rate (={self.learning_rate}) must be above 0 and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise TrainError(f"weight_decay (={self.weight_decay}) must be finite and not negative")
        if self.dtype not in ("float32", "bfloat16"):
            raise TrainError(f"dtype (={self.dtype!r}) must be one of float32, bfloat16")
        if not 0 <= self.seed < 2**32:
            raise TrainError(f"seed (={self.seed}) must lie in 0..{2**32 - 1}")

    def _check_offload(self) -> None:
        if self.offload not in ("none", "activations", "params", "all"):
            raise TrainError(
                f"offload (={self.offload!r}) must be one of none, activations, params, all"
            )
        if self.fuse_update and self.offload not in ("params", "all"):
            raise TrainError("fuse_update is for parameters on the host; use offload params or all")
        if self.offload == "none" and self.num_microbatches > 1:
            raise TrainError(
                f"num_microbatches (={self.num_microbatches}) is of layers that are offloaded; use "
                "offload activations, params or all"
            )
        if self.offload != "none" and self.remat:
            raise TrainError("remat is what offload does anyway; leave one of them out")
        if self.batch_size % self.num_microbatches:
            raise TrainError(
                f"num_microbatches (={self.num_microbatches}) must divide batch_size "
                f"(={self.batch_size})"
            )

    @classmethod
    def from_json(cls, options: Any) -> "LMConfig":
        """The options that a run wrote into its config.json."""
        try:
            return cls(**options)
        except TypeError as error:
            raise TrainError(
                f"config.json is not of effjax train lm, or of another version ({error}); start a "
                "new run"
            ) from error
