"""Programs whose memory is planned and measured, and an offloaded step whose time is.

Plans run in a process without a GPU, and each measurement in a fresh process, because the peak of a
process cannot be reset.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..memory import list_targets, plan
from ..memory.devices import find_target
from ..ops.batch_norm.sync import sync_batch_norm
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.dense_block.block import DenseLayerParams, dense_block
from ..ops.dense_block.bn_relu_conv import bn_relu_conv
from ..ops.offload.compiled import offload_jit
from ..ops.offload.train_step import OffloadState, offload_train_step
from .checks import median_seconds
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


def measure_peak(name: str) -> int | None:
    """Run a program and return the peak of this process, or None if the device counts no bytes."""
    fun, *shapes = PROGRAMS[name]()
    device = jax.local_devices()[0]
    if device.memory_stats() is None:
        return None
    args = jax.tree.map(lambda s: jax.device_put(np.ones(s.shape, s.dtype), device), shapes)
    jax.block_until_ready(jax.jit(fun)(*args))
    return device.memory_stats()["peak_bytes_in_use"]


def make_step(width: int = 1024, count: int = 12, tokens: int = 4096) -> tuple:
    """Return an offloaded training step and the shapes of its arguments, with their memories."""

    def layer(params, x, key):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    step = offload_train_step(
        lambda others, batch, key: batch["x"],
        layer,
        lambda others, x, batch, key: jnp.mean((x - batch["y"]) ** 2),
        optax.adamw(1e-3),
    )
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(a, kind="device"):
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def on_host(tree):
        return jax.tree.map(lambda a: place(a, "pinned_host" if a.ndim > 1 else "device"), tree)

    params = {"up": shape(count, width, 4 * width), "down": shape(count, 4 * width, width)}
    state: OffloadState = jax.tree.map(place, jax.eval_shape(step.init, on_host(params), {}))
    state = state._replace(layers=on_host(state.layers), layers_state=on_host(state.layers_state))
    x = place(shape(tokens, width))
    return offload_jit(step.step), state, {"x": x, "y": x}


def plan_step(target: str, **sizes: int) -> float:
    """Return the modelled seconds of the offloaded step."""
    return plan(*make_step(**sizes), target=target).step_seconds


def measure_step(**sizes: int) -> float:
    """Return the median seconds of the offloaded step on this device."""
    step, *shapes = make_step(**sizes)
    state, batch = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), shapes
    )

    def run():
        nonlocal state  # the step takes ownership of it
        state, loss, *_ = step(state, batch)
        return state, loss

    return median_seconds(run, repeats=5)
