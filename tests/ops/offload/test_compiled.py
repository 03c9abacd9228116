"""offload_jit, and the guard against compilers that read the wrong slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import offload_jit, offload_scan, offload_sequential, to_device, to_host
from effjax.ops.offload import compiled
from tests.ops.offload.stacks import inputs, kinds, layer, params


def add_one(state, by=1.0):
    return jax.tree.map(lambda a: to_host(to_device(a) + by), state)


def test_writes_the_state_over_the_old_one():
    state = {"w": to_host(inputs()), "n": to_host(jnp.zeros(3))}
    step = offload_jit(add_one)
    new = step(state)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))
    assert kinds(new) == {"pinned_host"}
    np.testing.assert_array_equal(step(new, 2.0)["n"], 3 * np.ones(3))


def test_results_beside_the_state():
    step = offload_jit(lambda state, x: (state * 2, x.sum(), {"y": x}))
    state, total, rest = step(jnp.ones(2), jnp.arange(3.0))
    assert float(total) == 3 and state.tolist() == [2, 2] and rest["y"].shape == (3,)


def test_without_donation_any_function():
    w = to_host(params())
    gradient = offload_jit(jax.grad(lambda w: offload_scan(layer, w, inputs()).sum()), donate=False)
    assert kinds(gradient(w)) == {"pinned_host"} and not w["a"].is_deleted()


@pytest.mark.parametrize(
    ("match", "step"),
    [
        (r"The state\['w'\] must .* it was float32<host>\[8,8\] and became float32\[8,8\]",
         lambda s: jax.tree.map(to_device, s)),
        (r"became float32<host>\[8\]",
         lambda s: jax.tree.map(lambda a: to_host(to_device(a)[0]), s)),
        (r"must keep its structure, .* as the only or the first result",
         lambda s: (list(s.values()), 1.0)),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_overwritten(match, step):
    """Donating an array of the host for a result on the device would end the process."""
    with pytest.raises(ValueError, match=match):
        offload_jit(step)({"w": to_host(inputs())})
    with pytest.raises(ValueError, match="must consist of arrays with shardings, not 1"):
        offload_jit(step)({"w": 1})


def lower(fun, *args):
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",))


def run(w):
    return offload_scan(layer, w, inputs())


def test_a_compiler_that_reads_the_wrong_slice_is_refused(monkeypatch):
    w = to_host(params())
    monkeypatch.setattr(compiled, "host_slices_are_wrong", lambda: True)
    jax.jit(run).lower(w)  # on a CPU nothing is wrong
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"openxla/xla#46231.*effjax.offload_jit instead"):
            lower(lambda w: run(w), w)
    # Neither does it help that offload_jit has lowered the same function.
    with compiled.allow_guard():
        offload_jit(run, donate=False).trace(w).lower(lowering_platforms=("cuda",))
    with pytest.raises(RuntimeError, match="effjax.offload_jit"):
        lower(run, w)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="effjax.offload_jit"):
        run(w)  # outside of jit


def needed(fun, *args):
    return compiled.needed_options(jax.jit(fun).trace(*args).jaxpr)


def test_or_worked_around(monkeypatch):
    w = to_host(params())
    for fun in (run, jax.jit(run), jax.grad(lambda w: jax.checkpoint(run)(w).sum())):
        for _ in range(2):  # whatever JAX has kept
            monkeypatch.setattr(compiled, "host_slices_are_wrong", lambda: True)
            assert "dynamic-slice-annotator" in needed(fun, w)["xla_disable_hlo_passes"]
            monkeypatch.setattr(compiled, "host_slices_are_wrong", lambda: False)
            options = needed(fun, w)
            assert options and "xla_disable_hlo_passes" not in options
    assert needed(jnp.sin, jnp.ones(3)) == {}


def test_slices_in_a_row_ask_for_their_order():
    w = to_host(params())
    layers = [jax.tree.map(lambda a, i=i: to_host(to_device(a)[i]), w) for i in range(4)]
    options = needed(jax.grad(lambda w: offload_sequential([layer] * 4, w, inputs()).sum()), layers)
    assert options == {"xla_gpu_enable_latency_hiding_scheduler": False}


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    """Those that make it faster; not those that make it right."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compiled, "host_slices_are_wrong", lambda: True)

    used = []

    class Program:
        jaxpr = jax.jit(run).trace(to_host(params())).jaxpr

        def trace(self, *args):
            return self

        lower = trace

        def compile(self, options):
            if compiled._OVERLAP.keys() & options.keys():
                raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'x'")
            used.append(options)
            return jax.jit(jnp.sin).lower(1.0).compile()

    compiled.compile_offloaded(Program())
    assert used == [compiled._WORKAROUND]


def test_inside_of_other_transformations():
    """Under jit or grad it is the function itself; and the configuration of JAX counts."""
    double = offload_jit(lambda x: x * 2.0, donate=False)
    assert float(jax.jit(double)(3.0)) == 6 and float(jax.grad(double)(3.0)) == 2
    assert double(np.float64(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert double(np.float64(3)).dtype == jnp.float64


def test_versions():
    """The first JAX whose XLA has openxla/xla#46308."""
    assert compiled.host_slices_are_wrong() == (jax.__version_info__ < (0, 11, 2))
