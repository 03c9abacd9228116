"""Planned memory and modelled time of fine-tuning language models of 8 to 70 billion parameters.

Each model, length of the sequence, dtype of the moments and form is compiled once for each
architecture of the GPUs. The memory of GPUs of one architecture is that of the same program; its
time is modelled with the rates of each GPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, offload_jit, offload_train_step
from effjax.memory import MemoryPlan, find_rates, step_time
from effjax.memory._cache import default_folder
from effjax.memory._compile import open_pipe
from effjax.memory.plan import start_plan
from effjax.memory.targets import find_target
from effjax.models import DecoderConfig, Llama3RopeScaling, decoder_functions, decoder_shapes
from effjax.optimizers import adamw_8bit, in_float32, stochastic_rounding

from .language_model import QWEN3_8B, count_parameters, traffic
from .measure import need_compiler
from .results import Bars, Result, Size

RATE = 1e-5
CLIP_NORM = 1.0
MEMORY_FRACTION = 0.95
MLP_CHUNK = 4096  # positions, of longer sequences
LONG = 65536  # tokens from which the inputs of layers are offloaded in every form
WORKSPACE = 20  # arrays of the size of a layer's input that a step in device memory needs at least
OPTIMIZERS = {
    "float32": lambda: in_float32(optax.adamw(RATE)),
    "8-bit": lambda: adamw_8bit(RATE),
}
# Bytes of a parameter in bfloat16 and of its moments. An 8-bit moment has a float32 scale for each
# block of 256 values.
PARAMETER_BYTES = {"float32": 2 + 8, "8-bit": 2 + 2 + 8 / 256}


class Machine(NamedTuple):
    """A GPU, the target whose program it runs, and the assumed host memory."""

    name: str
    target: str
    compiled_for: str
    host_bytes: int


MACHINES = (
    Machine("RTX 4090", "rtx4090", "rtx4090", 256 * 10**9),
    Machine("H100", "h100", "h100", 1000 * 10**9),
    Machine("GH200", "gh200", "h100", 480 * 10**9),
)

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


class Form(NamedTuple):
    """Where a step keeps its state.

    memory: of parameters and moments, "host" or "device".
    activations: memory of the inputs of the layers.
    mlp_chunk_size: as in `decoder_functions`.
    """

    memory: str
    activations: str
    mlp_chunk_size: int | None


def host_need(config: DecoderConfig, length: int, moments: str) -> int:
    """Return the bytes of parameters, moments and inputs of the layers, which a step keeps."""
    inputs = config.num_hidden_layers * length * config.hidden_size * 2
    return inputs + int(count_parameters(config) * PARAMETER_BYTES[moments])


def list_forms(
    config: DecoderConfig, length: int, moments: str, machines: Sequence[Machine]
) -> list[Form]:
    """Return the forms to plan for one of the machines.

    There is an offloaded form if its bytes fit in host memory, and one in device memory if its
    bytes, and some arrays of the size of a layer's input, fit there.
    """
    chunk = MLP_CHUNK if length > MLP_CHUNK else None
    need = host_need(config, length, moments)
    forms = []
    if any(need <= machine.host_bytes for machine in machines):
        forms.append(Form("host", "host", chunk))
    inputs = config.num_hidden_layers if length < LONG else 0
    need = host_need(config, 0, moments) + (inputs + WORKSPACE) * 2 * length * config.hidden_size
    if any(need <= device_limit(machine) for machine in machines):
        forms.append(Form("device", "device" if inputs else "host", chunk))
    return forms


def device_limit(machine: Machine) -> int:
    """Return the bytes of device memory that a step may use."""
    return int(MEMORY_FRACTION * find_target(machine.target).memory_bytes)


def make_step(config: DecoderConfig, moments: str, form: Form) -> Any:
    """Return (init, step) of `effjax.offload_train_step`."""
    return offload_train_step(
        *decoder_functions(config, mlp_chunk_size=form.mlp_chunk_size),
        optax.chain(OPTIMIZERS[moments](), stochastic_rounding(0)),
        clip_norm=CLIP_NORM, clip_by="previous", weighted_loss=True,
        params_in=form.memory, others_in=form.memory, activations=form.activations,
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


def plan_cached(step: tuple, target: str, host_bytes: int) -> MemoryPlan:
    """Plan a step, with compiled programs on disk, so that an interrupted run loses little."""
    with open_pipe() as pipe:
        return start_plan(
            *step, target=target, memory_fraction=MEMORY_FRACTION, host_memory_bytes=host_bytes,
            cache=default_folder(),
        )(pipe)  # fmt: skip


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
    planned: MemoryPlan | None,
) -> dict[str, Any]:
    """Return the row of a form on a GPU, without a plan if it does not fit in host memory."""
    row = {
        "name": f"{machine.name}, {length} tokens, {moments} moments, state on the {form.memory}",
        "gpu": machine.name,
        "tokens": length,
        "moments": moments,
        **form._asdict(),
        "parameters": count_parameters(config),
        "device_limit_bytes": device_limit(machine),
        "host_limit_bytes": machine.host_bytes,
    }
    if planned is None:
        need = host_need(config, length, moments)
        return row | {"least_host_bytes": need, "fits_device": None, "fits_host": False}
    rates = find_rates(machine.target)
    time = step_time(planned.hlo, rates)
    return row | {
        "planned_device_bytes": planned.peak_device_bytes,
        "planned_host_bytes": planned.peak_host_bytes,
        "fits_device": planned.peak_device_bytes <= device_limit(machine),
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
    lengths: Sequence[int] = LENGTHS,
    machines: Sequence[Machine] = MACHINES,
) -> Result:
    """Plan the steps of a model for all GPUs."""
    rows = []
    targets = dict.fromkeys(machine.compiled_for for machine in machines)
    for length, moments, target in itertools.product(lengths, OPTIMIZERS, targets):
        users = [machine for machine in machines if machine.compiled_for == target]
        forms = list_forms(config, length, moments, users)
        for form in forms:
            step = abstract_step(config, length, moments, form)
            planned = plan_cached(step, target, max(m.host_bytes for m in users))
            rows += [make_row(m, config, length, moments, form, planned) for m in users]
            print(name, rows[-1]["name"], f"{rows[-1]['step_seconds']:.2f} s", flush=True)
        if not any(form.memory == "host" for form in forms):
            form = Form("host", "host", None)
            rows += [make_row(m, config, length, moments, form, None) for m in users]
    mark_chosen(rows)
    stem = name.lower().replace("-", "_").replace(".", "_")
    return Result(
        f"language_model_table_{stem}",
        f"fine-tuning step of {name}, planned",
        {
            "model": name,
            "config": config.to_json(),
            "batch_size": 1,
            "machines": [machine._asdict() for machine in machines],
            "memory_fraction": MEMORY_FRACTION,
            "parameter_bytes": PARAMETER_BYTES,
            "model_flops": {str(length): model_flops(config, length) for length in lengths},
            "ours": [row["name"] for row in rows],
        },
        rows,
        Bars("planned_device_bytes", "planned device memory of a step [GB]", unit=1e9),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        for name, config in MODELS.items():
            yield plan_model(name, config)
    else:
        small = dataclasses.replace(
            QWEN3_8B, vocab_size=16384, hidden_size=256, intermediate_size=512,
            num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        yield plan_model("small", small, (1024,), MACHINES[1:])
