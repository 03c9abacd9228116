"""Modelled time of training steps beside speeds that others measured on GPUs.

The measurements are those of llm.q (https://github.com/IST-DASLab/llmq, tables of README.md and
commands of its folder benchmarks): one GPU, Qwen2.5 in bfloat16, sequences of 1024 tokens. It
updates the parameters after 524,288 tokens, and adds up gradients until then. A step is therefore
planned here for one of its batches, with plain SGD, which reads and writes as many bytes as this
sum. The programs are compiled for an H100, and timed with the rates of each GPU.

The modelled time is that of effjax's programs, which read and write more than llm.q's kernels: it
is not a lower bound of theirs. So the factor of a GPU is the measured time relative to that of the
products of the step at the peak rate. It is what measured kernels lose, with their other work.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import optax

from effjax import offload_jit
from effjax.memory import find_rates
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig
from effjax.train.mesh import planning_mesh
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.learner import make_learner
from effjax.train.text.plans import training_step

from .finetune import COMPILED_FOR, plan_step
from .measure import need_compiler
from .results import Bars, Result, Size

SOURCE = "https://github.com/IST-DASLab/llmq/tree/b77d969164ace12364abdd7ccf5c3b4608a84b62"
LENGTH = 1024
Row = dict[str, Any]

# The options of a step that keeps, recomputes and offloads about what a run of llm.q does.
KEPT: dict[str, Any] = {"policy": "everything"}
RECOMPUTED: dict[str, Any] = {"policy": "recompute"}
OFFLOADED: dict[str, Any] = {"policy": "recompute", "params_in": "host", "fuse_update": True}


class Measurement(NamedTuple):
    """Tokens per second of one GPU, the sequences that it computes at a time, and its options."""

    model: str
    target: str
    batch_size: int
    tokens_per_second: float
    options: dict[str, Any]


def _qwen(width: int, mlp: int, layers: int, heads: int, head_dim: int, **other: Any) -> Any:
    small: dict[str, Any] = dict(
        vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6
    )
    return DecoderConfig(
        model_type="qwen2", hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, head_dim=head_dim, dtype="bfloat16", **small | other,
    )  # fmt: skip


MODELS: dict[str, DecoderConfig] = {
    "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 64),
    "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 128),
    "Qwen2.5-7B": _qwen(
        3584, 18944, 28, 28, 128, vocab_size=152064, num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
MEASURED = (
    Measurement("Qwen2.5-0.5B", "rtx4090", 16, 40e3, KEPT),
    Measurement("Qwen2.5-1.5B", "rtx4090", 4, 14e3, KEPT),
    Measurement("Qwen2.5-7B", "rtx4090", 16, 2.8e3, OFFLOADED),
    Measurement("Qwen2.5-0.5B", "rtx5090", 16, 55e3, KEPT),
    Measurement("Qwen2.5-1.5B", "rtx5090", 8, 17e3, RECOMPUTED),
    Measurement("Qwen2.5-0.5B", "l40s", 16, 44e3, KEPT),
    Measurement("Qwen2.5-1.5B", "l40s", 8, 17e3, KEPT),
    Measurement("Qwen2.5-0.5B", "h100", 32, 149e3, KEPT),
    Measurement("Qwen2.5-1.5B", "h100", 16, 59e3, KEPT),
    Measurement("Qwen2.5-7B", "h100", 4, 14e3, KEPT),
)


def accumulation_step(
    model: DecoderConfig, batch_size: int, length: int, options: dict[str, Any]
) -> tuple[Any, ...]:
    """Return a step with plain SGD, and the shapes of its arguments."""
    config = FinetuneConfig(
        max_length=length,
        batch_size=batch_size,
        packing=False,
        steps=1,
        clip_norm=0,
        **options,
    ).resolve()
    learner = make_learner(config, model, planning_mesh(None, 1))
    learner = dataclasses.replace(learner, optimizer=optax.sgd(1e-3))
    *_, batch, key = training_step(config, 1, model)
    return offload_jit(learner.train_step()), learner.shapes(), batch, key


def plan_measured(measured: Measurement, model: DecoderConfig, length: int = LENGTH) -> Row:
    """Return the row of a measurement, with the modelled speed of a step of as many sequences."""
    step = accumulation_step(model, measured.batch_size, length, measured.options)
    planned = plan_step(step, COMPILED_FOR)
    rates = find_rates(measured.target)
    time, tokens = step_time(planned.hlo, rates), length * measured.batch_size
    products = sum(flops / rates.flops_of(dtype) for dtype, flops in time.flops.items())
    measured_seconds = tokens / measured.tokens_per_second
    return {
        "name": f"{measured.model}, {measured.target}",
        "model": measured.model,
        "target": measured.target,
        "batch_size": measured.batch_size,
        "options": measured.options,
        "measured_tokens_per_second": measured.tokens_per_second,
        "tokens_per_second": tokens / time.seconds,
        "measured_seconds": measured_seconds,
        "step_seconds": time.seconds,
        "product_seconds": products,
        "planned_device_bytes": planned.peak_device_bytes,
        "recomputed_flops": time.recomputed_flops,
        "ratio": measured_seconds / products,
    }


def find_factors(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Return the mean, the least and the largest ratio of each GPU."""
    by_target: dict[str, list[float]] = {}
    for row in rows:
        by_target.setdefault(row["target"], []).append(row["ratio"])
    return {
        target: [round(f(ratios), 2) for f in (statistics.mean, min, max)]
        for target, ratios in by_target.items()
    }


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        rows = [plan_measured(measured, MODELS[measured.model]) for measured in MEASURED]
    else:
        small = dataclasses.replace(
            MODELS["Qwen2.5-0.5B"], vocab_size=512, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        )  # fmt: skip
        rows = [plan_measured(MEASURED[0], small, 64)]
    yield Result(
        "published",
        "modelled speed of a step and the one that others measured",
        {
            "length": LENGTH,
            "source": SOURCE,
            "compiled_for": COMPILED_FOR,
            "factors": find_factors(rows),
        },
        rows,
        Bars("ratio", "measured time relative to that of the products at the peak rate"),
        ["Measured by llm.q with its own kernels; modelled from published peak rates."],
    )
