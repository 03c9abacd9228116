"""Modelled time of fine-tuning a language model on packed rows, and on rows without segments.

The steps are those of `effjax finetune`, with all state in host memory, compiled for two GPUs.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from effjax.memory import MemoryPlan, plan
from effjax.memory.read.hlo import NO_MOVEMENT, parse
from effjax.memory.time.work import WorkCounter
from effjax.models import DecoderConfig
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import training_step

from .language_model import QWEN3_8B
from .measure import need_compiler
from .results import Bars, Result, Size

TARGETS = "rtx4090", "h100"
HOST_BYTES = 300 * 2**30
CONFIG = FinetuneConfig(
    checkpoint="Qwen3-8B", data=["rows.jsonl"], max_length=2048, batch_size=64, num_microbatches=32,
    optimizer="adamw8bit", params_in="host", fuse_update=True,
)  # fmt: skip


def plan_rows(
    name: str, model: DecoderConfig, config: FinetuneConfig, targets: Sequence[str] = TARGETS
) -> Iterator[Result]:
    """Plan the step of a model; "ratio" is relative to rows without segments on the same GPU."""
    rows = []
    tokens = config.batch_size * config.max_length
    for target in targets:
        seconds = 0.0
        for packing in (False, True):
            step = training_step(dataclasses.replace(config, packing=packing), 1, model)
            planned = plan(*step, target=target, host_memory_bytes=HOST_BYTES)
            time = planned.step_time
            seconds = seconds or time.seconds
            products = sum(n / time.rates.flops_of(dtype) for dtype, n in time.flops.items())
            rows.append(
                {
                    "name": "packed rows" if packing else "rows without segments",
                    "of": target,
                    "step_seconds": time.seconds,
                    "ratio": round(time.seconds / seconds, 4),
                    "tokens_per_second": tokens / time.seconds,
                    "compute_seconds": time.compute_seconds,
                    "products_seconds": products,
                    "traffic_bytes": time.memory_bytes,
                    "planned_device_bytes": planned.peak_device_bytes,
                    "planned_host_bytes": planned.peak_host_bytes,
                }
            )
    options = (
        "batch_size",
        "max_length",
        "num_microbatches",
        "optimizer",
        "params_in",
        "fuse_update",
    )
    yield Result(
        f"packed_rows_{name}",
        f"fine-tuning step of {name}, packed and unpacked, modelled",
        {
            "model": model.to_json(),
            **{option: getattr(config, option) for option in options},
            "ours": ["packed rows", "rows without segments"],
        },
        rows,
        Bars("step_seconds", "modelled time of a step [s]", ("of",)),
    )
    yield list_kernels(name, planned)  # of packed rows on the last GPU


def list_kernels(name: str, planned: MemoryPlan, count: int = 10) -> Result:
    """List the kernels that move the most bytes of device memory beyond matrix products.

    "seconds" is their time without the products that they contain.
    """
    module, rates = parse(planned.hlo), planned.step_time.rates
    counter = WorkCounter(module)
    rows = []
    for instruction, executions in module.iter_executed():
        if instruction.opcode in NO_MOVEMENT or counter.transfers(instruction):
            continue
        work = counter.work(instruction)
        products = sum(n / rates.flops_of(dtype) for dtype, n in work.flops.items())
        seconds = max(0.0, work.memory_bytes / rates.memory - products)
        operation = re.search(r'op_name="[^"]*?([^"/]*)"', instruction.attributes)
        rows.append(
            {
                "name": f"{instruction.name} ({operation[1] if operation else ''})",
                "executions": executions,
                "traffic_bytes": executions * work.memory_bytes,
                "seconds": executions * seconds,
            }
        )
    rows.sort(key=lambda row: -row["seconds"])
    return Result(
        f"packed_rows_kernels_{name}",
        "kernels that take the most time beyond matrix products, modelled",
        {"target": planned.target.name, "all_seconds": sum(row["seconds"] for row in rows)},
        rows[:count],
        Bars("seconds", "modelled time of a step beyond products [s]"),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        yield from plan_rows("qwen3_8b", QWEN3_8B, CONFIG)
    else:
        small = dataclasses.replace(
            QWEN3_8B, vocab_size=4096, hidden_size=256, intermediate_size=512,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        config = dataclasses.replace(CONFIG, max_length=256, batch_size=4, num_microbatches=2)
        yield from plan_rows("small", small, config, TARGETS[1:])
