"""Two processes read and write their own parts of a checkpoint."""

import os

import numpy as np

from effjax import convert
from tests.distributed.processes import Group

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from effjax import convert
jax.distributed.initialize({address!r}, 2, process, heartbeat_timeout_seconds=30)
mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
rows, columns, everywhere = (
    NamedSharding(mesh, spec, memory_kind="pinned_host")
    for spec in (P(None, "data"), P(None, None, "data"), P())
)
layers = {{
    "w": jax.ShapeDtypeStruct((3, 8, 20), "float32", sharding=rows),
    "x": jax.ShapeDtypeStruct((3, 6, 8), "float32", sharding=columns),
}}
others = {{"y": jax.ShapeDtypeStruct((5,), "float32", sharding=everywhere)}}
read, written = [], []
loaded = convert.load_checkpoint(
    {folder!r} + "/model", layers, others, progress=lambda *n: read.append(n)
)
convert.save_checkpoint(
    {folder!r} + "/again", *loaded, {{"a": 1}}, max_shard_bytes=2000,
    progress=lambda *n: written.append(n),
)
print(read[-1], written[-1])
"""
FAILING = """
import jax, numpy as np, resource
from jax.sharding import NamedSharding, PartitionSpec as P
from effjax import convert
mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
w = jax.device_put(np.zeros((3, 8), "float32"), NamedSharding(mesh, P(None, "data")))
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if process == {failing}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
try:
    convert.save_checkpoint({folder!r} + "/full", {{"w": w}}, {{}}, {{}})
except (OSError, RuntimeError) as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print(type(error).__name__, error)
"""
SHARDED = 4 * (3 * 8 * 20 + 3 * 6 * 8)  # bytes
REPLICATED = 4 * 5


def test_two_processes(tmp_path):
    rng = np.random.default_rng(0)
    layers = {"w": rng.normal(size=(3, 8, 20)), "x": rng.normal(size=(3, 6, 8))}
    layers = {name: a.astype(np.float32) for name, a in layers.items()}
    others = {"y": np.arange(5, dtype=np.float32)}
    convert.save_checkpoint(tmp_path / "model", layers, others, {"a": 1}, max_shard_bytes=2000)
    with Group() as two:
        ended = two.execute(PROGRAM.format(address=two.address, folder=str(tmp_path)))
        # If one process fails, the other does not wait for it.
        for failing, step in ((1, "write"), (0, "create")):
            program = FAILING.format(failing=failing, folder=str(tmp_path))
            outs = [one.out.splitlines()[-1] for one in two.execute(program)]
            assert "File too large" in outs[failing]
            assert (
                outs[1 - failing] == f"RuntimeError Process {failing} failed to {step} the files."
            )
    assert [one.code for one in ended] == [0, 0], ended
    half, first = SHARDED // 2, SHARDED // 2 + REPLICATED
    assert ended[0].out.splitlines()[-1] == f"({first}, {first}) ({first}, {first})"
    assert ended[1].out.splitlines()[-1] == f"({first}, {first}) ({half}, {half})"
    assert sorted(os.listdir(tmp_path)) == ["again", "model"]
    assert sorted(os.listdir(tmp_path / "again")) == sorted(os.listdir(tmp_path / "model"))
    for file in (tmp_path / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file
