"""Plans beside the speed of training steps and the memory of programs that others measured.

llm.q (https://github.com/IST-DASLab/llmq, tables of README.md and commands of its folder
benchmarks) measured one GPU with Qwen2.5 in bfloat16 and sequences of 1024 tokens. It updates the
parameters after 524,288 tokens, and adds up gradients until then. A step is therefore planned here
for one of its batches, with plain SGD, which reads and writes as many bytes as this sum. The
programs are compiled for an H100, and timed with the rates of each GPU.

MaxText's table has a decoder of 16 billion parameters on slices of 256 TPUs v5e, and its script
16b.sh the options: six sequences of 2048 tokens for each chip, every layer recomputed. Each chip
computes the same whatever their number, so the step is planned for four chips and at two depths,
and continued to all layers. The measured time is that of the stated FLOPs at the stated rate; they
are those without recomputation, with half of attention.

The modelled time is that of effjax's programs, which read and write more than llm.q's kernels: it
is not a lower bound of theirs. So the factor of a device is the measured time relative to that of
the products of the step at the peak rate. It is what measured kernels lose, with other work.

JAX's notebook on host offloading prints `memory_analysis()` of five programs on a GPU: arguments,
outputs and temporaries, without aliases. It names neither the GPU nor the versions. Its temporaries
contain a workspace of 4 MiB of cuBLAS, which is larger on Hopper, so the plan is for an A100. The
gradients of parameters in host memory are placed on the device, where the notebook's JAX left them;
newer ones leave them on the host.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from effjax import offload_jit
from effjax.memory import find_rates, plan
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig
from effjax.train.mesh import planning_mesh
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.learner import make_learner
from effjax.train.text.plans import training_step

from .finetune import COMPILED_FOR, plan_step
from .measure import need_compiler
from .results import Result, Row, Size

LLMQ = "https://github.com/IST-DASLab/llmq/tree/b77d969164ace12364abdd7ccf5c3b4608a84b62"
MAXTEXT = (
    "https://github.com/AI-Hypercomputer/maxtext/tree/e591f30cbbf217ed67ef71263ec0538239f9c3b8"
    "/src/maxtext/configs/tpu/v5e"
)
NOTEBOOK = (
    "https://github.com/jax-ml/jax/blob/0aff2ab51e8e5c250f987ce11004a1aced56e22a/"
    "docs/notebooks/host-offloading.ipynb"
)
MIB, GIB = 2**20, 2**30
LENGTH = 1024

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


TPU, CHIPS, TPU_SEQUENCES, TPU_LENGTH = "v5e", 4, 6, 2048
TPU_MODEL = DecoderConfig(
    model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=28672,
    num_hidden_layers=32, num_attention_heads=64, num_key_value_heads=64, head_dim=128,
    dtype="bfloat16",
)  # fmt: skip
# TFLOPs per second and chip on the smallest and the largest number of slices.
TPU_MEASURED = {1: 120, 32: 108}


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


def make_row(name: str, target: str, batch_size: int, measured: float, flops: Any) -> Row:
    """Return the columns of all measured steps, given the FLOPs of the products by dtype."""
    products = sum(count / find_rates(target).flops_of(dtype) for dtype, count in flops.items())
    return {
        "name": f"{name}, {target}",
        "model": name,
        "target": target,
        "batch_size": batch_size,
        "measured_seconds": measured,
        "product_seconds": products,
        "ratio": measured / products,
    }


def plan_measured(measured: Measurement, model: DecoderConfig, length: int = LENGTH) -> Row:
    """Return the row of a measurement, with the modelled speed of a step of as many sequences."""
    step = accumulation_step(model, measured.batch_size, length, measured.options)
    planned = plan_step(step, COMPILED_FOR)
    time, tokens = step_time(planned.hlo, find_rates(measured.target)), length * measured.batch_size
    seconds = tokens / measured.tokens_per_second
    row = make_row(measured.model, measured.target, measured.batch_size, seconds, time.flops)
    return row | {
        "options": measured.options,
        "measured_tokens_per_second": measured.tokens_per_second,
        "tokens_per_second": tokens / time.seconds,
        "step_seconds": time.seconds,
        "planned_device_bytes": planned.peak_device_bytes,
    }


def plan_tpu(model: DecoderConfig, length: int, depths: tuple[int, int] = (1, 2)) -> list[Row]:
    """Return a row for each number of slices."""
    width, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    matrices = 4 * width * heads + 3 * width * model.intermediate_size
    matrices = model.num_hidden_layers * matrices + width * model.vocab_size
    attention = 2 * length * heads * model.num_hidden_layers
    stated = 3 * TPU_SEQUENCES * length * (2 * matrices + attention)  # as MaxText counts
    counts = []
    for depth in depths:
        config = FinetuneConfig(
            max_length=length, batch_size=CHIPS * TPU_SEQUENCES, packing=False, steps=1,
            policy="recompute", mesh=f"fsdp={CHIPS}",
        )  # fmt: skip
        shallow = dataclasses.replace(model, num_hidden_layers=depth)
        planned = plan(*training_step(config, CHIPS, shallow), target=TPU)
        counts.append(step_time(planned.hlo, find_rates(TPU)).flops)
    first, second = counts
    repeats = (model.num_hidden_layers - depths[0]) / (depths[1] - depths[0])
    flops = {dtype: n + repeats * (second[dtype] - n) for dtype, n in first.items()}
    rows = []
    for slices, tflops in TPU_MEASURED.items():
        seconds = stated / (tflops * 1e12)
        row = make_row(f"16B, {256 * slices} chips", TPU, TPU_SEQUENCES, seconds, flops)
        rows.append(row | {"measured_tokens_per_second": TPU_SEQUENCES * length / seconds})
    return rows


def find_factors(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Return the mean, the least and the largest ratio of each GPU."""
    by_target: dict[str, list[float]] = {}
    for row in rows:
        by_target.setdefault(row["target"], []).append(row["ratio"])
    return {
        target: [round(f(ratios), 2) for f in (statistics.mean, min, max)]
        for target, ratios in by_target.items()
    }


class Printed(NamedTuple):
    """A program, and the bytes that were printed; the notebook rounds them to two decimals."""

    name: str
    target: str
    temporaries: float
    total: float
    unit: int


PRINTED = (
    Printed("matrix products in a scan", "a100-80", 17.25, 57.50, MIB),
    Printed("… activations on the host", "a100-80", 6.50, 46.75, MIB),
    Printed("… and parameters", "a100-80", 4.75, 25.00, MIB),
    Printed("four layers, Adam", "a100-80", 2.11, 4.59, GIB),
    Printed("… moments on the host", "a100-80", 1.91, 2.87, GIB),
)


def printed_programs(num_layers: int, width: int, dim: int) -> list[tuple[Any, ...]]:
    """Return the programs, ``(fun, *args)``, in the order of `PRINTED`."""
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    on_device = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    on_host = on_device.with_memory_kind("pinned_host")
    place = lambda tree, where: jax.tree.map(  # noqa: E731
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree
    )

    x = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=on_device)
    shapes = (num_layers, width, 4 * width), (num_layers, 4 * width, width)
    weights = place(tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), on_device)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return checkpoint_name(x, "x") @ w[0] @ w[1], None

    def loading_layer(x: Any, w: Any) -> tuple[Any, None]:
        return layer(x, jax.device_put(w, on_device))

    def grad_of(layer: Any) -> Any:
        return jax.jit(jax.grad(lambda w, x: jax.lax.scan(layer, x, w)[0].sum()))

    offloaded, loaded = (
        jax.remat(f, policy=policy, prevent_cse=False) for f in (layer, loading_layer)
    )

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    matrix = jax.ShapeDtypeStruct((dim, dim), jnp.float32, sharding=on_device)
    params = dict.fromkeys(("w1", "w2", "w3", "w4"), matrix)
    moments = place(jax.eval_shape(optimizer.init, params), on_device)

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))

    def loss(params: Any, inputs: Any) -> Any:
        x = inputs
        for w in params.values():
            x = gelu(x @ w)
        return ((x - inputs) ** 2).mean() + 0.001 * sum((w**2).sum() for w in params.values())

    def step(params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss)(params, inputs)
        updates, state = optimizer.update(grads, jax.device_put(state, on_device), params)
        return optax.apply_updates(params, updates), state

    return [
        (grad_of(layer), weights, x),
        (grad_of(offloaded), weights, x),
        (jax.jit(grad_of(loaded), out_shardings=on_device), place(weights, on_host), x),
        (jax.jit(step, donate_argnums=(0, 1)), params, moments, matrix),
        (
            jax.jit(step, donate_argnums=0, out_shardings=(on_device, on_host)),
            params, place(moments, on_host), matrix,
        ),
    ]  # fmt: skip


def plan_printed(sizes: Sequence[int]) -> list[Row]:
    """Return a row for each program whose memory was printed."""
    rows = []
    for printed, (fun, *args) in zip(PRINTED, printed_programs(*sizes), strict=True):
        planned = plan(fun, *args, target=printed.target)
        total = round(printed.total * printed.unit)
        rows.append({
            "name": printed.name,
            "target": printed.target,
            "unit_bytes": printed.unit,
            "printed_temporary_bytes": round(printed.temporaries * printed.unit),
            "printed_bytes": total,
            "planned_temporary_bytes": planned.device.temporaries,
            "planned_device_bytes": planned.device.total,
            "planned_host_bytes": planned.peak_host_bytes,
            "ratio": planned.device.total / total,
        })  # fmt: skip
    return rows


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    sizes = (10, 256, 7168) if size == "published" else (2, 64, 128)
    yield Result(
        "published_memory",
        "planned memory of programs, and what others printed on GPUs",
        {"sources": [NOTEBOOK]},
        plan_printed(sizes),
        ["The printed bytes are those of the compiler on a GPU, not of its whole memory."],
    )
    need_compiler(TPU)
    if size == "published":
        rows = [plan_measured(measured, MODELS[measured.model]) for measured in MEASURED]
        rows += plan_tpu(TPU_MODEL, TPU_LENGTH)
    else:
        small = dict(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32,
        )  # fmt: skip
        model = dataclasses.replace(MODELS["Qwen2.5-0.5B"], num_hidden_layers=2, **small)
        rows = [plan_measured(MEASURED[0], model, 64)]
        rows += plan_tpu(dataclasses.replace(TPU_MODEL, **small), 256)
    yield Result(
        "published",
        "modelled speed of a step and the one that others measured",
        {
            "sources": [LLMQ, MAXTEXT],
            "compiled_for": COMPILED_FOR,
            "planned_chips": CHIPS,
            "factors": find_factors(rows),
        },
        rows,
        ["Measured by llm.q and MaxText with their own programs; modelled from peak rates."],
    )
