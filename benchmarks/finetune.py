"""Memory and time of `effjax finetune` for models of 8 to 32 billion parameters, by GPU and batch.

The steps are those that `effjax memory finetune` plans. They are compiled for an H100, those of
Qwen3-8B also for an RTX 4090. The memory on other GPUs is that of the program for the H100, and the
time is modelled with the rates of each GPU.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from effjax.memory import MemoryPlan, find_rates, plan
from effjax.memory.compiler.cache import default_folder
from effjax.memory.devices import find_target
from effjax.memory.search.budget import argument_bytes
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, training_step

from .language_model import QWEN3_8B
from .language_model_table import QWEN3_14B, QWEN3_32B
from .measure import need_compiler
from .results import Bars, Result, Size

GPUS = {
    "RTX 4090": "rtx4090", "RTX 5090": "rtx5090", "A100": "a100-80", "H100": "h100",
    "GH200": "gh200",
}  # fmt: skip
MODELS = {"Qwen3-8B": QWEN3_8B, "Qwen3-14B": QWEN3_14B, "Qwen3-32B": QWEN3_32B}
OPTIMIZERS = "adamw", "adamw8bit"
# The fused forms, which need the least memory and are about as fast as the others.
IN_MEMORY, OFFLOADED = "jax.checkpoint, fused", "offload all, fused"
OPTIONS = {IN_MEMORY: "--fuse-update", OFFLOADED: "--params-in host --fuse-update"}
LENGTH = 4096
BATCHES = 8, 32  # sequences of a step that hides the copies: 32k and 131k tokens
OWN_PROGRAM = "Qwen3-8B", "rtx4090"  # whose steps are compiled for the GPU itself
# The model of the size "small".
SMALL = dataclasses.replace(
    QWEN3_8B, vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
COMPILED_FOR = "h100"


def plan_step(step: tuple[Any, ...], target: str) -> MemoryPlan:
    """Plan a step as `effjax memory` does, with the same cache."""
    return plan(*step, target=target, cache=default_folder())


def plan_model(
    name: str, model: DecoderConfig, optimizer: str, gpus: dict[str, str], length: int, batch: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each GPU: the form in device memory if it fits, or the offloaded one.

    Each sequence is a microbatch: an offloaded layer is copied once for all of them.
    """
    config = FinetuneConfig(
        max_length=length, batch_size=batch, num_microbatches=batch, optimizer=optimizer  # pyright: ignore
    ).resolve()  # fmt: skip
    model = dataclasses.replace(model, dtype=config.param_dtype)
    steps = {
        form: training_step(dataclasses.replace(config, **FORMS[form]), 1, model)
        for form in OPTIONS
    }
    state = sum(argument_bytes(steps[IN_MEMORY][1:], 1))
    for gpu, target in gpus.items():
        compiled_for = target if (name, target) == OWN_PROGRAM else COMPILED_FOR
        limit = int(0.75 * find_target(target).memory_bytes)
        for form in (IN_MEMORY, OFFLOADED):
            if form == IN_MEMORY and state > limit:
                continue
            planned = plan_step(steps[form], compiled_for)
            if planned.peak_device_bytes <= limit:
                break
        else:
            form, planned = OFFLOADED, plan_step(steps[OFFLOADED], compiled_for)
        seconds = step_time(planned.hlo, find_rates(target)).seconds
        yield {
            "name": f"{name}, {optimizer}, {gpu}" + f", {batch} sequences" * (batch > 1),
            "model": name,
            "optimizer": optimizer,
            "gpu": gpu,
            "batch_size": batch,
            "form": form,
            "options": OPTIONS[form],
            "compiled_for": compiled_for,
            "state_bytes": state,
            "planned_device_bytes": planned.peak_device_bytes,
            "planned_host_bytes": planned.peak_host_bytes,
            "device_limit_bytes": limit,
            "fits": planned.peak_device_bytes <= limit,
            "step_seconds": seconds,
            "tokens_per_second": batch * length / seconds,
        }


def make_result(name: str, rows: list[dict[str, Any]], length: int, batch: str) -> Result:
    return Result(
        name,
        f"fine-tuning on one GPU, {batch} of {length} tokens a step, planned",
        {"length": length, "gpus": GPUS, "ours": [row["name"] for row in rows]},
        rows,
        Bars("planned_host_bytes", "planned host memory of a step [GB]", unit=1e9),
        ["Times are modelled from published peak rates, not measured."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    models, gpus, length = MODELS, GPUS, LENGTH
    if size == "small":
        models, gpus, length = {"small": SMALL}, {"H100": "h100"}, 512
    optimizers = OPTIMIZERS if size == "published" else OPTIMIZERS[:1]

    def rows(batch: int) -> list[dict[str, Any]]:
        return [
            row
            for name, model in models.items()
            for optimizer in optimizers
            for row in plan_model(name, model, optimizer, gpus, length, batch)
        ]

    yield make_result("finetune", rows(1), length, "one sequence")
    batches = BATCHES if size == "published" else BATCHES[:1]
    yield make_result(
        "finetune_batches", [row for batch in batches for row in rows(batch)], length,
        " or ".join(map(str, batches)) + " sequences",
    )  # fmt: skip
