"""Programs for TPUs, which plain JAX or the planner compiles on a machine without them."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.memory import plan
from effjax.memory.compiler.packages import find_compiler
from tests.ops.subjects import OPERATORS
from tests.programs import needs_tpu_compiler
from tests.tiers import vary

NAMES = ["deform_conv2d", *(name for name in OPERATORS if name != "deform_conv2d")]
START = """
import contextlib
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
from effjax.memory import collectives
from tests.contexts import value_and_grads
from tests.ops.subjects import OPERATORS, OTHERS

names, mesh_axes, is_mapped = options
mesh = None
if mesh_axes:
    mesh = Mesh(np.array(devices), ("i",), axis_types=(getattr(AxisType, mesh_axes),))

def place(tree, spec, lead=()):
    sharding = NamedSharding(mesh, spec) if mesh else SingleDeviceSharding(devices[0])

    def shape(a):
        dtype = jax.dtypes.canonicalize_dtype(a.dtype)  # not float64, which TPUs emulate
        return jax.ShapeDtypeStruct((*lead, *a.shape), dtype, sharding=sharding)

    return jax.tree.map(shape, tree)

for name in names:
    # With Auto axes, arrays do not show that their tokens are divided.
    subject = OPERATORS[name](**{"mesh": mesh} if name == "expert_mlp" and not is_mapped else {})
    run = lambda params, batch: value_and_grads(subject.op, params, batch, None)
    run, lead = (jax.vmap(run, (None, 0)), (4,)) if is_mapped else (run, ())
    # On a mesh, operators follow the devices of their arguments, which vmap hides.
    follow = mesh and not is_mapped
    with contextlib.nullcontext() if follow else effjax.trace_for_platform("tpu"):
        params, batch = place(subject.params, P()), place(subject.batch, P("i"), lead)
        lowered = jax.jit(run).lower(params, batch)
    text = lowered.as_text()
    assert "@effjax" not in text and "CustomSPMDPartitioning" not in text, name
    # Without the maximum of two numbers of samples (adaptive RoI pooling).
    sent = [c for c in collectives(lowered.compile().as_text()) if c.bytes > 8]
    assert {c.kind for c in sent} <= {"all-reduce"}, (name, sent)
    if is_mapped:
        assert not sent
    elif name in OTHERS:
        size = sum(p.size for p in jax.tree.leaves(subject.params))
        assert sum(c.bytes * c.count for c in sent) <= 4 * (size + 1), (name, sent)
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
    ("names", "mesh_axes", "is_mapped"),
    [
        (NAMES[:1], "Explicit", False),
        (NAMES[:1], "Auto", False),
        (NAMES[1:], "Auto", False),
        (NAMES[:1], "Auto", True),
        (NAMES[:1], None, False),
    ],
    ids=["Explicit", "deform_conv2d", "others", "examples", "no mesh"],
)
def test_gradients_compile_for_four_chips(names, mesh_axes, is_mapped):
    """Operators follow the mesh, or `trace_for_platform`, and not the default backend.

    Each chip has its own sequences, images or examples of vmap: gradients of parameters are reduced
    once, and nothing else is sent.
    """
    run(GRADIENTS, names, mesh_axes, is_mapped)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_an_offloaded_step_compiles_for_four_chips():
    """All layers stay on the host, with their optimizer state."""
    run(OFFLOADED_STEP)


@needs_tpu_compiler
def test_planned_stack_is_in_host_memory():
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    params = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32, sharding=host)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)

    def loss(params, x):
        y = effjax.offload_scan(lambda w, x, key: jnp.tanh(x @ w), params, x)
        return jnp.sum(jnp.sin(y))

    p = plan(effjax.offload_jit(jax.grad(loss)), params, x, target="v5e")
    stack, layer = 16 * 4 * 256 * 256, 4 * 256 * 256
    assert p.host.arguments == p.host.outputs == stack
    assert p.device.temporaries < 8 * layer


def test_an_unknown_platform():
    with pytest.raises(ValueError, match='`platform` .*must be "cpu" or "cuda" or "tpu"'):
        effjax.trace_for_platform("gpu")
