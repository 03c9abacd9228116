"""Public functions of the planner, called wrongly: an error names the argument."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest

from effjax import memory
from effjax.ops._common.arguments import describe

X = jax.ShapeDtypeStruct((8,), jnp.float32)
WRONG = None, [1], 3.5, "no such", True


def bad(name, call, *values, **more):
    return [pytest.param(name, call, value, id=f"{name}-{describe(value)}") for value in values]


def planned(**options):
    return memory.plan(lambda x: x + 1, X, **options)


CASES = [
    *bad("fun", lambda v: memory.plan(v, X), *WRONG),
    *bad("target", lambda v: planned(target=v), None, [1], 3.5, "no such", True, ""),
    *bad("num_devices", lambda v: planned(num_devices=v), [1], 3.5, "2", True, 0, -1),
    *bad("memory_fraction", lambda v: planned(memory_fraction=v), None, [1], "x", True, 0, 2),
    *bad("memory_fraction", lambda v: planned(memory_fraction=v), float("nan")),
    *bad("host_memory_bytes", lambda v: planned(host_memory_bytes=v), [1], 3.5, "x", True, 0),
    *bad("in_shardings", lambda v: planned(in_shardings=v), 3.5, "data", True, jax.P("rows")),
    *bad("donate_argnums", lambda v: planned(donate_argnums=v), 3.5, "x", ["x"], True),
    *bad("static_argnums", lambda v: planned(static_argnums=v), 3.5, "x", ["x"], True),
    *bad("compiler_options", lambda v: planned(compiler_options=v), [1], 3.5, "x", True),
    *bad("programs", lambda v: memory.compare(v, X), *WRONG, {}),
    *bad("programs['a']", lambda v: memory.compare({"a": v}, X), None, 3),
    *bad("progress", lambda v: memory.compare({"a": jnp.sin}, X, progress=v), None, [1], 1, "yes"),
    *bad("steps", memory.plan_all, *WRONG, {}, {"a": jnp.sin}, {"a": ()}, {"a": (None, X)}),
    *bad("step_for_batch", memory.max_batch_size, *WRONG),
    *bad("step_for_batch", lambda v: memory.max_batch_size(lambda n: v), *WRONG, ()),
    *bad("start", lambda v: memory.max_batch_size(lambda n: (jnp.sin, X), start=v), *WRONG, 0),
    *bad("multiple_of", lambda v: memory.max_batch_size(jnp.sin, multiple_of=v), *WRONG[1:], 0),
    *bad("step_for_batch", lambda v: memory.data_parallel(v, 2), *WRONG),
    *bad("step_for_batch", lambda v: memory.data_parallel(lambda n: v, 2)(4), *WRONG),
    *bad("num_devices", lambda v: memory.data_parallel(jnp.sin, v), *WRONG, 0),
    *bad("num_devices", memory.mesh_to_plan_for, *WRONG, 0),
    *bad("fun", lambda v: memory.residual_bytes(v, X), *WRONG),
    *bad("has_aux", lambda v: memory.residual_bytes(jnp.sin, X, has_aux=v), None, 1, "yes"),
    *bad("most", lambda v: memory.residual_bytes(jnp.sin, X).plot(most=v), *WRONG, 0),
    *bad("hlo", memory.collectives, None, [1], 3.5, True),
]


@pytest.mark.parametrize(("name", "call", "value"), CASES)
def test_an_error_names_the_argument(monkeypatch, name, call, value):
    monkeypatch.setattr(sys.modules["effjax.memory.plan"], "check_compiler", lambda: None)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"`{name}")):
        call(value)
