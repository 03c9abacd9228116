"""An unpickler that runs nothing: it answers the names that it knows, and refuses all others.

`pickle.load` runs whatever a file asks for. Here the names that plain data needs are answered by
stand-ins, which only collect what they are given.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

_PLAIN = (str, bytes, int, float, bool, type(None))


class Refused(Exception):
    """The name that a pickle asked for."""


class StandIn:
    """Takes a state only where a subclass says how: no attribute of it can be set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"a state for {type(self).__name__}")


def fill(into: Any, items: Iterable[tuple[Any, Any]]) -> None:
    """Puts items into a dict. Keys must be flat: a few bytes hold a tuple of tuples that share so
    many others that its hash, or its text, would never be done."""
    if not isinstance(into, dict):
        raise ValueError("items for what is no dict")
    for key, value in items:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in _PLAIN for part in parts):
            raise Refused("a key that is not plain")
        into[key] = value


def _dict(machine: Any) -> None:
    items, new = machine.pop_mark(), {}
    fill(new, zip(items[::2], items[1::2], strict=True))
    machine.append(new)


def _item(machine: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    fill(machine.stack[-1], [(key, value)])


def _items(machine: Any) -> None:
    items = machine.pop_mark()
    fill(machine.stack[-1], zip(items[::2], items[1::2], strict=True))


def _set(_machine: Any) -> None:
    raise Refused("a set")


def _call(machine: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    if not isinstance(kind, type) or type(arguments) is not tuple:
        raise ValueError("a call of what is no stand-in")
    machine.append(kind(*arguments))


def _bytearray(machine: Any) -> None:
    size = int.from_bytes(machine.read(8), "little")
    machine.append(bytearray(machine.read(size)))


class Unpickler(pickle._Unpickler):
    """Of the pickle that begins where the stream is, and that is taken out of the stream.

    It is `pickle`'s own in Python, as keys of dicts can be looked at before they are hashed; that
    in C allocates what an index or a length in a few bytes asks for, too.

    Args:
        stream: of bytes in memory.
        allowed: what stands for the names (module, name) that a pickle may ask for.
        persistent_load: makes an object of a persistent id; None refuses them.
        encoding: of the strings of Python 2.
    """

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {
        pickle.DICT[0]: _dict,
        pickle.SETITEM[0]: _item,
        pickle.SETITEMS[0]: _items,
        pickle.EMPTY_SET[0]: _set,
        pickle.FROZENSET[0]: _set,
        pickle.REDUCE[0]: _call,
        pickle.BYTEARRAY8[0]: _bytearray,
    }

    def __init__(
        self,
        stream: io.BytesIO,
        allowed: Mapping[tuple[str, str], Any],
        persistent_load: Callable[[Any], Any] | None = None,
        encoding: str = "bytes",
    ):
        self._allowed, self._of_id = allowed, persistent_load
        super().__init__(stream, encoding=encoding)

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise Refused(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._of_id is None:
            raise Refused("a persistent object")
        return self._of_id(pid)
