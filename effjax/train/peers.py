"""Connections between the processes of a run, beside those of JAX.

JAX's coordinator crashes if its port is in use, and waits if two processes have the same number. A
killed process shows as an error of whatever communicates next, and JAX names the process only after
the heartbeat timeout. Therefore the processes first meet at the address of the coordinator. Process
0 listens there until all others have told it their numbers, and then leaves the port to JAX. The
connections stay open: one that closes without a farewell is that of a process that has ended.
"""

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from .errors import TrainError

JOIN_SECONDS = 300.0  # a cluster may take minutes to start all processes
ANSWER_SECONDS = 10.0  # another program may accept connections and never answer
# Time in which a process that fails for the same reason reports its own error.
GRACE_SECONDS = 0.5


class Connection:
    """A connection that sends and receives JSON objects, one on each line."""

    def __init__(self, sock: socket.socket):
        self._socket, self._file = sock, sock.makefile("r", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send a message, unless the other process has ended."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next message; None if there is none in time or the other process ended."""
        file: TextIO = self._file
        try:
            self._socket.settimeout(seconds)
            message = json.loads(file.readline(4096))
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close the connection, and end a `receive` of another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._file.close()
            self._socket.close()


class Peers:
    """The connections of process 0 to all others, or that of another process to process 0.

    Args:
        process_id: The number of this process.
        connections: The connections, by the number of the other process.

    Attributes:
        ended: A sentence about a process that has ended before the run; None before that.
    """

    def __init__(self, process_id: int, connections: dict[int, Connection]):
        self.process_id, self._connections = process_id, connections
        self.ended: str | None = None
        # Acquired by the thread that reports how this process ends.
        self._changed, self._report = threading.Event(), threading.Lock()

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end(sentence)`, in a thread, if a process ends and this one does not."""
        for process in self._connections:
            threading.Thread(target=self._watch, args=(process, on_end), daemon=True).start()

    def wait_for_end(self) -> str | None:
        """Return the sentence about a process that has ended or does so in a moment."""
        self._changed.wait(GRACE_SECONDS)
        return self.ended

    def leave(self, error: str | None = None) -> None:
        """Tell the others that this process ends, because of an error if there is one."""
        if not self._report.acquire(blocking=False):
            time.sleep(10)  # the watching thread ends this process
        for connection in self._connections.values():
            connection.send(process=self.process_id, error=error)

    def close(self) -> None:
        """Close the connections, as the end of this process does."""
        for connection in self._connections.values():
            connection.close()

    def _watch(self, process: int, on_end: Callable[[str], None]) -> None:
        message = self._connections[process].receive(None)
        if message is not None and message["error"] is None:
            return  # the run has ended
        ended = process if message is None else message["process"]
        error = "" if message is None else message["error"]
        if self.process_id == 0:
            for number, connection in self._connections.items():
                if number != ended:
                    connection.send(process=ended, error=error)
        self.ended = f"process {ended} has ended{error and f': {error}'}"
        self._changed.set()
        if process or message:  # without process 0, JAX soon aborts this process
            time.sleep(GRACE_SECONDS)
        if self._report.acquire(blocking=False):
            on_end(self.ended)


def meet(
    coordinator: str, num_processes: int, process_id: int, seconds: float = JOIN_SECONDS
) -> Peers:
    """Connect to the other processes.

    Args:
        coordinator: HOST:PORT of process 0.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.
        seconds: How long to wait for the others.

    Raises:
        TrainError: The arguments do not fit together or to those of the others, the port is in use,
            or a process did not come in time. All processes that have come raise the same.
    """
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise TrainError(
            f"`--coordinator` (={coordinator}) must be HOST:PORT, with a port from 1 to 65535."
        )
    if not 0 <= process_id < num_processes:
        raise TrainError(
            f"`--process-id` (={process_id}) must be less than `--num-processes` "
            f"(={num_processes}). The processes have the numbers from 0."
        )
    end = time.monotonic() + seconds
    if process_id:
        hello = {"process": process_id, "num_processes": num_processes}
        return Peers(process_id, {0: _connect(host.strip("[]"), int(port), hello, end)})
    connections: list[Connection] = []
    try:
        found = _accept_all(coordinator, int(port), num_processes, end, connections)
    except TrainError as error:
        for connection in connections:
            connection.send(error=str(error))
            connection.close()
        raise
    for connection in found.values():
        connection.send(error=None)
    return Peers(0, found)


def _accept_all(
    coordinator: str, port: int, num_processes: int, end: float, connections: list[Connection]
) -> dict[int, Connection]:
    """Return the connections by process; append all of them to `connections`."""
    found: dict[int, Connection] = {}
    with _listen(coordinator, port) as server:
        while len(found) < num_processes - 1:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                connection = Connection(server.accept()[0])
            except TimeoutError:
                missing = min({*range(1, num_processes)} - found.keys())
                raise TrainError(
                    f"process {missing} has not connected to {coordinator}. Give each process its "
                    "own --process-id, and the same --coordinator and --num-processes to all."
                ) from None
            hello = connection.receive(ANSWER_SECONDS)
            if hello is None or hello.keys() != {"process", "num_processes"}:
                connection.close()  # another program
                continue
            connections.append(connection)
            process = hello["process"]
            if hello["num_processes"] != num_processes:
                raise TrainError(
                    f"`--num-processes` (={hello['num_processes']} in process {process}) is "
                    f"{num_processes} in process 0. Give all processes the same."
                )
            if process in found:
                raise TrainError(
                    f"two processes have `--process-id` (={process}). Give each process its own."
                )
            found[process] = connection
    return found


def _listen(coordinator: str, port: int) -> socket.socket:
    try:
        # At all addresses, as JAX does. Without SO_REUSEPORT, which would share the port with
        # another run.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise TrainError(
            f"`--coordinator` (={coordinator}): port {port} of this machine "
            f"{'is in use' if in_use else f'cannot be used ({error.strerror})'}. Give another "
            "port, and --process-id 0 to one process only."
        ) from None


def _connect(host: str, port: int, hello: dict[str, int], end: float) -> Connection:
    while (left := end - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection((host, port), left))
        except OSError:  # process 0 has not started yet
            time.sleep(0.1)
            continue
        connection.send(**hello)
        # Process 0 ends the wait for the others, so that all processes agree about it.
        answer = connection.receive(left + ANSWER_SECONDS)
        if answer is None:
            connection.close()
            time.sleep(0.1)
            continue
        if answer.get("error", "") is not None:
            connection.close()
            raise TrainError(answer.get("error", f"{host}:{port} belongs to another program."))
        return connection
    raise TrainError(
        f"no process 0 has answered at {host}:{port}. Check --coordinator, and that one process "
        "has --process-id 0."
    )
