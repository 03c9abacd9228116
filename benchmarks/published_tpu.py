"""Modelled time of a training step beside the speed that MaxText measured on TPU v5e.

MaxText's table has a decoder of 16 billion parameters on 1 to 32 slices of 256 chips, and its
script 16b.sh the options: six sequences of 2048 tokens for each chip, every layer recomputed. Each
chip computes the same whatever their number, so the step is planned for four chips and at two
depths, and continued to all layers. MaxText states FLOPs without recomputation and counts half of
attention, as causal. So the measured time of a step is that number of FLOPs at the stated rate.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from effjax.memory import find_rates, plan
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import training_step

from .measure import need_compiler
from .published import find_factors
from .results import Bars, Result, Size

SOURCE = (
    "https://github.com/AI-Hypercomputer/maxtext/tree/e591f30cbbf217ed67ef71263ec0538239f9c3b8"
    "/src/maxtext/configs/tpu/v5e"
)
TARGET = "v5e"
CHIPS, SEQUENCES, LENGTH = 4, 6, 2048
MODEL = DecoderConfig(
    model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=28672,
    num_hidden_layers=32, num_attention_heads=64, num_key_value_heads=64, head_dim=128,
    dtype="bfloat16",
)  # fmt: skip
# TFLOPs per second and chip, by the number of slices.
MEASURED = {1: 120, 2: 117, 4: 117, 8: 115, 16: 111, 32: 108}


def model_flops(model: DecoderConfig, length: int) -> float:
    """Return the FLOPs of a step of a chip, as MaxText counts them."""
    width, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    matrices = 4 * width * heads + 3 * width * model.intermediate_size
    matrices = model.num_hidden_layers * matrices + width * model.vocab_size
    attention = 2 * length * heads * model.num_hidden_layers
    return 3 * SEQUENCES * length * (2 * matrices + attention)


def product_seconds(model: DecoderConfig, length: int, depths: Sequence[int]) -> float:
    """Return the time of the products of a step at the peak rate, with those recomputed."""
    rates, seconds = find_rates(TARGET), []
    for depth in depths:
        config = FinetuneConfig(
            max_length=length, batch_size=CHIPS * SEQUENCES, packing=False, steps=1,
            policy="recompute", mesh=f"fsdp={CHIPS}",
        )  # fmt: skip
        shallow = dataclasses.replace(model, num_hidden_layers=depth)
        planned = plan(*training_step(config, CHIPS, shallow), target=TARGET)
        flops = step_time(planned.hlo, rates).flops
        seconds.append(sum(count / rates.flops_of(dtype) for dtype, count in flops.items()))
    per_layer = (seconds[1] - seconds[0]) / (depths[1] - depths[0])
    return seconds[0] + (model.num_hidden_layers - depths[0]) * per_layer


def make_rows(model: DecoderConfig, length: int, depths: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each number of slices."""
    products, flops = product_seconds(model, length, depths), model_flops(model, length)
    return [
        {
            "name": f"16B, {slices} x {TARGET}-256",
            "target": TARGET,
            "slices": slices,
            "measured_tflops": tflops,
            "measured_seconds": (measured := flops / (tflops * 1e12)),
            "product_seconds": products,
            "ratio": measured / products,
        }
        for slices, tflops in MEASURED.items()
    ]


def run(size: Size) -> Iterator[Result]:
    need_compiler(TARGET)
    if size == "published":
        rows = make_rows(MODEL, LENGTH, (1, 2))
    else:
        small = dataclasses.replace(
            MODEL, vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=2,
            num_key_value_heads=2,
        )  # fmt: skip
        rows = make_rows(small, 256, (1, 2))
    yield Result(
        "published_tpu",
        "products of a step at the peak rate and the time that MaxText measured",
        {
            "config": MODEL.to_json(),
            "length": LENGTH,
            "sequences_of_a_chip": SEQUENCES,
            "planned_chips": CHIPS,
            "source": SOURCE,
            "factors": find_factors(rows),
        },
        rows,
        Bars("ratio", "measured time relative to that of the products at the peak rate"),
        ["Measured by MaxText with its own program; planned for four chips."],
    )
