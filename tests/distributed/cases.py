"""Training steps over four devices of one or several processes.

A case is named "operator way"; the way is how the step is run over the devices.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from tests.distributed.processes import DEVICES, ROOT
from tests.ops.offload.stacks import LAYERS, WIDTH, init, layer

BATCH, SIZE, CHANNELS, STEPS = 8, 5, 6, 3
WAYS = "jit", "shard_map", "pmap"


class Case(NamedTuple):
    """A step, `step(state, own_rows(batch)) -> (state, loss)`, its state and its batches."""

    step: Callable
    state: Any
    batches: list[dict[str, np.ndarray]]


def data_mesh(name: str) -> Mesh:
    """Return the mesh of a case: the default one, with Explicit axes, for the network."""
    axis_type = AxisType.Explicit if name == "network" else AxisType.Auto
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("data",), (axis_type,), devices=devices)


def results(cases: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the losses and the final state of each case, by name."""
    arrays = {}
    for name, way in map(str.split, cases):
        mesh = data_mesh(name)
        step, state, batches = CASES[name](way, mesh)
        losses = []
        for batch in batches:
            state, loss = step(state, own_rows(batch, way, mesh))
            losses.append(np.asarray(loss.addressable_data(0)))
        arrays[f"{name} {way} losses"] = np.array(losses)
        for path, a in jax.tree_util.tree_leaves_with_path(whole(state, mesh)):
            # The arrays are replicated, so this process has all of them.
            arrays[f"{name} {way} {jax.tree_util.keystr(path)}"] = np.asarray(a.addressable_data(0))
    return arrays


def whole(tree: Any, mesh: Mesh) -> Any:
    """Replicate arrays over the mesh."""
    kinds = {(a.is_fully_replicated, a.sharding.memory_kind) for a in jax.tree.leaves(tree)}
    if kinds == {(True, "device")}:
        return tree
    return jax.jit(effjax.to_device, out_shardings=NamedSharding(mesh, P()))(tree)


def own_rows(batch: Any, way: str, mesh: Mesh) -> Any:
    """Return the rows of a batch that this process passes to the step."""
    count, index = jax.process_count(), jax.process_index()
    own = jax.tree.map(lambda a: np.split(a, count)[index], batch)
    if way == "pmap":
        return jax.tree.map(lambda a: np.stack(np.split(a, DEVICES // count)), own)
    rows = NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(rows, a), own)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (STEPS, BATCH, SIZE, SIZE, CHANNELS)
    x, w = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    return [{"x": x[i], "w": w[i]} for i in range(STEPS)]


def loss_of(y, batch):
    return jnp.mean(jnp.sin(y) * batch["w"][..., : y.shape[-1]] + 0.3 * y * y)


def normal(key, *shape):
    return 0.3 * jax.random.normal(key, shape)


def batch_norm_params(key):
    return {"scale": 1 + normal(key, CHANNELS), "bias": normal(key, CHANNELS)}


def batch_norm(params, x, axis_name):
    return effjax.sync_batch_norm(x, params["scale"], params["bias"], axis_name=axis_name)[0]


def dense_params(key):
    def one(i):
        a, b = jax.random.split(jax.random.fold_in(key, i))
        c = CHANNELS + 2 * i
        norms = jnp.ones(c), jnp.zeros(c), jnp.ones(4), jnp.zeros(4)
        kernels = normal(a, 1, 1, c, 4), normal(b, 3, 3, 4, 2)
        return effjax.DenseLayerParams(*norms[:2], kernels[0], *norms[2:], kernels[1])

    return [one(0), one(1)]


def dense(params, x, axis_name):
    return effjax.dense_block(x, params, axis_name=axis_name)[0][..., -CHANNELS:]


def deform_params(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "kernel": normal(a, 3, 3, CHANNELS, CHANNELS),
        "offset": normal(b, CHANNELS, 18),
        "mask": normal(c, CHANNELS, 9),
    }


def deform(params, x, axis_name):
    offset, mask = x @ params["offset"], jax.nn.sigmoid(x @ params["mask"])
    return effjax.deform_conv2d(x, offset, params["kernel"], mask, padding=1)


def gradient_descent(op: Callable, way: str, mesh: Mesh) -> Callable:
    """Return `step(params, batch) -> (params, loss)`."""
    axis_name = None if way == "jit" else "data"
    mean = (lambda a: a) if way == "jit" else lambda a: lax.pmean(a, "data")

    def step(params, batch):
        def loss(params):
            value = loss_of(op(params, batch["x"], axis_name), batch)
            return value if way == "pmap" else mean(value)

        value, grads = jax.value_and_grad(loss)(params)
        if way == "pmap":  # gradients are those of the loss of one device
            value, grads = mean(value), mean(grads)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    return over_devices(step, way, mesh)


def over_devices(step: Callable, way: str, mesh: Mesh, jit: Callable = jax.jit) -> Callable:
    """Run `step(state, batch) -> (state, loss)` over all devices, with a replicated state."""
    if way == "jit":
        return jit(step)
    if way == "shard_map":
        specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
        return jit(jax.shard_map(step, mesh=mesh, **specs))
    return jax.pmap(step, "data", in_axes=(None, 0), out_axes=(None, None))


def operator(init_params: Callable, op: Callable, way: str, mesh: Mesh) -> Case:
    made = jax.jit(init_params, out_shardings=NamedSharding(mesh, P()))
    return Case(gradient_descent(op, way, mesh), made(jax.random.key(0)), batches())


def offload_step(way: str, axis_name: str | None, mesh: Mesh) -> Any:
    whole = NamedSharding(mesh, P())

    def gathered(w, x, key):
        # Without the constraint XLA would leave the layer split and exchange activations.
        return layer(lax.with_sharding_constraint(w, whole) if way == "jit" else w, x, key)

    mean = (lambda a: a) if axis_name is None else lambda a: lax.pmean(a, axis_name)
    # In pmap, gradients are those of the loss of one device.
    own = axis_name is not None and way == "pmap"
    average = optax.stateless(lambda grads, params: mean(grads)) if own else optax.identity()
    return effjax.offload_train_step(
        lambda others, batch, key: batch["x"] @ others["in"],
        gathered,
        lambda others, x, batch, key: mean(loss_of(x @ others["out"], batch)),
        optax.chain(average, optax.adam(1e-2)),
        params_in="device" if way == "pmap" else "host",
    )


def offloaded(way: str, mesh: Mesh) -> Case:
    """Return a case whose stack is in host memory, split under jit and replicated otherwise."""
    on = functools.partial(NamedSharding, mesh)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    shapes = {"in": (CHANNELS, WIDTH), "out": (WIDTH, CHANNELS)}
    others = lambda key: {name: normal(key, *shape) for name, shape in shapes.items()}  # noqa: E731
    others = jax.jit(others, out_shardings=on(P()))(jax.random.key(1))
    if way == "pmap":
        layers = jax.jit(jax.vmap(init), out_shardings=on(P()))(keys)
    else:
        spec = P(None, "data") if way == "jit" else P()
        layers = effjax.host_init(init, keys, shardings=on(spec, memory_kind="pinned_host"))
    # There is no axis outside of the step.
    state = offload_step(way, None, mesh).init(layers, others)
    step = offload_step(way, None if way == "jit" else "data", mesh).step
    step = lambda *args, step=step: step(*args)[:2]  # noqa: E731
    return Case(over_devices(step, way, mesh, effjax.offload_jit), state, batches())


def digits() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(STEPS, BATCH, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(10, size=(STEPS, BATCH)).astype(np.int32)
    return [{"image": images[i], "label": labels[i]} for i in range(STEPS)]


@functools.cache
def notebook() -> dict[str, Any]:
    """Return the names that the cells tagged `network` of the quickstart notebook define."""
    names: dict = {"__name__": "network"}
    path = ROOT / "notebooks" / "quickstart.ipynb"
    for cell in json.loads(path.read_text())["cells"]:
        if "network" in cell["metadata"].get("tags", ()):
            exec(compile("".join(cell["source"]), path, "exec"), names)
    return names


def network(way: str, mesh: Mesh) -> Case:
    """Return a small version of the network of the notebook, in jit or shard_map.

    The optimizer is not Adam: the gradients of biases before a norm are rounding errors, which Adam
    would scale up to the size of the others.
    """
    own, tx = notebook(), optax.sgd(0.01, momentum=0.9)
    sizes = own["Sizes"](stem=4, growth=2, dense=(1, 1), patch=1, width=8, heads=2, layers=2)
    state, step = own["make_training"](sizes, tx, way, mesh)
    return Case(step, state, digits())


OPERATORS = {
    "batch_norm": functools.partial(operator, batch_norm_params, batch_norm),
    "dense_block": functools.partial(operator, dense_params, dense),
    "deform_conv": functools.partial(operator, deform_params, deform),
    "offload": offloaded,
}
CASES = OPERATORS | {"network": network}
