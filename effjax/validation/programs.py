"""Programs whose memory is planned and measured, and three steps whose time is, too.

Plans run in a process without a GPU, and each measurement in a fresh process, because the peak of a
process cannot be reset.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._slices import Bounds, Rows, create_array
from ..memory import list_targets, plan
from ..memory.devices import find_target
from ..memory.render import format_bytes
from ..memory.search.budget import argument_bytes
from ..models import DecoderConfig
from ..ops.batch_norm.sync import sync_batch_norm
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.dense_block.block import DenseLayerParams, dense_block
from ..ops.dense_block.bn_relu_conv import bn_relu_conv
from ..ops.samplers.deform_conv.api import deform_conv2d
from ..train.host_memory import SLICE_BYTES
from .checks import make_program, median_seconds
from .kernels import LEVELS, Call, make_attention, make_deform_conv, make_roi


def shape(*sizes: int, dtype: str = "float32") -> Any:
    """Return the shape of an argument."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(function: Callable, argnums: tuple[int, ...] = (0,)) -> Callable:
    """Return the gradients of the mean square of a function's result, or of its first result."""

    def loss(*args):
        y = function(*args)
        return jnp.mean(jnp.square(y[0] if isinstance(y, tuple) else y))

    return jax.grad(loss, argnums)


def _matmuls(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _recomputed_matmuls(weights, x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jax.lax.scan(body, x, weights)[0]


def _dense_layers(inputs: int, growth: int, count: int) -> list[DenseLayerParams]:
    return [
        DenseLayerParams(
            shape(c), shape(c), shape(1, 1, c, 4 * growth), shape(4 * growth), shape(4 * growth),
            shape(3, 3, 4 * growth, growth),
        )
        for c in range(inputs, inputs + count * growth, growth)
    ]  # fmt: skip


def _of_kernel(make: Callable[..., Call], **sizes: Any) -> tuple:
    """Return the gradients of an operator that runs a kernel, and the shapes of its arguments."""
    call = make("float32", **sizes)
    function = functools.partial(call.apply, implementation="native")
    gradients = gradient(function, tuple(range(len(call.names))))
    return gradients, *(shape(*a.shape) for a in call.args)


# Each returns a function and the shapes of its arguments. The last three have the names of kernels.
PROGRAMS: dict[str, Callable[[], tuple]] = {
    # The softmax and its input live at the same time.
    "elementwise": lambda: (
        lambda x: jax.nn.softmax(x, axis=0) * x, shape(1 << 14, 1 << 12),
    ),
    "matrix products": lambda: (
        gradient(_matmuls), [shape(2048, 2048)] * 8, shape(8192, 2048),
    ),
    "recomputed matrix products": lambda: (
        gradient(_recomputed_matmuls), shape(8, 2048, 2048), shape(8192, 2048),
    ),
    "sync_batch_norm": lambda: (
        gradient(sync_batch_norm, (0, 1, 2)), shape(32, 64, 64, 256), shape(256), shape(256),
    ),
    "bn_relu_conv": lambda: (
        gradient(bn_relu_conv, (0, 1, 2, 3)), shape(32, 64, 64, 128), shape(128), shape(128),
        shape(3, 3, 128, 64),
    ),
    "dense_block": lambda: (
        gradient(dense_block, (0, 1)), shape(64, 32, 32, 64), _dense_layers(64, 32, 3),
    ),
    "linear_cross_entropy": lambda: (
        gradient(linear_cross_entropy, (0, 1)), shape(8192, 1024), shape(1024, 32768),
        shape(8192, dtype="int32"),
    ),
    "deform_conv2d": lambda: _of_kernel(
        make_deform_conv, batch=8, size=(64, 64), c=128, o=128, masked=False
    ),
    "roi_pool": lambda: _of_kernel(
        make_roi, batch=4, size=(128, 128), c=256, boxes=512, output_size=(7, 7)
    ),
    "ms_deform_attn": lambda: _of_kernel(
        make_attention, batch=4, shapes=LEVELS, queries=5440, heads=8, c=32
    ),
}  # fmt: skip


def find_target_name(device_kind: str) -> str | None:
    """Return the planner's target for this model of GPU, or None."""
    names = (name for name in list_targets() if find_target(name).description == device_kind)
    return next(names, None)


def plan_peak(name: str, target: str) -> int:
    """Return the planned bytes of a program at its peak."""
    return plan(*PROGRAMS[name](), target=target).peak_device_bytes


def make_dense_block(layers: int, batch_size: int) -> tuple:
    """Return the gradients of a dense block on 32 × 32 maps, and the shapes of its arguments."""

    def loss(params, x, weights):
        return jnp.sum(dense_block(x, params, save="features")[0] * weights)

    maps, channels, growth = (batch_size, 32, 32), 24, 12
    weights = shape(*maps, channels + layers * growth)
    params = _dense_layers(channels, growth, layers)
    return jax.jit(jax.value_and_grad(loss, (0, 1))), params, shape(*maps, channels), weights


def make_conv(batch_size: int, size: int, channels: int, implementation: Any) -> tuple:
    """Return a deformable convolution, forward and backward, and its arguments."""
    call = make_deform_conv("float32", batch=batch_size, size=(size, size), c=channels, o=channels)
    conv = functools.partial(deform_conv2d, padding=1, implementation=implementation)
    return make_program(conv, len(call.names)), call.args, call.args[0]


QWEN3_8B = DecoderConfig(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    rope_theta=1e6, dtype="bfloat16",
)  # fmt: skip


def make_finetune(layers: int, tokens: int, is_run: bool = False, **sizes: int) -> tuple:
    """Return the offloaded step of `effjax finetune` for Qwen3-8B, and its arguments.

    The state is that of the first step if the step `is_run`, and otherwise its shapes. `sizes` are
    other sizes of the model, for tests.
    """
    from ..train.text.config import FinetuneConfig
    from ..train.text.plans import planned_learner, training_step

    config = FinetuneConfig(params_in="host", fuse_update=True, max_length=tokens, batch_size=1)
    model = dataclasses.replace(QWEN3_8B, num_hidden_layers=layers, **sizes)
    step, state, batch, _ = training_step(config, model=model)
    if is_run:
        learner = planned_learner(config, model=model)
        state = learner.initial_state(*jax.tree.map(make_array, learner.model_shapes()))
    text = np.random.default_rng(0).integers(model.vocab_size, size=tokens)
    values = {"tokens": text, "labels": text, "positions": np.arange(tokens)}
    batch = {
        name: jax.device_put(np.full(a.shape, values.get(name, 1), a.dtype), a.sharding)
        for name, a in batch.items()
    }
    return step, state, batch, jax.random.key(0)


# The steps of README.md, and their forms.
STEPS: dict[str, Callable[..., tuple]] = {
    "dense_block": make_dense_block, "deform_conv2d": make_conv, "finetune": make_finetune,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "dense_block": {"layers": 48, "batch_size": 64},
    "deform_conv2d": {"batch_size": 8, "size": 56, "channels": 64, "implementation": "xla"},
    "finetune": {"layers": 36, "tokens": 4096},
}


def fit_finetune(host_bytes: int, layers: int, **form: Any) -> int:
    """Return the number of layers, at most `layers`, with which the step fits in host memory."""

    def needed(count: int) -> int:
        _, state, batch, _ = make_finetune(count, **form)
        # The inputs of the layers are in host memory, too.
        return argument_bytes([state], 1)[1] + count * batch["tokens"].size * 2 * width

    width = form.get("hidden_size", QWEN3_8B.hidden_size)
    one, two = needed(1), needed(2)
    if one > host_bytes:
        needs, free = format_bytes(one), format_bytes(host_bytes)
        raise ValueError(f"one layer needs {needs} of host memory, and {free} can be pinned")
    return min(layers, 1 + (host_bytes - one) // (two - one))


def plan_step(name: str, form: dict[str, Any], target: str) -> dict[str, Any]:
    """Return the planned bytes and the modelled seconds of a step, and why it does not fit."""
    planned = plan(*STEPS[name](**form), target=target)
    needs, available = planned.peak_device_bytes, planned.available_bytes
    reason = f"it needs {format_bytes(needs)} of device memory, and has {format_bytes(available)}"
    return {
        "planned_bytes": needs,
        "planned_host_bytes": planned.peak_host_bytes,
        "modelled_seconds": planned.step_seconds,
        "too_large": None if planned.fits else reason,
    }


def make_array(like: Any) -> jax.Array:
    """Return an array of small random numbers, or of zeros for integers, where its shape says."""
    # Products of equal numbers would take less power, and so less time.
    numbers = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(like.dtype)

    def fill(rows: np.ndarray) -> None:
        rows[:] = np.resize(numbers, rows.shape)

    def rows_of(bounds: Bounds) -> Iterator[Rows]:
        count, *others = [last - first for first, last in bounds] or [1]
        size = max(SLICE_BYTES // (math.prod(others) * like.dtype.itemsize), 1)
        for first in range(0, count, size):
            yield first, min(first + size, count), fill

    return create_array(like, rows_of, SLICE_BYTES)


def _prepare(name: str, form: dict[str, Any] | None) -> tuple[Callable, list]:
    """Return a compiled program, or a step in a form, and its arguments."""
    make: Callable = PROGRAMS[name] if form is None else functools.partial(STEPS[name], **form)
    fun, *args = make(is_run=True) if name == "finetune" else make()
    args = jax.tree.map(lambda a: a if isinstance(a, jax.Array) else make_array(a), args)
    return fun if hasattr(fun, "trace") else jax.jit(fun), args


def measure_peak(name: str, form: dict[str, Any] | None = None) -> int | None:
    """Run a program, or a step in a form, and return the peak of this process.

    The result is None if the device counts no bytes.
    """
    device = jax.local_devices()[0]
    if device.memory_stats() is None:
        return None
    run, args = _prepare(name, form)
    jax.block_until_ready(run(*args))
    return device.memory_stats()["peak_bytes_in_use"]


def measure_seconds(name: str, form: dict[str, Any]) -> float:
    """Return the median seconds of a step on this device."""
    run, args = _prepare(name, form)

    def call() -> Any:
        results = run(*args)
        if hasattr(run, "is_offload_jit"):
            args[0] = results[0]  # the step overwrites its state
        return results

    return median_seconds(call)
