"""The configuration of a fine-tuning run. Imports no JAX."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

from ..decoder_config import DecoderRunConfig
from ..errors import TrainError

# Default learning rates: of all parameters, and of adapters.
FULL_RATE, LORA_RATE = 1e-5, 2e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(DecoderRunConfig):
    """Options of `effjax finetune`.

    `prepare` fills in `steps` and `date`, and makes the path of the checkpoint absolute.
    """

    COMMAND: ClassVar[str] = "finetune"

    checkpoint: str
    validation_data: str | None = None
    max_length: int = 2048
    packing: bool = True
    date: str | None = None  # of chat templates, as in 2026-01-31; None means today

    lora: int | None = None
    lora_alpha: float | None = None  # None means 2 · lora
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    mlp_chunk_size: int | None = None

    epochs: int = 3
    steps: int | None = None  # None means `epochs`
    report_every: int | None = None  # steps; None means an epoch
    batch_size: int = 8
    learning_rate: Any = None  # float; None means FULL_RATE or LORA_RATE
    warmup: float = 0.03  # share of the steps
    weight_decay: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.learning_rate is None:
            rate = FULL_RATE if self.lora is None else LORA_RATE
            object.__setattr__(self, "learning_rate", rate)
        super().__post_init__()
        self.check_share("warmup")
        if self.max_length < 2:
            raise TrainError(f"`max_length` (={self.max_length}) must be at least 2")
        if self.lora_alpha is not None:
            if self.lora is None:
                raise TrainError(f"`lora_alpha` (={self.lora_alpha}) needs `lora`")
            if not 0 < self.lora_alpha < math.inf:
                raise TrainError(f"`lora_alpha` (={self.lora_alpha}) must be above 0 and finite")

    @property
    def lora_scale(self) -> float:
        """The factor of the product of adapters, `lora_alpha / lora`; 1 without adapters."""
        if self.lora is None:
            return 1.0
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora
