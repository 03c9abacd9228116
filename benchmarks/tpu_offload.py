"""Planned memory of a training step on a TPU: in memory, recomputed, and offloaded.

Nothing runs on a TPU.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from . import offload, offload_forms
from .measure import need_compiler, plan_steps
from .results import Result, Size
from .tpu import CHECKPOINT, OURS, PLAIN, TARGET, compare_memory

FORMS = {
    PLAIN: offload_forms.IN_MEMORY,
    CHECKPOINT: offload_forms.REMAT,
    OURS: offload_forms.FUSED,
}
SETTINGS: dict[Size, offload_forms.Setting] = {
    "small": dataclasses.replace(offload.PLANNED, layers=2, width=128, context=32),
    "published": dataclasses.replace(offload.PLANNED, layers=24),
}


def plan_step(setting: offload_forms.Setting, names: Sequence[str] = tuple(FORMS)) -> Result:
    """Plan a training step in some forms."""
    steps = {
        name: offload_forms.abstract_step(setting, offload_forms.FORMS[FORMS[name]])
        for name in names
    }
    plans = {f"training step of {setting.layers} layers": plan_steps(steps, TARGET)}
    return compare_memory("tpu_offload", plans)


def run(size: Size) -> Iterator[Result]:
    need_compiler(TARGET)
    yield plan_step(SETTINGS[size])
