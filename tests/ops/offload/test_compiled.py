"""offload_jit, its guard against a bug of XLA, and its warning about pinned memory."""

import types
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import host_init, offload_jit, offload_scan, offload_sequential, to_device, to_host
from effjax.ops.offload import backends, compiled
from effjax.ops.offload.compiled import HOST_MEMORY_VARIABLE as VARIABLE
from tests.ops.offload.stacks import inputs, kinds, layer, params


def add_one(state, by=1.0):
    return jax.tree.map(lambda a: to_host(to_device(a) + by), state)


def test_offload_jit_donates_state():
    state = {"w": to_host(inputs()), "n": to_host(jnp.zeros(3))}
    step = offload_jit(add_one)
    new = step(state)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))
    assert kinds(new) == {"pinned_host"}
    np.testing.assert_array_equal(step(new, by=2.0)["n"], 3 * np.ones(3))


def test_offload_jit_returns_other_results():
    class Result(NamedTuple):
        state: Any
        total: Any
        rest: Any

    step = offload_jit(lambda state, x: Result(state * 2, x.sum(), {"y": x, "none": None}))
    result = step(jnp.ones(2), jnp.arange(3.0))
    assert isinstance(result, Result)
    assert result.state.tolist() == [2, 2] and result.total == 3
    assert result.rest["y"].shape == (3,) and result.rest["none"] is None


def test_offload_jit_without_donation():
    w = to_host(params())
    gradient = offload_jit(jax.grad(lambda w: offload_scan(layer, w, inputs()).sum()), donate=False)
    assert kinds(gradient(w)) == {"pinned_host"} and not w["a"].is_deleted()


@pytest.mark.parametrize(
    ("match", "step"),
    [
        (r"`state`\['w'\] must have the type float32<host>", lambda s: jax.tree.map(to_device, s)),
        ("`state` must have the structure", lambda s: (list(s.values()), 1.0)),
    ],
)
def test_rejects_state_that_cannot_be_donated(match, step):
    """Donating a host array for a result on the device would abort the process."""
    with pytest.raises(ValueError, match=match):
        offload_jit(step)({"w": to_host(inputs())})


# JAX 0.11.2 is the first version with openxla/xla#46308.
WRONG, CORRECT = (0, 11, 1), (0, 11, 2)


def lower(fun, *args):
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",))


def run(w):
    return offload_scan(layer, w, inputs())


def test_rejects_compiler_with_wrong_host_slices(monkeypatch):
    w = to_host(params())
    monkeypatch.setattr(jax, "__version_info__", WRONG)
    jax.jit(run).lower(w)  # on a CPU nothing is wrong
    for _ in range(2):
        with pytest.raises(RuntimeError, match="openxla/xla#46231.*effjax.offload_jit"):
            lower(lambda w: run(w), w)
    # Lowering the same function with offload_jit does not disable the guard.
    with backends.allow_guard():
        offload_jit(run, donate=False).trace(w).lower(lowering_platforms=("cuda",))
    with pytest.raises(RuntimeError):
        lower(run, w)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError):
        run(w)  # outside of jit


def needed(fun, *args):
    return backends.needed_options(jax.jit(fun).trace(*args).jaxpr)


def test_offload_jit_works_around_wrong_host_slices(monkeypatch):
    w = to_host(params())
    for fun in (run, jax.jit(run), jax.grad(lambda w: jax.checkpoint(run)(w).sum())):
        for _ in range(2):  # with JAX's caches empty and full
            monkeypatch.setattr(jax, "__version_info__", WRONG)
            assert "dynamic-slice-annotator" in needed(fun, w)["xla_disable_hlo_passes"]
            monkeypatch.setattr(jax, "__version_info__", CORRECT)
            options = needed(fun, w)
            assert options and "xla_disable_hlo_passes" not in options
    assert needed(jnp.sin, jnp.ones(3)) == {}


def test_sequential_disables_latency_hiding_scheduler():
    w = to_host(params())
    layers = [jax.tree.map(lambda a, i=i: to_host(to_device(a)[i]), w) for i in range(4)]
    options = needed(jax.grad(lambda w: offload_sequential([layer] * 4, w, inputs()).sum()), layers)
    assert options == {"xla_gpu_enable_latency_hiding_scheduler": False}


def test_unknown_performance_options_are_omitted(monkeypatch):
    """Options needed for correctness are kept."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", WRONG)

    used = []

    class Program:
        jaxpr = jax.jit(run).trace(to_host(params())).jaxpr

        def trace(self, *args):
            return self

        lower = trace

        def compile(self, options):
            if backends._OVERLAP.keys() & options.keys():
                raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'x'")
            used.append(options)
            return jax.jit(jnp.sin).lower(1.0).compile()

    compiled.compile_offloaded(Program())
    assert used == [backends._WORKAROUND]


def test_offload_jit_inside_transformations():
    """Under jit or grad, offload_jit is the function itself and follows JAX's configuration."""
    double = offload_jit(lambda x: x * 2.0, donate=False)
    assert float(jax.jit(double)(3.0)) == 6 and float(jax.grad(double)(3.0)) == 2
    assert double(np.float64(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert double(np.float64(3)).dtype == jnp.float64


GIB = 2**30


def needs(monkeypatch, backend="gpu", **sizes):
    """Pretend that all programs are compiled for a backend and need these bytes on each device."""
    names = "argument", "output", "temp", "alias"
    sizes = {f"host_{name}_size_in_bytes": sizes.get(name, 0) for name in names}
    stats = types.SimpleNamespace(**sizes)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: stats)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)


@pytest.mark.parametrize(
    ("sizes", "limit", "bytes_"),
    [
        ({"argument": 65 * GIB, "output": 65 * GIB, "alias": 65 * GIB}, None, 65 * GIB),
        ({"argument": GIB, "temp": 1}, 1, GIB + 1),
        ({"argument": 64 * GIB, "output": 64 * GIB, "alias": 64 * GIB}, None, None),
        ({"argument": 65 * GIB}, 512, None),
        ({"argument": 65 * GIB, "backend": "cpu"}, None, None),
    ],
    ids=["state", "activations", "fits", "raised", "cpu"],
)
def test_warns_about_pinned_memory_once_per_program(monkeypatch, sizes, limit, bytes_):
    needs(monkeypatch, **sizes)
    monkeypatch.delenv(VARIABLE, raising=False)
    if limit is not None:
        monkeypatch.setenv(VARIABLE, str(limit))
    double = offload_jit(lambda x: 2 * x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        double(double(jnp.ones(3)))
    text = rf"needs {bytes_} bytes .* at most {limit or 64} GiB .* set {VARIABLE}="
    assert len(caught) == (bytes_ is not None)
    if caught:
        assert caught[0].filename == __file__
        with pytest.warns(RuntimeWarning, match=text):
            double(jnp.ones(4))  # another program


def test_pinned_memory_is_summed_over_devices(monkeypatch, mesh8):
    """The GPUs of a process share one pool."""
    monkeypatch.setenv(VARIABLE, "7")
    needs(monkeypatch, output=GIB)
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh8, P("data")))
    with pytest.warns(RuntimeWarning, match=rf"needs {8 * GIB} bytes \(8.0 GiB\)"):
        offload_jit(lambda x: 2 * x)(x)
    host = NamedSharding(mesh8, P(), memory_kind="pinned_host")
    with pytest.warns(RuntimeWarning, match=rf"needs {8 * GIB} bytes"):
        host_init(jax.random.normal, jax.random.split(jax.random.key(0), 2), shardings=host)


def test_memory_analysis_has_host_sizes():
    """The names are the same in every version of JAX; on a CPU, the sizes are zero."""
    program = jax.jit(jnp.sin).lower(to_host(jnp.ones(3))).compile()
    stats = program.memory_analysis()
    for kind in ("argument", "output", "temp", "alias"):
        assert isinstance(getattr(stats, f"host_{kind}_size_in_bytes"), int)
    assert compiled.pinned_bytes(program) == 0
