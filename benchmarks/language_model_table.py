"""Planned memory and modelled time of fine-tuning language models of 8 to 70 billion parameters.

Each model, length of the sequence, dtype of the moments and form is compiled for one GPU. The
memory on the other GPUs is that of the same program, and its time is modelled with their rates. The
steps of one model are compiled for two architectures, to see how much this matters.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, offload_jit, offload_train_step
from effjax.memory import MemoryPlan, find_rates, plan
from effjax.memory.compiler.cache import default_folder
from effjax.memory.devices import find_target
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig, Llama3RopeScaling, decoder_functions, decoder_shapes
from effjax.optimizers import adamw_8bit, in_24_bits, in_float32, stochastic_rounding
from effjax.train.optimizers import is_adamw, make_optimizer

from .language_model import QWEN3_8B, count_parameters, traffic
from .measure import need_compiler
from .results import Bars, Result, Size

RATE = 1e-5
CLIP_NORM = 1.0
MEMORY_FRACTION = 0.95
MLP_CHUNK = 4096  # positions, of longer sequences
OPTIMIZERS = {
    "float32": lambda: optax.chain(in_float32(optax.adamw(RATE)), stochastic_rounding(0)),
    "8-bit": lambda: optax.chain(adamw_8bit(RATE), stochastic_rounding(0)),
    "24 bits, 8-bit": lambda: in_24_bits(adamw_8bit(RATE)),
    "Muon": lambda: make_optimizer("muon", optax.constant_schedule(RATE), 0.0),
}
# Bytes of a parameter in bfloat16 and of its moments. An 8-bit moment has a float32 scale for each
# block of 256 values.
PARAMETER_BYTES = {"float32": 2 + 8, "8-bit": 2 + 2 + 8 / 256}


class Machine(NamedTuple):
    """A GPU, its target, and the assumed host memory."""

    name: str
    target: str
    host_bytes: int


MACHINES = (
    Machine("RTX 4090", "rtx4090", 256 * 10**9),
    Machine("H100", "h100", 1000 * 10**9),
    Machine("GH200", "gh200", 480 * 10**9),
)
COMPILED_FOR = "h100"
# The model, dtype of moments and lengths whose steps are compiled for the RTX 4090 as well.
OWN_PROGRAMS = tuple(("Qwen3-8B", "float32", length) for length in (4096, 32768))

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
MODELS = {
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-32B": QWEN3_32B,
    "Llama-3.3-70B": LLAMA_70B,
    "Qwen3-14B": QWEN3_14B,
}
LENGTHS = 4096, 32768, 131072
SHORT = 4096  # tokens up to which a step in device memory is planned, too
# The lengths to plan by dtype of the moments.
PLANNED = {
    "Qwen3-8B": {"float32": LENGTHS, "8-bit": LENGTHS[:2]},
    "Qwen3-32B": {"float32": LENGTHS, "8-bit": LENGTHS},
    "Llama-3.3-70B": {"8-bit": LENGTHS},
    "Qwen3-14B": {"float32": LENGTHS},
}


class Form(NamedTuple):
    """Places of parameters, moments and inputs of layers, "host" or "device".

    mlp_chunk_size: as in `decoder_functions`.
    """

    memory: Literal["host", "device"]
    mlp_chunk_size: int | None


def list_forms(config: DecoderConfig, length: int, moments: str) -> list[Form]:
    """Return the forms to plan: offloaded, and in device memory if the state fits there."""
    chunk = MLP_CHUNK if length > MLP_CHUNK else None
    forms = [Form("host", chunk)]
    # In a program that exceeds the memory of the GPU it is compiled for, XLA computes values again,
    # so its time would not be that of a larger GPU.
    state = count_parameters(config) * PARAMETER_BYTES[moments]
    if length <= SHORT and state <= device_limit(COMPILED_FOR):
        forms.append(Form("device", chunk))
    return forms


def device_limit(target: str) -> int:
    """Return the bytes of device memory that a step may use."""
    return int(MEMORY_FRACTION * find_target(target).memory_bytes)


def make_step(config: DecoderConfig, moments: str, form: Form) -> Any:
    """Return (init, step) of `effjax.offload_train_step`."""
    return offload_train_step(
        *decoder_functions(config, mlp_chunk_size=form.mlp_chunk_size),
        OPTIMIZERS[moments](),
        clip_norm=CLIP_NORM, clip_by="previous", weighted_loss=True,
        params_in=form.memory, others_in=form.memory,
        update_rows=is_adamw if form.memory == "host" else None,
    )  # fmt: skip


def abstract_step(config: DecoderConfig, length: int, moments: str, form: Form) -> tuple:
    """Return `(fn, *args)` of the step for the planner."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, min_axes: int | None = None) -> Any:
        """Put arrays of at least `min_axes` axes into the memory of the form."""

        def one(a):
            offloaded = form.memory == "host" and min_axes is not None and a.ndim >= min_axes
            kind = "pinned_host" if offloaded else "device"
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    init, step = make_step(config, moments, form)
    layers, others = decoder_shapes(config)
    state: OffloadState = jax.eval_shape(init, place(layers, 1), place(others, 1))
    state = OffloadState(
        layers=place(state.layers, 1),
        others=place(state.others, 1),
        layers_state=place(state.layers_state, 2),  # counts of the layers are on the device
        others_state=place(state.others_state, 1),
        grad_norm=place(state.grad_norm),
    )
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return offload_jit(step), state, place({"tokens": tokens, "labels": tokens})


def plan_cached(step: tuple, target: str, host_bytes: int, cache: Path | None = None) -> MemoryPlan:
    """Plan a step, with compiled programs on disk, so that an interrupted run loses little."""
    return plan(
        *step, target=target, memory_fraction=MEMORY_FRACTION, host_memory_bytes=host_bytes,
        cache=cache or default_folder(),
    )  # fmt: skip


def model_flops(config: DecoderConfig, length: int) -> int:
    """Return the FLOPs of a step without recomputation, as throughputs are published.

    Six per parameter of a matrix product and token, and twelve per channel and pair of positions
    of causal attention.
    """
    layers, _ = decoder_shapes(config)
    matrices = sum(math.prod(a.shape) for a in layers.values() if a.ndim == 3)
    matrices += config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    pairs = length * (length + 1) // 2
    return 6 * matrices * length + 12 * config.num_hidden_layers * width * pairs


def make_row(
    machine: Machine,
    config: DecoderConfig,
    length: int,
    moments: str,
    form: Form,
    planned: MemoryPlan,
) -> dict[str, Any]:
    """Return the row of a form on a GPU."""
    rates = find_rates(machine.target)
    time = step_time(planned.hlo, rates)
    return {
        "name": f"{moments} moments, state on the {form.memory}, {length} tokens, {machine.name}",
        "gpu": machine.name,
        "compiled_for": planned.target.name,
        "tokens": length,
        "moments": moments,
        **form._asdict(),
        "parameters": count_parameters(config),
        "planned_device_bytes": planned.peak_device_bytes,
        "planned_host_bytes": planned.peak_host_bytes,
        "device_limit_bytes": device_limit(machine.target),
        "host_limit_bytes": machine.host_bytes,
        "fits_device": planned.peak_device_bytes <= device_limit(machine.target),
        "fits_host": planned.peak_host_bytes <= machine.host_bytes,
        **traffic(planned),
        "step_seconds": time.seconds,
        "compute_seconds": time.compute_seconds,
        "to_device_seconds": time.to_device_seconds,
        "to_host_seconds": time.to_host_seconds,
        "products_flops": time.total_flops,
        "unknown_kernels": dict(time.unknown_kernels),
        "tokens_per_second": length / time.seconds,
        "peak_share": model_flops(config, length) / time.seconds / rates.flops_of("bf16"),
    }


def mark_chosen(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the row to show of each GPU, length and dtype of moments.

    It is the fastest one that fits, or the offloaded one if none fits.
    """
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        row["chosen"] = False
        cells.setdefault((row["gpu"], row["tokens"], row["moments"]), []).append(row)
    for cell in cells.values():
        fitting = [row for row in cell if row["fits_device"] and row["fits_host"]]
        offloaded = [row for row in cell if row["memory"] == "host"]
        best = min(fitting, key=lambda row: row["step_seconds"]) if fitting else offloaded[0]
        best["chosen"] = True


def plan_model(
    name: str,
    config: DecoderConfig,
    lengths_to_plan: Mapping[str, Sequence[int]],
    machines: Sequence[Machine] = MACHINES,
    cache: Path | None = None,
) -> Result:
    """Plan the steps of a model for all GPUs."""
    rows = []
    cells = [(m, length) for m, lengths in lengths_to_plan.items() for length in lengths]
    for moments, length in cells:
        has_own = (name, moments, length) in OWN_PROGRAMS
        own = [m for m in machines if m.target == "rtx4090" and has_own]
        shared = [m for m in machines if m not in own]
        for form in list_forms(config, length, moments):
            step = abstract_step(config, length, moments, form)
            for target, users in (("rtx4090", own), (COMPILED_FOR, shared)):
                if users:
                    planned = plan_cached(step, target, max(m.host_bytes for m in users), cache)
                    rows += [make_row(m, config, length, moments, form, planned) for m in users]
    return make_result(name, config, rows)


def make_result(name: str, config: DecoderConfig, rows: list[dict[str, Any]]) -> Result:
    """Return the table of a model."""
    mark_chosen(rows)
    stem = name.lower().replace("-", "_").replace(".", "_")
    return Result(
        f"language_model_table_{stem}",
        f"fine-tuning step of {name}, planned",
        {
            "model": name,
            "config": config.to_json(),
            "batch_size": 1,
            "machines": [machine._asdict() for machine in MACHINES],
            "memory_fraction": MEMORY_FRACTION,
            "parameter_bytes": PARAMETER_BYTES,
            "model_flops": {
                str(length): model_flops(config, length)
                for length in dict.fromkeys(row["tokens"] for row in rows)
            },
            "ours": [row["name"] for row in rows],
        },
        rows,
        Bars("planned_device_bytes", "planned device memory of a step [GB]", unit=1e9),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        for name, config in MODELS.items():
            yield plan_model(name, config, PLANNED[name])
    else:
        small = dataclasses.replace(
            QWEN3_8B, vocab_size=16384, hidden_size=256, intermediate_size=512,
            num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        yield plan_model("small", small, {"8-bit": (1024,)}, MACHINES[1:])
