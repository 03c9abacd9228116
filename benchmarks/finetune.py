"""Memory and time of `effjax finetune` for models of 8 to 70 billion parameters, by GPU and batch.

The first table is of all parameters, the second one of adapters on a quantized base. The steps are
those that `effjax memory finetune` plans. They are compiled for an H100, the step of README also
for an RTX 4090. The memory on other GPUs is that of the program for the H100, and the time is
modelled with the rates of each GPU.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from effjax.memory import MemoryPlan, find_rates, plan
from effjax.memory.compiler.cache import default_folder
from effjax.memory.devices import find_target
from effjax.memory.search.budget import argument_bytes
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig, Llama3RopeScaling, decoder_shapes
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, training_step
from effjax.validation.programs import QWEN3_8B

from .measure import need_compiler
from .results import Result, Row, Size

QWEN3_14B = dataclasses.replace(
    QWEN3_8B, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
    num_attention_heads=40,
)  # fmt: skip
QWEN3_32B = dataclasses.replace(
    QWEN3_8B, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
    num_attention_heads=64,
)  # fmt: skip
LLAMA_70B = DecoderConfig(
    model_type="llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
    num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    dtype="bfloat16",
)  # fmt: skip
QWEN3_30B_A3B = DecoderConfig(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144,
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    rope_theta=1e6, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    norm_topk_prob=True, router_aux_loss_coef=0.001, dtype="bfloat16",
)  # fmt: skip
# The model of the size "small".
SMALL = dataclasses.replace(
    QWEN3_8B, vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
MODELS = {
    "Qwen3-8B": QWEN3_8B, "Qwen3-14B": QWEN3_14B, "Qwen3-32B": QWEN3_32B,
    "Llama-3.3-70B": LLAMA_70B, "Qwen3-30B-A3B": QWEN3_30B_A3B,
}  # fmt: skip
GPUS = {
    "RTX 4090": "rtx4090", "RTX 5090": "rtx5090", "A100": "a100-80", "H100": "h100",
    "GH200": "gh200",
}  # fmt: skip
COMPILED_FOR = "h100"
# Tokens of a sequence, and sequences of a step; 131k tokens hide the copies.
SHORT, BATCH, LONG = (4096, 1), (4096, 32), (131072, 1)
# float32 moments of 70 billion parameters take more host memory than these machines have.
PLANNED = {
    "Qwen3-8B": {"adamw": (SHORT, BATCH, LONG), "adamw8bit": (SHORT, BATCH)},
    "Qwen3-14B": {"adamw": (SHORT,), "adamw8bit": (SHORT,)},
    "Qwen3-32B": {"adamw": (SHORT,), "adamw8bit": (SHORT, BATCH, LONG)},
    "Llama-3.3-70B": {"adamw8bit": (SHORT, LONG)},
    "Qwen3-30B-A3B": {"adamw8bit": (SHORT, BATCH)},
}
OWN_PROGRAM = "Qwen3-8B", SHORT, "rtx4090"  # compiled for the GPU itself
ROWS_OF_EXPERTS = 8  # of a microbatch: each expert is read once for its tokens of all of them
MLP_CHUNK = 4096  # positions, of longer sequences
# The fused forms, which need the least memory and are about as fast as the others.
IN_MEMORY, OFFLOADED = "jax.checkpoint, fused", "offload all, fused"
ADAPTED = {
    name: MODELS[name] for name in ("Qwen3-14B", "Qwen3-32B", "Llama-3.3-70B", "Qwen3-30B-A3B")
}
# Adapters of all experts would have 3% of the model's parameters.
TARGETS = {"Qwen3-30B-A3B": "q_proj,k_proj,v_proj,o_proj"}
CARDS = {"Qwen3-30B-A3B": 12e9}  # bytes of a smaller card of the same rates
RANK = 16
WEIGHTS = None, "int8", "nf4"
# The first one that fits is planned. The inputs of the layers fit in device memory at this length.
ADAPTER_FORMS: tuple[dict[str, Any], ...] = (
    {"fuse_update": True},
    {"params_in": "host", "activations_in": "device", "fuse_update": True},
)


def count_parameters(config: DecoderConfig) -> int:
    return sum(math.prod(a.shape) for tree in decoder_shapes(config) for a in tree.values())


def model_flops(config: DecoderConfig, length: int) -> int:
    """Return the FLOPs of a step without recomputation, as throughputs are published.

    Six per parameter of a matrix product and token, of the experts that compute for the token, and
    twelve per channel and pair of positions of causal attention.
    """
    layers, _ = decoder_shapes(config)
    matrices = sum(math.prod(a.shape) for a in layers.values() if a.ndim == 3)
    if config.num_experts is not None and config.num_experts_per_tok is not None:
        experts = sum(math.prod(a.shape) for a in layers.values() if a.ndim == 4)
        matrices += experts * config.num_experts_per_tok // config.num_experts
    matrices += config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    pairs = length * (length + 1) // 2
    return 6 * matrices * length + 12 * config.num_hidden_layers * width * pairs


def plan_step(step: tuple[Any, ...], target: str) -> MemoryPlan:
    """Plan a step as `effjax memory` does, with the same cache."""
    return plan(*step, target=target, cache=default_folder())


def plan_model(
    name: str,
    model: DecoderConfig,
    optimizer: Any,
    gpus: dict[str, str],
    length: int,
    batch: int,
) -> Iterator[Row]:
    """Yield a row for each GPU: the form in device memory if it fits, or the offloaded one.

    Each sequence, or several with experts, is a microbatch: an offloaded layer is copied once for
    all of them.
    """
    rows = min(ROWS_OF_EXPERTS, batch) if model.num_experts else 1
    config = FinetuneConfig(
        max_length=length, batch_size=batch, num_microbatches=batch // rows, optimizer=optimizer,
        mlp_chunk_size=MLP_CHUNK if length > MLP_CHUNK else None,
        packing=length <= MLP_CHUNK,  # a longer row is one text, whose attention is cuDNN's
    ).resolve()  # fmt: skip
    model = dataclasses.replace(model, dtype=config.param_dtype)
    steps = {
        form: training_step(dataclasses.replace(config, **FORMS[form]), 1, model)
        for form in (IN_MEMORY, OFFLOADED)
    }
    state = sum(argument_bytes(steps[IN_MEMORY][1:], 1))
    for gpu, target in gpus.items():
        own = (name, (length, batch), target) == OWN_PROGRAM
        compiled_for = target if own else COMPILED_FOR
        limit = int(0.75 * find_target(target).memory_bytes)
        form, planned = OFFLOADED, None
        if state <= limit:
            planned = plan_step(steps[IN_MEMORY], compiled_for)
            form = IN_MEMORY if planned.peak_device_bytes <= limit else OFFLOADED
        if planned is None or form == OFFLOADED:
            planned = plan_step(steps[OFFLOADED], compiled_for)
        rates = find_rates(target)
        seconds, flops = step_time(planned.hlo, rates).seconds, batch * model_flops(model, length)
        size = f", {batch} × {length} tokens" * ((length, batch) != SHORT)
        yield {
            "name": f"{name}, {optimizer}, {gpu}{size}",
            "model": name,
            "optimizer": optimizer,
            "gpu": gpu,
            "length": length,
            "batch_size": batch,
            "form": form,
            "compiled_for": compiled_for,
            "state_bytes": state,
            "planned_device_bytes": planned.peak_device_bytes,
            "planned_host_bytes": planned.peak_host_bytes,
            "device_limit_bytes": limit,
            "fits": planned.peak_device_bytes <= limit,
            "step_seconds": seconds,
            "tokens_per_second": batch * length / seconds,
            "peak_share": flops / seconds / rates.flops_of("bf16"),
        }


def describe_form(form: dict[str, Any], quantize: str | None, targets: str | None) -> str:
    """Return the options of a form, as they are typed."""
    words = [f"--lora {RANK}"]
    words += [f"--lora-targets {targets}"] if targets else []
    words += [f"--quantize {quantize}"] if quantize else []
    words += ["--params-in host --activations-in device"] if "params_in" in form else []
    return " ".join([*words, "--fuse-update"])


def plan_adapters(
    name: str, model: DecoderConfig, quantize: Any, gpu: str, target: str, length: int
) -> Row:
    """Return the row of the first form that fits, or of the last one."""
    config = FinetuneConfig(
        lora=RANK, lora_targets=TARGETS.get(name), quantize=quantize, max_length=length,
        batch_size=1,
    ).resolve()  # fmt: skip
    model = dataclasses.replace(model, dtype=config.param_dtype)
    limit = int(0.75 * CARDS.get(name, find_target(target).memory_bytes))
    row: Row = {}
    for form in ADAPTER_FORMS:
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
            "options": describe_form(form, quantize, config.lora_targets),
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


def make_result(name: str, trained: str, rows: list[Row]) -> Result:
    return Result(
        name,
        f"fine-tuning of {trained} on one GPU, planned",
        {"ours": [row["name"] for row in rows]},
        rows,
        ["Times are modelled from published peak rates, not measured."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    models, adapted, gpus = MODELS, ADAPTED, GPUS
    planned, weights, length = PLANNED, WEIGHTS, SHORT[0]
    if size == "small":
        models = adapted = {"small": SMALL}
        planned, gpus = {"small": {"adamw": ((512, 1), (512, 8))}}, {"H100": "h100"}
        weights, length = WEIGHTS[-1:], 512
    rows = [
        row
        for name, by_optimizer in planned.items()
        for optimizer, steps in by_optimizer.items()
        for step in steps
        for row in plan_model(name, models[name], optimizer, gpus, *step)
    ]
    yield make_result("finetune", "all parameters", rows)
    rows = [
        plan_adapters(name, model, quantize, "RTX 4090", "rtx4090", length)
        for name, model in adapted.items()
        for quantize in weights
    ]
    yield make_result("finetune_quantized", f"adapters of rank {RANK}", rows)
