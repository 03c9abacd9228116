"""What a checkpoint holds, wherever the arrays lie."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from effjax import to_device, to_host
from effjax.train.checkpoint import Checkpoints

SHAPE = 512, 256


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_save_holds_what_was_there_when_it_began(tmp_path, mesh4x2, kind):
    """Steps that follow write over the state while it is being written."""
    where = NamedSharding(mesh4x2, P("model"), memory_kind=kind)
    state = [jax.device_put(np.full(SHAPE, number, np.float32), where) for number in range(4)]
    back = to_host if kind == "pinned_host" else to_device

    def step(state):
        return jax.tree.map(lambda a: back(to_device(a) * 0 - 1), state)

    step = jax.jit(step, donate_argnums=0, out_shardings=where)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, best=1)
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        assert all(np.all(np.asarray(a) == -1) for a in state)
        checkpoints.settle()
        saved = checkpoints.restore(state, 1)
    for number, a in enumerate(saved):
        assert a.sharding == where
        np.testing.assert_array_equal(a, np.full(SHAPE, number, np.float32))


def test_restored_on_other_devices(tmp_path, mesh8, mesh4x2):
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"split": jax.device_put(a, NamedSharding(mesh8, P("data"))), "step": np.int32(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, best=1)
        checkpoints.settle()
        where = NamedSharding(mesh4x2, P("model", "data"))
        for like, wanted in (
            (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), where),
            (jax.ShapeDtypeStruct(a.shape, a.dtype), SingleDeviceSharding(jax.devices()[0])),
        ):
            shapes = {"split": like, "step": jax.ShapeDtypeStruct((), np.int32)}
            found = checkpoints.restore(shapes, 1)
            np.testing.assert_array_equal(found["split"], a)
            assert found["split"].sharding == wanted and int(found["step"]) == 3
