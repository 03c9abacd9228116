"""Pinned host memory: XLA takes only so much of it."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import HOST_MEMORY_VARIABLE as VARIABLE
from effjax.memory import host_memory_limit, max_batch_size, plan
from tests.programs import needs_gpu_compiler

GIB = 2**30


def on_host(*shape, devices=1):
    mesh = AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)


def first_row(x):
    return jax.device_put(x[0], jax.memory.Space.Device) + 1


def test_the_limit(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert host_memory_limit() == 64 * GIB
    monkeypatch.setenv(VARIABLE, "512")
    assert host_memory_limit() == 512 * GIB
    for wrong in ("much", "0", "-1", "1.5"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=VARIABLE):
            host_memory_limit()


@functools.cache
def planned():
    return plan(first_row, on_host(65, 2**18, 1024), host_memory_bytes=64 * GIB)


@needs_gpu_compiler
def test_more_than_the_host_has_does_not_fit(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    found = planned()
    assert found.peak_host_bytes == 65 * GIB and not found.fits
    assert "DOES NOT FIT in 68.7 GB (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=64)" in str(found)
    record = found.to_dict()
    assert (record["peak_host_bytes"], record["host_memory_bytes"]) == (65 * GIB, 64 * GIB)
    assert dataclasses.replace(found, host_memory_bytes=65 * GIB).fits

    monkeypatch.setenv(VARIABLE, "2")
    two = plan(first_row, on_host(1, 2**18, 1024, devices=2))
    assert two.host_memory_bytes == two.peak_host_bytes == 2 * GIB and two.fits


@needs_gpu_compiler
def test_the_largest_batch_of_the_host(monkeypatch):
    def plan_of(_, batch):
        host = dataclasses.replace(planned().host, arguments=batch * 2**22)
        return dataclasses.replace(planned(), host=host, host_memory_bytes=100 * 2**22 + 5)

    monkeypatch.setattr(sys.modules["effjax.memory.batch_size"], "plan", plan_of)
    found = max_batch_size(lambda batch: (first_row, batch), start=2)
    assert found.batch_size == 100 and len(found.tried) <= 5
