"""A pickle read as data: only what a table names is made, and nothing of the file's is ever called.

It is no general unpickler: it knows the opcodes that pickle protocols 2 to 5 write for plain values and for
objects with a state. A class in the file becomes a :class:`Record` that holds the state as it stands there.
"""

from __future__ import annotations

import collections
import dataclasses
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.errors import DocumentError, UnsupportedValueError

_DATA = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A class by name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What stands for a function or class that is called with plain arguments."""

    make: Callable[..., Any]


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """An object: the name of its class, and its state as pickled (mostly a dict)."""

    kind: str
    state: Any = None


class NotPlainError(Exception):
    """Raised by a :class:`Call` for what it is given and does not make; the message says what that is."""


Find = Callable[[str, str], Any]
"""(module, name) -> a :class:`Kind`, a :class:`Call` or any value; KeyError for what is not allowed."""


class Unpickler:
    """Reads pickles of one file.

    Args:
        what: begins every message.
        find: the table of allowed names.
        persistent: what a persistent id stands for.
        hint: of the error for a name that is not allowed.
    """

    def __init__(
        self,
        what: str,
        find: Find,
        *,
        persistent: Callable[[Any], Any] | None = None,
        hint: str | None = None,
    ) -> None:
        self._what = what
        self._find = find
        self._persistent = persistent
        self._hint = hint
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._operations: Mapping[str, Callable[[Any], object]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "POP": lambda _: self._pop(1),
            "POP_MARK": lambda _: self._to_mark(),
            "TUPLE": lambda _: self._push(tuple(self._to_mark())),
            "LIST": lambda _: self._push(self._to_mark()),
            "DICT": lambda _: self._push(_pairs(self._to_mark())),
            "FROZENSET": lambda _: self._push(frozenset(self._to_mark())),
            "APPEND": lambda _: self._extend(self._pop(1)),
            "APPENDS": lambda _: self._extend(self._to_mark()),
            "SETITEM": lambda _: self._update(self._pop(2)),
            "SETITEMS": lambda _: self._update(self._to_mark()),
            "ADDITEMS": lambda _: self._add(self._to_mark()),
            "GLOBAL": lambda name: self._push(self._global(*name.split(" ", 1))),
            "STACK_GLOBAL": lambda _: self._push(self._global(*self._pop(2))),
            "REDUCE": lambda _: self._reduce(*self._pop(2)),
            "NEWOBJ": lambda _: self._new(*self._pop(2)),
            "BUILD": lambda _: self._build(*self._pop(1)),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "BINGET": lambda number: self._push(self._memo[number]),
            "LONG_BINGET": lambda number: self._push(self._memo[number]),
            "BINPERSID": lambda _: self._persist(*self._pop(1)),
        }

    def load(self, data: bytes) -> Any:
        """What was pickled.

        Raises:
            DocumentError: it is damaged.
            UnsupportedValueError: it names something that is not allowed, or is written in another way.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            for opcode, argument, _ in pickletools.genops(data):
                name = opcode.name
                if name in _DATA:
                    self._stack.append(argument)
                elif name in _TUPLES:
                    self._push(tuple(self._pop(_TUPLES[name])))
                elif name in _CONSTANTS:
                    self._stack.append(_CONSTANTS[name]())
                elif name in self._operations:
                    self._operations[name](argument)
                elif name != "STOP":
                    raise UnsupportedValueError(
                        f"{self._what} uses the pickle operation {name}, which is not read", hint=self._hint
                    )
            (result,) = self._stack
        except (UnsupportedValueError, DocumentError):
            raise
        except NotPlainError as error:
            raise UnsupportedValueError(f"{self._what} holds {error}", hint=self._hint) from error
        except Exception as error:  # a damaged pickle may put anything anywhere
            raise DocumentError(
                f"{self._what} is a damaged pickle: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        return result

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        base = self._marks[-1] if self._marks else 0
        if len(self._stack) - count < base:
            raise DocumentError(f"{self._what} is a damaged pickle: its stack is empty")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _target(self, *kinds: type) -> Any:
        target = self._stack[-1]
        if not isinstance(target, kinds):
            raise DocumentError(f"{self._what} is a damaged pickle: items of a {type(target).__name__}")
        return target

    def _extend(self, items: list[Any]) -> None:
        self._target(list).extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._target(dict)
        for key, item in _pairs(items).items():
            target[key] = item

    def _add(self, items: list[Any]) -> None:
        self._target(set).update(items)

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _global(self, module: str, name: str) -> Any:
        try:
            return self._find(module, name)
        except KeyError:
            raise UnsupportedValueError(
                f"{self._what} names {module}.{name}, which is not loaded"[:400], hint=self._hint
            ) from None

    def _reduce(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Call) or not isinstance(arguments, tuple):
            raise DocumentError(f"{self._what} is a damaged pickle: it calls what is no function")
        self._push(function.make(*arguments))

    def _new(self, kind: Any, arguments: Any) -> None:
        if not isinstance(kind, Kind) or arguments != ():
            raise DocumentError(f"{self._what} is a damaged pickle: it makes objects of what is no class")
        self._push(Record(kind.name))

    def _build(self, state: Any) -> None:
        target = self._target(Record, collections.OrderedDict)
        # What is set on a dict beside its items (`_metadata` of a state dict) is no part of the state.
        if isinstance(target, Record):
            target.state = state

    def _persist(self, name: Any) -> None:
        if self._persistent is None:
            raise DocumentError(f"{self._what} is a damaged pickle: it refers to something outside of it")
        self._push(self._persistent(name))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))
