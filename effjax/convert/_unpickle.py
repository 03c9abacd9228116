"""Restricted unpickler that maps an allow list of names to stand-ins and rejects all others.

`pickle.load` runs whatever code a file names. This unpickler runs none: a stand-in only stores the
arguments that the pickle passes to it.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from .._files import check

_KEY_TYPES = (str, bytes, int, float, bool, type(None))


class RefusedError(Exception):
    """Error for a pickle that needs more than the allow list. The message names it."""


class StandIn:
    """Base class of stand-ins. Rejects a pickled state unless a subclass accepts it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"a state for {type(self).__name__}")


def set_items(target: Any, items: Iterable[tuple[Any, Any]]) -> None:
    """Add items to a dict. A number or None as a key becomes its `repr` as bytes.

    Raises:
        RefusedError: A key is not a plain value.
        ValueError: A key occurs twice.
    """
    check(isinstance(target, dict), "dict items for another object")
    for key, value in items:
        # A few bytes can encode a tuple that contains its predecessor twice, 60 levels deep.
        # Hashing or printing it would take 2⁶⁰ steps.
        if type(key) not in _KEY_TYPES:
            raise RefusedError("a dict key that is not a plain value")
        text = key if isinstance(key, str | bytes) else _salted(key)
        check(text not in target, f"a dict with two keys {key!r:.120}")
        target[text] = value


def _salted(key: object) -> bytes:
    # The hash of an integer is known, so a file can choose integers for which the search in a dict
    # of n keys takes n steps. The hash of bytes has a random salt.
    return repr(key).encode()


class _Memo(dict):
    """Memo of an unpickler, whose indices the file chooses."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(_salted(index))

    def __setitem__(self, index: int, value: Any) -> None:
        super().__setitem__(_salted(index), value)


# Replacements for opcodes of `pickle._Unpickler`, which passes itself as `machine`. `machine.stack`
# has the values since the last mark. `pop_mark` returns them and restores the stack below the mark.


def _load_dict(machine: Any) -> None:
    items, new = machine.pop_mark(), {}
    set_items(new, zip(items[::2], items[1::2], strict=True))
    machine.append(new)


def _load_setitem(machine: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    set_items(machine.stack[-1], [(key, value)])


def _load_setitems(machine: Any) -> None:
    items = machine.pop_mark()
    set_items(machine.stack[-1], zip(items[::2], items[1::2], strict=True))


def _refuse_set(_machine: Any) -> None:
    raise RefusedError("a set")


def _load_reduce(machine: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    # The stand-ins are the only classes that can be on the stack. pickle would call any callable.
    is_call = isinstance(kind, type) and type(arguments) is tuple
    check(is_call, "a call of an object that is not a stand-in")
    machine.append(kind(*arguments))


def _load_bytearray(machine: Any) -> None:
    # pickle would allocate the size that the file claims before it reads the bytes.
    size = int.from_bytes(machine.read(8), "little")
    machine.append(bytearray(machine.read(size)))


class Unpickler(pickle._Unpickler):
    """Unpickler for one pickle at the current position of a stream.

    Args:
        stream: The bytes. A read must not allocate more than there are.
        allowed: The stand-in of each (module, name) that a pickle may name.
        persistent_load: Returns the object of a persistent id. None refuses persistent ids.
    """

    # The base class is pickle's Python implementation: dict keys must be checked before they are
    # hashed, and the C implementation allocates any index or length that a few bytes ask for.
    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {
        pickle.DICT[0]: _load_dict,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.EMPTY_SET[0]: _refuse_set,
        pickle.FROZENSET[0]: _refuse_set,
        pickle.REDUCE[0]: _load_reduce,
        pickle.BYTEARRAY8[0]: _load_bytearray,
    }

    def __init__(
        self,
        stream: io.BytesIO | io.BufferedReader,
        allowed: Mapping[tuple[str, str], Any],
        persistent_load: Callable[[Any], Any] | None = None,
    ):
        self._allowed, self._load_persistent = allowed, persistent_load
        super().__init__(stream, encoding="utf-8")  # of Python 2's strings
        self.memo = _Memo()

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise RefusedError(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._load_persistent is None:
            raise RefusedError("a persistent object")
        return self._load_persistent(pid)
