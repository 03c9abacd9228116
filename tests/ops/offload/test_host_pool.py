"""A program that needs more pinned host memory than XLA takes: a warning, once a program."""

import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import host_init, offload_jit, to_host
from effjax.ops.offload.compiled import HOST_MEMORY_VARIABLE as VARIABLE
from effjax.ops.offload.compiled import pinned_bytes

GIB = 2**30


def needs(monkeypatch, **sizes):
    """All programs are compiled for a GPU, as far as they know, and need this on each device."""
    names = "argument", "output", "temp", "alias"
    found = {f"host_{name}_size_in_bytes": sizes.get(name, 0) for name in names}
    stats = types.SimpleNamespace(**found)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: stats)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(
    ("sizes", "limit", "bytes_"),
    [
        ({"argument": 65 * GIB, "output": 65 * GIB, "alias": 65 * GIB}, None, 65 * GIB),
        ({"argument": 40 * GIB, "output": 40 * GIB}, None, 80 * GIB),
        ({"argument": GIB, "temp": 1}, 1, GIB + 1),
        ({"argument": 64 * GIB, "output": 64 * GIB, "alias": 64 * GIB}, None, None),
        ({"argument": 65 * GIB}, 512, None),
        ({}, None, None),
    ],
    ids=["state", "gradients", "activations", "fits", "raised", "none"],
)
def test_a_warning_names_bytes_and_variable(monkeypatch, sizes, limit, bytes_):
    needs(monkeypatch, **sizes)
    monkeypatch.delenv(VARIABLE, raising=False)
    if limit is not None:
        monkeypatch.setenv(VARIABLE, str(limit))
    double = offload_jit(lambda x: 2 * x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        double(double(jnp.ones(3)))
    text = rf"needs {bytes_} bytes .* at most {limit or 64} GiB .* set {VARIABLE} "
    assert len(found) == (bytes_ is not None)
    if found:
        with pytest.warns(RuntimeWarning, match=text):
            double(jnp.ones(4))  # another program


def test_of_all_devices(monkeypatch, mesh8):
    """One pool for the GPUs of a process."""
    monkeypatch.setenv(VARIABLE, "7")
    needs(monkeypatch, output=GIB)
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh8, P("data")))
    with pytest.warns(RuntimeWarning, match=rf"needs {8 * GIB} bytes \(8.0 GiB\)"):
        offload_jit(lambda x: 2 * x)(x)
    host = NamedSharding(mesh8, P(), memory_kind="pinned_host")
    with pytest.warns(RuntimeWarning, match=rf"needs {8 * GIB} bytes"):
        host_init(jax.random.normal, jax.random.split(jax.random.key(0), 2), shardings=host)


def test_what_xla_says():
    """It has these names in every version; on a CPU it counts nothing there."""
    program = jax.jit(jnp.sin).lower(to_host(jnp.ones(3))).compile()
    stats = program.memory_analysis()
    for kind in ("argument", "output", "temp", "alias"):
        assert isinstance(getattr(stats, f"host_{kind}_size_in_bytes"), int)
    assert pinned_bytes(program) == 0


def test_no_warning_on_a_cpu(monkeypatch):
    needs(monkeypatch, argument=65 * GIB)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with warnings.catch_warnings(action="error"):
        offload_jit(lambda x: 2 * x)(jnp.ones(3))
