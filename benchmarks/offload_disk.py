"""Planned memory of the optimizer's update of a large decoder, with its state on disk."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import SingleDeviceSharding

from effjax import offload_jit, stream_update
from effjax.memory import plan
from effjax.ops.offload.disk_files import LayerFile
from effjax.ops.offload.disk_update import LayerPrograms, describe_layers
from effjax.ops.offload.placement import load, write
from effjax.ops.offload.update import LayerStack
from effjax.optimizers import in_float32

from .measure import need_compiler
from .results import Bars, Result, Size

TARGET = "h100"
DISK_BANDWIDTH = 7e9  # bytes per second, of an NVMe drive on four lanes of PCIe 4


class Decoder(NamedTuple):
    """The layers of a decoder with grouped-query attention."""

    layers: int
    width: int
    hidden: int
    key_width: int  # of all heads

    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return bfloat16 parameters in host memory."""
        host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        d, h, k = self.width, self.hidden, self.key_width
        shapes = {
            "query": (d, d), "key": (d, k), "value": (d, k), "out": (d, d),
            "gate": (d, h), "up": (d, h), "down": (h, d), "norms": (2, d),
        }  # fmt: skip
        return {
            name: jax.ShapeDtypeStruct((self.layers, *shape), "bfloat16", sharding=host)
            for name, shape in shapes.items()
        }


LLAMA_70B = Decoder(80, 8192, 28672, 1024)


def plan_update(decoder: Decoder) -> Result:
    """Plan AdamW with bfloat16 parameters and float32 moments."""
    params, tx = decoder.params(), in_float32(optax.adamw(1e-4))
    parameters = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    stream = stream_update(tx)
    host = params["query"].sharding
    state = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host) if a.ndim > 1 else a,
        jax.eval_shape(stream.init, params),
    )
    update = offload_jit(lambda both, grads: stream.update(grads, both[1], both[0]))
    streamed = plan(update, (params, state), params, target=TARGET)
    rows = [
        {
            "name": "effjax.stream_update",
            "planned_device_bytes": streamed.peak_device_bytes,
            "planned_host_bytes": streamed.peak_host_bytes,
        },
        {"name": "effjax.disk_update", **_plan_disk_update(tx, params)},
    ]
    for row in rows:
        row["parameters"] = parameters
    return Result(
        f"offload_disk_{TARGET}",
        f"AdamW of {parameters / 1e9:.1f} billion parameters, planned for {TARGET}",
        {**decoder._asdict(), "dtype": "bfloat16", "target": TARGET},
        rows,
        Bars("planned_host_bytes", "host memory of an update [GB]", unit=1e9),
    )


def _plan_disk_update(tx: Any, params: dict) -> dict[str, float]:
    """Plan the programs of a layer, and add the layers that are read and written meanwhile."""
    layers = LayerStack(tx)
    contents = describe_layers(layers, params)
    index = jax.ShapeDtypeStruct((), "int32")
    on_device = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    w = {
        name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=on_device)
        for name, a in params.items()
    }
    update = LayerPrograms(layers, {}).update_function(contents[0], "global")
    planned = [
        plan(offload_jit(load, donate=False), params, index, target=TARGET),
        plan(
            jax.jit(update, donate_argnums=(0, 2)),
            w,
            w,
            contents[0].arrays,
            None,
            None,
            target=TARGET,
        ),
        plan(offload_jit(write), params, w, index, target=TARGET),
    ]
    of_state, of_layer = _num_bytes(contents[0].arrays), _num_bytes(w)
    files = [LayerFile(1, i, len(contents), 0, 1, c.blocks) for i, c in enumerate(contents)]
    disk = sum(file.offsets[-1] for file in files)
    return {
        # The next layer arrives, and the state of the one before leaves.
        "planned_device_bytes": max(p.peak_device_bytes for p in planned)
        + 2 * of_layer + 2 * of_state,
        # Parameters and gradients. States that are read, loaded, on their way back, and written.
        "planned_host_bytes": 2 * _num_bytes(params) + 4 * of_state,
        "disk_bytes": disk,
        "disk_seconds": 2 * disk / DISK_BANDWIDTH,
    }  # fmt: skip


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    yield plan_update(LLAMA_70B if size == "published" else Decoder(4, 512, 1024, 128))
