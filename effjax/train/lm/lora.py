"""Which parameters are trained: with adapters they alone."""

from typing import Any

from .config import LMConfig

ADAPTERS = "lora_a", "lora_b"


def is_adapter(path: Any, leaf: Any) -> bool:
    """Of a path in the parameters of a model."""
    return path[-1].key in ADAPTERS


def trainable(config: LMConfig) -> Any:
    """As `offload_train_step` takes it, of the layers and of all others."""
    return True if config.lora is None else is_adapter
