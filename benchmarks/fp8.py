"""Planned speed and errors of products of 8-bit floating-point numbers, beside bfloat16.

A step of fine-tuning Qwen3-8B with everything offloaded, and one linear layer, are planned for an
RTX 4090 and an H100. The errors are those of a product and of its gradients on this machine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effjax import fp8_linear
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, training_step

from .finetune import GPUS, OFFLOADED, QWEN3_8B, SMALL, plan_step
from .measure import add_gradients, need_compiler
from .results import Result, Row, Size

SEQUENCES, LENGTH = 64, 2048
OF_MICROBATCH = 4  # sequences; each microbatch rounds the weights again
TOKENS, WIDTH, OUTPUTS = 16384, 4096, 12288  # of the linear layer
# Tokens a second of Qwen2.5-7B in the tables of LLMQ, whose version `published.py` names.
LLMQ = {
    "RTX 4090": {"bfloat16": 2800, "fp8": 4300}, "H100": {"bfloat16": 14000, "fp8": 19000}
}  # fmt: skip
PRODUCTS: dict[str, Callable] = {"bfloat16": jnp.matmul, "fp8": fp8_linear}
ERRORS = 512, 256, 384  # tokens, width, outputs


def finetuning_step(model: Any, sequences: int, length: int, dtype: str) -> tuple[Any, ...]:
    config = FinetuneConfig(
        max_length=length, batch_size=sequences, num_microbatches=sequences // OF_MICROBATCH,
        optimizer="adamw8bit", matmul="fp8" if dtype == "fp8" else None, **FORMS[OFFLOADED],
    ).resolve()  # fmt: skip
    return training_step(config, 1, dataclasses.replace(model, dtype=config.param_dtype))


def product_step(tokens: int, backward: bool, dtype: str) -> tuple[Any, ...]:
    shapes = (tokens, WIDTH), (WIDTH, OUTPUTS), (tokens, OUTPUTS)
    args = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    return jax.jit(add_gradients(PRODUCTS[dtype], backward)), *args


def plan_rows(of: str, tokens: int, make_step: Callable[[str], tuple[Any, ...]]) -> Iterator[Row]:
    """Yield a row for each GPU and dtype of the products."""
    for gpu in LLMQ:
        seconds: list[float] = []
        for dtype in PRODUCTS:
            planned = plan_step(make_step(dtype), GPUS[gpu])
            seconds.append(planned.step_seconds)
            yield {
                "name": f"{of}, {gpu}, {dtype}",
                "of": of,
                "gpu": gpu,
                "dtype": dtype,
                "planned_device_bytes": planned.peak_device_bytes,
                "planned_host_bytes": planned.peak_host_bytes,
                "step_seconds": seconds[-1],
                "tokens_per_second": tokens / seconds[-1],
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
    x, kernel, dy = arrays = draw(kind)
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
    rows = [row for kind in ("normal", "heavy-tailed", "sparse") for row in measure_errors(kind)]
    yield Result("fp8_error", "errors of a product and its gradients", {"sizes": ERRORS}, rows)

    need_compiler()
    name, model, sequences, length, tokens = "Qwen3-8B", QWEN3_8B, SEQUENCES, LENGTH, TOKENS
    if size == "small":
        name, model, sequences, length, tokens = "small", SMALL, OF_MICROBATCH, 256, 512
    steps = {
        "forward": (tokens, partial(product_step, tokens, False)),
        "forward and backward": (tokens, partial(product_step, tokens, True)),
        name: (sequences * length, partial(finetuning_step, model, sequences, length)),
    }
    rows = [row for of, step in steps.items() for row in plan_rows(of, *step)]
    config: Row = {"sequences": sequences, "length": length, "llmq": LLMQ}
    notes = ["Times are modelled from published peak rates, not measured."]
    yield Result("fp8", "a linear layer and fine-tuning, planned", config, rows, notes)
