"""An unpickler that runs nothing: it answers the names that it knows, and refuses all others.

`pickle.load` runs whatever a file asks for. Here the names that plain data needs are answered by
stand-ins, which only collect what they are given.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any


class Refused(Exception):
    """The name that a pickle asked for."""


class StandIn:
    """Takes a state only where a subclass says how: no attribute of it can be set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"a state for {type(self).__name__}")


class Unpickler(pickle.Unpickler):
    """Of the pickle that begins where the stream is, and that is taken out of the stream.

    Args:
        stream: of bytes in memory.
        allowed: what stands for the names (module, name) that a pickle may ask for.
        persistent_load: makes an object of a persistent id; None refuses them.
        encoding: of the strings of Python 2.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        allowed: Mapping[tuple[str, str], Any],
        persistent_load: Callable[[Any], Any] | None = None,
        encoding: str = "bytes",
    ):
        self._allowed, self._of_id = allowed, persistent_load
        super().__init__(io.BytesIO(_one_pickle(stream)), encoding=encoding)

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise Refused(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._of_id is None:
            raise Refused("a persistent object")
        return self._of_id(pid)


_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}


def _one_pickle(stream: io.BytesIO) -> bytes:
    """Refuses a memo index that no pickle of this length needs: the unpickler's table grows to it.

    `pickletools.genops` would do, but it takes only ASCII in the strings of Python 2's protocol 0.
    """
    start, largest = stream.tell(), 0
    while (code := stream.read(1)) != b".":
        opcode = _OPCODES[code.decode("latin1")]
        if opcode.name == "STRING":
            stream.readline()
        elif opcode.arg is not None:
            argument = opcode.arg.reader(stream)
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
                largest = max(largest, argument)
    data = stream.getbuffer()[start : stream.tell()].tobytes()
    if largest > len(data):
        raise ValueError(f"memo index {largest} in {len(data)} bytes")
    return data
