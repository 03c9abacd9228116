"""The configuration of a training run on text. Imports no JAX."""

import dataclasses
from typing import ClassVar

from ..decoder_config import DecoderRunConfig
from ..errors import TrainError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig(DecoderRunConfig):
    """Options of `effjax train lm`."""

    COMMAND: ClassVar[str] = "lm"

    data: str = "pydoc"
    context: int = 128

    layers: int = 4
    width: int = 128
    heads: int = 4

    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    report_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            nearest = max(self.width // (2 * self.heads), 1) * 2 * self.heads
            raise TrainError(
                f"`width` (={self.width}) must be divisible by 2 · `heads` (={self.heads}). Use "
                f"{nearest}."
            )
