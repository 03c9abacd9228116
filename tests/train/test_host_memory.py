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


def test_phases():
    """A run fits in the machine that is asked for: its process, and the largest phase."""
    state, step = (2 * GIB, 10 * GIB), 12 * GIB
    phases = host_memory.host_phases(state, step)
    assert max(phases, key=lambda name: phases[name]) == "step"
    assert min(phases.values()) > state[1]
    for size in (state[1], step):
        machine = host_memory.machine_bytes(state, size)
        assert size < machine <= size + host_memory.PROCESS_BYTES
    assert host_memory.pinnable_of(host_memory.machine_bytes(state, state[1])) == state[1]
    uncopied = host_memory.host_phases(state, step, copies=False)
    assert phases["saving"] - uncopied["saving"] == host_memory.MAX_BYTES_IN_FLIGHT
    assert host_memory.host_phases((3, 2), 5)["saving"] == 2 + 5  # all of a small state
