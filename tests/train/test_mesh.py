"""The mesh of a run: its axes, the sharding of arrays, and the collectives of a step."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from effjax.memory import collectives
from effjax.train.errors import TrainError
from effjax.train.images import task as images
from effjax.train.images.config import DenseNetRunConfig
from effjax.train.mesh import (
    FSDP,
    batch_sharding,
    check_batch_size,
    describe_devices,
    gather_params,
    global_batch,
    local_rows,
    make_mesh,
    param_sharding,
    replicated,
)
from tests.tiers import vary
from tests.train import small
from tests.train.text.small import finetune_task, write_base

BOTH = "data=2,fsdp=2"


def mesh_of(axes):
    return make_mesh(axes, jax.devices()[: math.prod(int(part[-1]) for part in axes.split(","))])


@pytest.mark.parametrize(
    ("axes", "shape", "text"),
    [
        (None, {"data": 4}, "4 devices: cpu"),
        (BOTH, {"data": 2, "fsdp": 2}, "fsdp=2"),
        (" fsdp = 2 , data=2", {"data": 2, "fsdp": 2}, "4 devices ("),
    ],
)
def test_axes_by_name(axes, shape, text):
    mesh = make_mesh(axes, jax.devices()[:4])
    assert dict(mesh.shape) == shape and text in describe_devices(mesh)


@pytest.mark.parametrize("axes", ["data=0", "data=4,", "data=2,data=2", "model=4", "data=3"])
def test_rejects_axes(axes):
    message = "multiply" if axes == "data=3" else "data=2,fsdp=4"
    with pytest.raises(TrainError, match=rf"`mesh` .*{message}"):
        make_mesh(axes, jax.devices()[:4])


def test_a_batch_is_split_over_all_devices():
    mesh = mesh_of(BOTH)
    batch = {"x": np.arange(24).reshape(8, 3), "y": np.arange(8)}
    placed = global_batch(batch, 8, mesh)
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, batch))
    assert placed["x"].sharding.shard_shape((8, 3)) == (2, 3)
    assert placed["x"].sharding.is_equivalent_to(batch_sharding(mesh), 2)
    assert local_rows(8, mesh) == slice(0, 8)
    with pytest.raises(TrainError, match=r"`batch_size` \(=6\) .*Use 4"):
        check_batch_size(6, mesh)


@pytest.mark.parametrize(
    ("shape", "stacked", "spec"),
    [
        ((64, 32), False, P("fsdp")),
        ((64, 64), False, P(None, "fsdp")),  # the last of equals
        ((3, 3, 16, 64), False, P(None, None, None, "fsdp")),
        ((63, 34), False, P(None, "fsdp")),  # the first one cannot be split
        ((63, 33), False, P()),
        ((31, 32), False, P()),  # small
        ((), False, P()),
        ((4096, 2, 600), True, P(None, None, "fsdp")),
        ((4096, 8), True, P()),
    ],
)
def test_param_sharding(shape, stacked, spec):
    assert param_sharding(shape, mesh_of(BOTH), stacked=stacked).spec == spec
    assert param_sharding(shape, mesh_of("data=4"), stacked=stacked).spec == P()


def test_gathered_parameters_have_split_gradients():
    mesh = mesh_of(BOTH)
    w = jax.device_put(np.ones((64, 32), np.float32), param_sharding((64, 32), mesh))
    inside: list[Any] = []

    def loss(w):
        w = gather_params({"w": w}, mesh)["w"]
        jax.debug.inspect_array_sharding(w, callback=inside.append)
        return (w**2).sum()

    dw = jax.jit(jax.grad(loss))(w)
    np.testing.assert_array_equal(dw, np.full((64, 32), 2))
    assert dw.sharding.is_equivalent_to(w.sharding, 2)
    assert inside and all(found.is_equivalent_to(replicated(mesh), 2) for found in inside)


def collective_bytes(program, *args) -> dict[str, int]:
    """Return the bytes of a step by kind of collective."""
    found: dict[str, int] = {}
    for one in collectives(program.lower(*args).compile().as_text()):
        found[one.kind] = found.get(one.kind, 0) + one.bytes * one.count
    return found


def split_bytes(shapes) -> int:
    """Return the bytes of all parameters that are split over devices."""
    return sum(
        math.prod(a.shape) * a.dtype.itemsize
        for a in jax.tree.leaves(shapes)
        if FSDP in jax.tree.leaves(tuple(a.sharding.spec))
    )


def test_a_step_on_images_gathers_parameters_and_nothing_else():
    """Each one once. Statistics and gradients are summed."""
    config = DenseNetRunConfig(depth=10, growth_rate=16, batch_size=32, mesh=BOTH, augment=False)
    task = images.prepare(config, jax.devices()[:4], small.dataset())
    shapes = task.shapes()
    found = collective_bytes(task.make_step(), shapes, next(task.batches(0)), jax.random.key(0))
    assert split_bytes(shapes.params) > 0 and set(found) == {"all-gather", "all-reduce"}
    assert found["all-gather"] == split_bytes(shapes.params)


@vary("options", [{}, {"fuse_update": True}])
def test_a_step_on_text_gathers_a_layer_at_a_time(tmp_path, options):
    """Each layer is gathered in the forward pass, and again in the backward pass."""
    pytest.importorskip("tokenizers")
    base = write_base(tmp_path / "base", num_hidden_layers=3, hidden_size=64)
    task = finetune_task(base, devices=4, mesh=BOTH, **options)
    shapes = task.shapes()
    where = jax.tree.map(lambda a: a.sharding, shapes)
    step = jax.jit(task.learner.train_step(), donate_argnums=0, out_shardings=(where, None))
    found = collective_bytes(step, shapes, next(task.batches(0)), jax.random.key(0))
    layers, others = shapes.model.layers, shapes.model.others
    assert set(found) == {"all-gather", "all-reduce"}
    assert found["all-gather"] == 2 * split_bytes(layers) + split_bytes(others)
