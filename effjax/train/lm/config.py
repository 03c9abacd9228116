"""The configuration of a training run on text. Imports no JAX."""

import dataclasses
from typing import ClassVar, Literal

from ..config import RunConfig
from ..errors import TrainError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig(RunConfig):
    """Options of `effjax train lm`."""

    COMMAND: ClassVar[str] = "lm"

    data: str = "pydoc"
    context: int = 128

    init_from: str | None = None
    lora: int | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4
    bias: bool = False
    dropout: float = 0.0
    remat: bool = False
    offload: Literal["none", "activations", "params", "all"] = "none"
    fuse_update: bool = False
    policy: Literal["recompute", "dots", "everything"] = "recompute"
    num_microbatches: int = 1

    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    report_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_share("dropout")
        if self.width % (2 * self.heads):
            nearest = max(self.width // (2 * self.heads), 1) * 2 * self.heads
            raise TrainError(
                f"`width` (={self.width}) must be divisible by 2 · `heads` (={self.heads}). Use "
                f"{nearest}."
            )
        if self.lora is not None and self.lora > self.width:
            raise TrainError(f"`lora` (={self.lora}) must be at most `width` (={self.width})")
        uses_offload_ops = self.offload != "none" or self.fuse_update
        for name, default in (("num_microbatches", 1), ("policy", "recompute")):
            if (value := getattr(self, name)) != default and not uses_offload_ops:
                raise TrainError(f"`{name}` (={value}) needs `offload` or `fuse_update`")
        if self.remat and uses_offload_ops:
            raise TrainError(
                "`remat` cannot be combined with `offload` or `fuse_update`, which recompute anyway"
            )
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
