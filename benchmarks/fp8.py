"""Planned speed and errors of products of 8-bit floating-point numbers, beside bfloat16.

A step of fine-tuning Qwen3-8B with everything offloaded, and one linear layer, are planned for an
RTX 4090 and an H100. The errors are those of a product and of its gradients on this machine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effjax import fp8_linear
from effjax.memory.devices import find_target
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, training_step

from .finetune import GPUS, MODELS, OFFLOADED, SMALL, plan_step
from .measure import add_gradients, need_compiler
from .results import Result, Row, Size

SEQUENCES, LENGTH = 64, 2048
OF_MICROBATCH = 4  # sequences. Each microbatch rounds the weights again
TOKENS, WIDTH, OUTPUTS = 16384, 4096, 12288  # of the linear layer
# Tokens a second of Qwen2.5-7B in the tables of LLMQ, whose version `published.py` names.
LLMQ = {
    "RTX 4090": {"bfloat16": 2800, "fp8": 4300}, "H100": {"bfloat16": 14000, "fp8": 19000}
}  # fmt: skip
PRODUCTS: dict[str, Callable] = {"bfloat16": jnp.matmul, "fp8": fp8_linear}
ERRORS = 512, 256, 384  # tokens, width, outputs
KINDS = "normal", "heavy-tailed", "sparse"


def plan_finetuning(name: str, model: Any, gpu: str, sequences: int, length: int) -> list[Row]:
    """Return a row for each dtype of the products."""
    rows: list[Row] = []
    for dtype in PRODUCTS:
        config = FinetuneConfig(
            max_length=length, batch_size=sequences, num_microbatches=sequences // OF_MICROBATCH,
            optimizer="adamw8bit", matmul="fp8" if dtype == "fp8" else None, **FORMS[OFFLOADED],
        ).resolve()  # fmt: skip
        planned = plan_step(
            training_step(config, 1, dataclasses.replace(model, dtype=config.param_dtype)),
            GPUS[gpu],
        )
        row: Row = {
            "name": f"{name}, {gpu}, {dtype}",
            "model": name,
            "gpu": gpu,
            "dtype": dtype,
            "flops": planned.step_time.flops,
            "planned_device_bytes": planned.peak_device_bytes,
            "planned_host_bytes": planned.peak_host_bytes,
            "fits": planned.peak_device_bytes <= 0.75 * find_target(GPUS[gpu]).memory_bytes,
            "step_seconds": planned.step_seconds,
            "tokens_per_second": sequences * length / planned.step_seconds,
        }
        first = (rows or [row])[0]
        rows.append(row | {"ratio": row["tokens_per_second"] / first["tokens_per_second"]})
    return rows


def plan_product(gpu: str, tokens: int, width: int, outputs: int) -> Iterator[Row]:
    """Yield the times of a product, and of its gradients with it."""
    args = [
        jax.ShapeDtypeStruct(shape, "bfloat16")
        for shape in ((tokens, width), (width, outputs), (tokens, outputs))
    ]
    for passes in ("forward", "forward+backward"):
        seconds: list[float] = []
        for dtype, product in PRODUCTS.items():
            step = jax.jit(add_gradients(product, passes != "forward"))
            seconds.append(plan_step((step, *args), GPUS[gpu]).step_seconds)
            yield {
                "name": f"{gpu}, {dtype}",
                "gpu": gpu,
                "dtype": dtype,
                "passes": passes,
                "step_seconds": seconds[-1],
                "ratio": seconds[0] / seconds[-1],
            }


def draw(kind: str) -> list[np.ndarray]:
    """Return x, a kernel and the gradient of the result in float64."""
    rng = np.random.default_rng(0)
    tokens, width, outputs = ERRORS
    x, kernel, dy = (
        rng.normal(size=s) for s in ((tokens, width), (width, outputs), (tokens, outputs))
    )
    if kind == "heavy-tailed":  # Student's t with two degrees of freedom
        x, dy = (a / np.sqrt(rng.chisquare(2, a.shape) / 2) for a in (x, dy))
    if kind == "sparse":
        x, dy = (a * (rng.random(a.shape) < 0.05) for a in (x, dy))
    return [x, kernel, dy]


def measure_errors(kind: str) -> Iterator[Row]:
    """Yield the root mean square errors beside float64, relative to that of the values."""
    arrays = draw(kind)
    x, kernel, dy = arrays
    want = x @ kernel, dy @ kernel.T, x.T @ dy
    for dtype, product in PRODUCTS.items():
        got = jax.jit(add_gradients(product, True))(*(jnp.asarray(a, "bfloat16") for a in arrays))
        errors = (
            np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
            for a, b in zip(got, want, strict=True)
        )
        row = dict(zip(("y", "dx", "dkernel"), map(float, errors), strict=True))
        yield {"name": f"{kind} rows, {dtype}", "rows": kind, "dtype": dtype} | row


def run(size: Size) -> Iterator[Result]:
    rows = [row for kind in KINDS for row in measure_errors(kind)]
    config: Row = dict(zip(("tokens", "width", "outputs"), ERRORS, strict=True))
    yield Result("fp8_error", "errors of a product and of its gradients", config, rows)

    need_compiler()
    modelled = ["Times are modelled from published peak rates, not measured."]
    name, model, *batch = "Qwen3-8B", MODELS["Qwen3-8B"], SEQUENCES, LENGTH
    sizes = TOKENS, WIDTH, OUTPUTS
    if size == "small":
        name, model, *batch = "small", SMALL, OF_MICROBATCH, 256
        sizes = 512, 256, 384
    rows = [row for gpu in LLMQ for row in plan_product(gpu, *sizes)]
    config = dict(zip(("tokens", "width", "outputs"), sizes, strict=True))
    yield Result("fp8_product", "one linear layer, planned", config, rows, modelled)
    rows = [row for gpu in LLMQ for row in plan_finetuning(name, model, gpu, *batch)]
    config = dict(zip(("sequences", "length"), batch, strict=True)) | {"llmq": LLMQ}
    yield Result(
        "fp8", f"fine-tuning of {name} with 8-bit products, planned", config, rows, modelled
    )
