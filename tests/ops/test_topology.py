"""Programs that plain JAX compiles for the devices of a topology, on a machine without them."""

import json
import os
import subprocess
import sys

import pytest

import effjax
from effjax.memory.compiler.packages import find_compiler
from tests.ops.subjects import OPERATORS
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

NAMES = ["deform_conv2d", *(name for name in OPERATORS if name != "deform_conv2d")]
START = """
import json
import sys

folder, *options = json.loads(sys.argv[1])
sys.path.append(folder)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import effjax

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
"""
GRADIENTS = """
from tests.contexts import value_and_grads
from tests.ops.subjects import OPERATORS

names, mesh_axes = options
mesh = None
if mesh_axes:
    mesh = Mesh(np.array(devices), ("i",), axis_types=(getattr(AxisType, mesh_axes),))

def place(tree, spec):
    # Numbers of the subjects are float64, which TPUs emulate.
    sharding = NamedSharding(mesh, spec) if mesh else SingleDeviceSharding(devices[0])
    dtypes = {"float64": jnp.float32, "int64": jnp.int32}

    def shape(a):
        return jax.ShapeDtypeStruct(a.shape, dtypes.get(str(a.dtype), a.dtype), sharding=sharding)

    return jax.tree.map(shape, tree)

for name in names:
    subject = OPERATORS[name]()
    run = jax.jit(lambda params, batch: value_and_grads(subject.op, params, batch, None))
    lower = lambda: run.lower(place(subject.params, P()), place(subject.batch, P("i")))
    if mesh is None:
        with effjax.trace_for_platform("tpu"):
            lowered = lower()
    else:
        lowered = lower()
    text = lowered.as_text()
    assert "@effjax" not in text and "CustomSPMDPartitioning" not in text, name
    lowered.compile()
"""
OFFLOADED_STEP = """
import optax

mesh = Mesh(np.array(devices), ("data",))
device = NamedSharding(mesh, P())
host = device.with_memory_kind("pinned_host")
init, step = effjax.offload_train_step(
    lambda others, batch, key: batch @ others["in"],
    lambda params, x, key: x + jnp.tanh(x @ params["kernel"]),
    lambda others, x, batch, key: ((x - batch) ** 2).mean(),
    optax.adamw(1e-3),
)
stack = {"kernel": jax.ShapeDtypeStruct((6, 256, 256), jnp.float32, sharding=host)}
others = {"in": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=device)}
state = jax.eval_shape(init, stack, others)

def place(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host if a.ndim == 3 else device)

state = jax.tree.map(place, state)
batch = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("data")))
program = effjax.offload_jit(step).trace(state, batch).lower().compile()
memory, layer = program.memory_analysis(), 4 * 256 * 256
assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 3 * 6 * layer
assert memory.temp_size_in_bytes < 24 * layer, memory
"""


def run(program, *options):
    arguments = json.dumps([str(find_compiler("tpu")), *options])
    command = [sys.executable, "-c", START + program, arguments]
    # Not the machine's TPUs, and beside other processes that compile for them.
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_tpu_compiler
@vary(
    ("names", "mesh_axes"),
    [(NAMES[:1], "Explicit"), (NAMES[:1], "Auto"), (NAMES[1:], "Auto"), (NAMES[:1], None)],
    ids=["Explicit", "deform_conv2d", "others", "no mesh"],
)
def test_gradients_compile_for_four_chips(names, mesh_axes):
    """Operators follow the mesh, or `trace_for_platform`, and not the default backend."""
    run(GRADIENTS, names, mesh_axes)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_an_offloaded_step_compiles_for_four_chips():
    """All layers stay on the host, with their optimizer state."""
    run(OFFLOADED_STEP)


def test_an_unknown_platform():
    with pytest.raises(ValueError, match='`platform` .*must be "cpu" or "cuda" or "tpu"'):
        effjax.trace_for_platform("gpu")
