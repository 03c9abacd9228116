"""How the processes of a run meet, and notice that another one has ended."""

import contextlib
import queue
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from effjax.train.errors import TrainError
from effjax.train.peers import meet
from tests.distributed.processes import free_port


@pytest.fixture
def meet_all():
    """Yield a function that lets processes meet, and returns their peers or errors in order."""
    with contextlib.ExitStack() as stack:

        def meet_all(*processes, num_processes=None, seconds=20.0):
            address, number = f"localhost:{free_port()}", num_processes or len(processes)

            def run(process):
                try:
                    peers = meet(address, number, process, seconds)
                except TrainError as error:
                    return str(error)
                stack.callback(peers.close)
                return peers

            with ThreadPoolExecutor() as threads:
                return list(threads.map(run, processes))

        yield meet_all


def watch_all(peers):
    """Return a queue for each process, with what it says when another one ends."""
    said = [queue.Queue() for _ in peers]
    for one, sentences in zip(peers, said, strict=True):
        one.watch(sentences.put)
    return said


def test_processes_that_do_not_fit_together(meet_all):
    same = meet_all(0, 1, 1, num_processes=3)
    assert same == ["two processes have `--process-id` (=1). Give each process its own."] * 3
    first, second = meet_all(0, 1, num_processes=3, seconds=1)
    assert first == second and first.startswith("process 2 has not connected to localhost:")
    assert "no process 0 has answered" in meet_all(1, num_processes=2, seconds=0.3)[0]
    address = f"localhost:{free_port()}"
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(meet, address, number, i, 20.0) for i, number in enumerate((2, 3))]
        for run in runs:
            with pytest.raises(TrainError, match=r"=3 in process 1\) is 2"):
                run.result()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_in_use(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with pytest.raises(TrainError, match=f"port {port}"):
            meet(f"localhost:{port}", 2, 0)


@pytest.mark.parametrize(
    ("coordinator", "process", "match"),
    [
        ("localhost", 0, "HOST:PORT"),
        ("localhost:99999", 0, "65535"),
        ("localhost:1234", 2, "--process-id"),
    ],
)
def test_rejects_wrong_arguments(coordinator, process, match):
    with pytest.raises(TrainError, match=match):
        meet(coordinator, 2, process)


def test_another_program_is_ignored():
    address = f"localhost:{(port := free_port())}"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, address, 2, 0, 20.0)
        while True:  # until process 0 listens
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as one:
                one.sendall(b"GET / HTTP/1.1\n")
                break
        second = threads.submit(meet, address, 2, 1, 20.0)
        for peers in (first.result(), second.result()):
            peers.close()
            assert peers.ended is None


@pytest.mark.parametrize(("number", "killed"), [(3, 2), (2, 0)])
def test_a_process_that_is_killed(meet_all, number, killed):
    """Process 0 tells the others which one it was."""
    peers = meet_all(*range(number))
    said = watch_all(peers)
    peers[killed].close()
    for i in {*range(number)} - {killed}:
        assert said[i].get(timeout=20) == f"process {killed} has ended" == peers[i].wait_for_end()


def test_an_error_of_one_process(meet_all):
    """Processes that report the same error do not report the end of another one."""
    peers = meet_all(0, 1, 2)
    said = watch_all(peers)
    peers[1].leave("no such luck")
    peers[2].leave("no such luck")
    assert said[0].get(timeout=20).endswith("has ended: no such luck")
    assert peers[2].wait_for_end() is not None and said[2].empty()


def test_the_end_of_a_run_is_no_error(meet_all):
    peers = meet_all(0, 1)
    said = watch_all(peers)
    peers[1].leave()
    peers[1].close()
    assert peers[0].wait_for_end() is None and said[0].empty()
