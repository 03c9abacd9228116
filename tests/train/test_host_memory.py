"""The limit of pinned host memory that commands set."""

import pytest

from effjax.train import host_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("environment", "cgroup", "gigabytes"),
    [
        ({}, "max", 96),
        ({}, str(40 * GIB), 36),  # a container
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, "max", 21),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "64"}, "max", 1),
        ({host_memory.VARIABLE: "7"}, str(40 * GIB), 7),
    ],
)
def test_limit(monkeypatch, tmp_path, environment, cgroup, gigabytes):
    for name in (*host_memory._LOCAL_COUNTS, host_memory.VARIABLE):
        monkeypatch.setenv(name, environment.get(name, ""))
    pages = {"SC_PHYS_PAGES": 100 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(host_memory.os, "sysconf", pages.__getitem__)
    (tmp_path / "memory.max").write_text(f"{cgroup}\n")
    size = host_memory.physical_bytes(tmp_path)
    monkeypatch.setattr(host_memory, "physical_bytes", lambda: size)
    assert host_memory.pinnable_bytes() == gigabytes * GIB
