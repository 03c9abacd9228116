"""Memory and time of training adapters on a quantized base, on a GPU of 24 GB.

The steps are those that `effjax memory finetune --lora 16 --quantize FORM` plans.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from effjax.memory.devices import find_target
from effjax.memory.search.budget import argument_bytes
from effjax.models import DecoderConfig
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import training_step

from .finetune import LENGTH, SMALL, plan_step
from .language_model_table import LLAMA_70B, QWEN3_14B, QWEN3_32B
from .measure import need_compiler
from .results import Bars, Result, Size

MODELS = {"Qwen3-14B": QWEN3_14B, "Qwen3-32B": QWEN3_32B, "Llama-3.3-70B": LLAMA_70B}
RANK = 16
WEIGHTS = None, "int8", "nf4"
# The first one that fits is planned. The inputs of the layers fit in device memory at this length.
FORMS: tuple[dict[str, Any], ...] = (
    {"fuse_update": True},
    {"params_in": "host", "activations_in": "device", "fuse_update": True},
)


def describe_form(form: dict[str, Any], quantize: str | None) -> str:
    """Return the options of a form, as they are typed."""
    words = [f"--lora {RANK}"]
    words += [f"--quantize {quantize}"] if quantize else []
    words += ["--params-in host --activations-in device"] if "params_in" in form else []
    return " ".join([*words, "--fuse-update"])


def plan_model(
    name: str, model: DecoderConfig, quantize: Any, gpu: str, target: str, length: int = LENGTH
) -> dict[str, Any]:
    """Return the row of the first form that fits, or of the last one."""
    config = FinetuneConfig(
        lora=RANK, quantize=quantize, max_length=length, batch_size=1
    ).resolve()  # fmt: skip
    model = dataclasses.replace(model, dtype=config.param_dtype)
    limit = int(0.75 * find_target(target).memory_bytes)
    row: dict[str, Any] = {}
    for form in FORMS:
        step = training_step(dataclasses.replace(config, **form), 1, model)
        on_device, on_host = argument_bytes(step[1:], 1)
        if on_device > limit:
            continue
        planned = plan_step(step, target)
        row = {
            "name": f"{name}, {quantize or config.param_dtype}, {gpu}",
            "model": name,
            "weights": quantize or config.param_dtype,
            "gpu": gpu,
            "options": describe_form(form, quantize),
            "state_bytes": on_device + on_host,
            "planned_device_bytes": planned.peak_device_bytes,
            "planned_host_bytes": planned.peak_host_bytes,
            "device_limit_bytes": limit,
            "fits": planned.peak_device_bytes <= limit,
            "to_device_seconds": planned.step_time.to_device_seconds,
            "compute_seconds": planned.step_time.compute_seconds,
            "step_seconds": planned.step_seconds,
            "tokens_per_second": length / planned.step_seconds,
        }
        if row["fits"]:
            break
    return row


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    models, weights, length = MODELS, WEIGHTS, LENGTH
    if size == "small":
        models, weights, length = {"small": SMALL}, WEIGHTS[-1:], 512
    rows = [
        plan_model(name, model, quantize, "RTX 4090", "rtx4090", length)
        for name, model in models.items()
        for quantize in weights
    ]
    yield Result(
        "finetune_quantized",
        f"training adapters of rank {RANK}, one sequence of {length} tokens a step, planned",
        {"length": length, "batch_size": 1, "ours": [row["name"] for row in rows]},
        rows,
        Bars("planned_host_bytes", "planned host memory of a step [GB]", unit=1e9),
        ["Times are modelled from published peak rates, not measured."],
    )
