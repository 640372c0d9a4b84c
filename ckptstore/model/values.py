"""Plain values as msgpack, and back as exactly what they were.

msgpack's own types hold None, bool, int (64 bit), float, str, bytes, list and dict. Everything else is
an *extension*: ext code 1 marks a container kind and stands first in an array
(``[ext(1, "tuple"), item, ...]``); the other codes hold one scalar each (docs/format.md lists them).
Anything not listed here is refused with the path to it: nothing is ever pickled unasked.

Pure and torch-free: torch's small value types are known by name and rebuilt only when torch is there.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable, Collection
from typing import Any

import msgpack
import numpy as np

from ckptstore.errors import UnsupportedValueError
from ckptstore.model.plain import (
    DEFAULT_FACTORIES,
    EXT_BIG_INT,
    EXT_BYTEARRAY,
    EXT_COMPLEX,
    EXT_CONTAINER,
    EXT_NAMED,
    EXT_NUMPY_SCALAR,
    EXT_OPAQUE,
    EXT_TENSOR,
    MAX_DEPTH,
    Composite,
    Container,
    Leaf,
    StatePath,
    class_path_of,
    is_torch,
    show_path,
)

LeafOf = Callable[[Any, StatePath], "Leaf | Composite | msgpack.ExtType | Any | None"]

_AS_THEY_ARE = frozenset({type(None), bool, float})


def flatten(value: Any, leaf_of: LeafOf, path: StatePath = ()) -> Any:
    """The tree in plain form: msgpack types, markers and :class:`Leaf` objects.

    Args:
        leaf_of: called for every value that is not a plain scalar or container; returns a Leaf to store
            it as a tensor, another object to put in its place (it is flattened in turn), or None. If it
            has a method `dict_of_leaves`, that is asked about every dict first, for its plain form or None.

    Raises:
        UnsupportedValueError: names the path and the type of what cannot be stored.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _big_int(value)
    if kind is dict:
        return _flatten_dict(value, leaf_of, path)
    if (kind is list or kind is tuple) and value and getattr(value[0], "is_shard_of_tensor", False):
        found = leaf_of(value, path)
        if isinstance(found, Leaf):
            return found
    if kind is list:
        return _flatten_items(value, leaf_of, path)
    if kind is tuple:
        return [Container("tuple"), *_flatten_items(value, leaf_of, path)]
    found = leaf_of(value, path)
    if isinstance(found, (Leaf, msgpack.ExtType)):
        return found
    if isinstance(found, Composite):
        return [
            Container(found.kind),
            flatten(found.head, leaf_of, path),
            _flatten_dict(found.parts, leaf_of, path),
        ]
    if found is not None:
        return flatten(found, leaf_of, path)
    if kind is str or kind is bytes:
        return value
    return _flatten_special(value, leaf_of, path)


def _flatten_items(value: Collection[Any], leaf_of: LeafOf, path: StatePath) -> list[Any]:
    _check_depth(value, path)
    return [flatten(item, leaf_of, (*path, i)) for i, item in enumerate(value)]


def _flatten_dict(value: dict[Any, Any], leaf_of: LeafOf, path: StatePath) -> dict[Any, Any]:
    _check_depth(value, path)
    at_once = getattr(leaf_of, "dict_of_leaves", None)
    plain: dict[Any, Any] | None = at_once(value, path) if at_once is not None else None
    if plain is not None:
        return plain
    return {
        key if type(key) is str else _key(key, path): flatten(item, leaf_of, (*path, key))
        for key, item in value.items()
    }


def _check_depth(value: Collection[Any], path: StatePath) -> None:
    """That what is in a container at `path` is not too deep."""
    if len(path) >= MAX_DEPTH and value:
        raise UnsupportedValueError(
            f"{show_path(path[:6])}... is nested deeper than {MAX_DEPTH} levels, or contains itself",
            path=show_path(path),
        )


def _key(key: Any, path: StatePath) -> Any:
    """A dict key in plain form; hashable, so containers are tuples here."""
    kind = type(key)
    if key is None or kind in (bool, float, str, bytes):
        return key
    if kind is int:
        return key if -(2**63) <= key < 2**64 else _big_int(key)
    if kind is tuple:
        return (Container("tuple"), *(_key(item, path) for item in key))
    raise UnsupportedValueError(
        f"{show_path(path)} has a key of type {class_path_of(key)} ({key!r}), which cannot be stored",
        path=show_path((*path, key)),
        hint="use str, int, float, bool, bytes, None or tuples of these as keys",
    )


def _flatten_special(value: Any, leaf_of: LeafOf, path: StatePath) -> Any:
    kind = type(value)
    if kind is collections.OrderedDict or kind is collections.Counter:
        name = "OrderedDict" if kind is collections.OrderedDict else "Counter"
        return [Container(name), _flatten_dict(value, leaf_of, path)]
    if kind is collections.defaultdict:
        factory = value.default_factory
        name = "" if factory is None else getattr(factory, "__name__", "?")
        if factory is not None and DEFAULT_FACTORIES.get(name) is not factory:
            raise UnsupportedValueError(
                f"{show_path(path)} is a defaultdict whose factory is {factory!r}; only builtin types can "
                "be stored as factories",
                path=show_path(path),
                hint="save dict(...) of it instead",
            )
        return [Container("defaultdict"), name, _flatten_dict(value, leaf_of, path)]
    if kind in (set, frozenset):
        items = [_key(item, path) for item in value]
        try:
            items = sorted(items)
        except TypeError:
            items = sorted(items, key=lambda item: (type(item).__name__, repr(item)))
        return [Container(kind.__name__), *items]
    if kind is collections.deque:
        return [Container("deque"), value.maxlen, _flatten_items(value, leaf_of, path)]
    if kind is slice or kind is range:
        parts = (value.start, value.stop, value.step)
        return [Container(kind.__name__), *(flatten(part, leaf_of, path) for part in parts)]
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    if is_torch(value, "Size"):
        return [Container("torch.Size"), *(int(n) for n in value)]
    hint = None
    if isinstance(value, enum.Enum):
        hint = "save its .name or .value"
    elif is_torch(value, "Generator"):
        hint = "save generator.get_state(), or give it to TrainState(generators=...)"
    elif callable(value):
        hint = "functions cannot be stored; leave it out"
    raise UnsupportedValueError(
        f"{show_path(path)} is of type {class_path_of(value)}, which cannot be stored without pickle",
        path=show_path(path),
        hint=hint or "store plain values instead, or pass allow_pickle=True to save and to load",
    )


def _scalar(value: Any) -> msgpack.ExtType | None:
    """Single values that have an extension of their own; None for all others."""
    kind = type(value)
    if kind is complex:
        return msgpack.ExtType(EXT_COMPLEX, np.array(value, "<c16").tobytes())
    if kind is bytearray:
        return msgpack.ExtType(EXT_BYTEARRAY, bytes(value))
    if isinstance(value, np.generic) and value.dtype.kind in "biufcmM" and value.dtype.itemsize <= 16:
        dtype = value.dtype.newbyteorder("<")
        if dtype.name not in ("longdouble", "clongdouble", "float128", "complex256"):
            return _named_ext(EXT_NUMPY_SCALAR, dtype.str, np.asarray(value, dtype).tobytes())
    text = _named_text(value)
    return None if text is None else _named_ext(EXT_NAMED, *text)


def _named_text(value: Any) -> tuple[str, Any] | None:
    """(kind, text) of values whose text says all."""
    kind = type(value)
    if kind is datetime.datetime:
        zone = value.tzinfo
        if zone is None:
            return ("datetime", [value.isoformat(), value.fold])
        if isinstance(zone, datetime.timezone):
            offset = zone.utcoffset(None)
            name = zone.tzname(None)
            named = [] if name == datetime.timezone(offset).tzname(None) else [None, name]
            return ("datetime", [value.isoformat(), value.fold, *named])
        if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
            return ("datetime", [value.replace(tzinfo=None).isoformat(), value.fold, zone.key])
        return None
    if kind is datetime.timedelta:
        return ("timedelta", [value.days, value.seconds, value.microseconds])
    if kind is datetime.date:
        return ("date", value.isoformat())
    if kind is datetime.time and value.tzinfo is None:
        return ("time", [value.isoformat(), value.fold])
    if isinstance(value, pathlib.PurePath) and kind.__module__.startswith("pathlib"):
        return ("path" if isinstance(value, pathlib.Path) else kind.__name__, str(value))
    if kind is uuid.UUID or kind is decimal.Decimal:
        return (kind.__name__, str(value))
    if kind is type(Ellipsis):
        return ("Ellipsis", "")
    if isinstance(value, np.dtype) and value.kind in "biufcmM":
        return ("numpy.dtype", value.str)
    for name in ("dtype", "device", "memory_format", "layout"):
        if is_torch(value, name):
            return (f"torch.{name}", str(value))
    return None


def opaque(class_path: str, payload: bytes) -> msgpack.ExtType:
    """What stands in a tree for a value that the caller allowed to be pickled."""
    return msgpack.ExtType(EXT_OPAQUE, _pack([class_path, payload]))


def _named_ext(code: int, kind: str, payload: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, _pack([kind, payload]))


def _big_int(value: int) -> msgpack.ExtType:
    size = (value.bit_length() + 8) // 8
    return msgpack.ExtType(EXT_BIG_INT, value.to_bytes(size, "little", signed=True))


# --- bytes ------------------------------------------------------------------------------------


def _default(value: Any) -> Any:
    if type(value) is Container:
        return msgpack.ExtType(EXT_CONTAINER, value.encode())
    if type(value) is tuple:  # only dict keys and set items get here
        return list(value)
    raise TypeError(f"not in plain form: {type(value)}")


def _packer(default: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    pack: Callable[[Any], bytes] = msgpack.Packer(
        default=default, strict_types=True, unicode_errors="surrogatepass"
    ).pack
    return pack


def _pack(plain: Any) -> bytes:
    return _packer(_default)(plain)


def reference(leaf: Leaf) -> msgpack.ExtType:
    """What stands in a packed tree for a leaf that has been numbered."""
    if leaf.index < 0:
        raise AssertionError(f"leaf {show_path(leaf.path)} has no index")
    return msgpack.ExtType(EXT_TENSOR, _pack([leaf.index, leaf.kind, leaf.detail]))


def pack(plain: Any) -> bytes:
    """The plain form of :func:`flatten`, its leaves numbered, as bytes."""
    return _packer(lambda value: reference(value) if isinstance(value, Leaf) else _default(value))(plain)


def encode(value: Any, what: str = "value") -> bytes:
    """A tree without tensors as bytes.

    Raises:
        UnsupportedValueError: something in it cannot be stored, or is a tensor.
    """

    def refuse(item: Any, path: StatePath) -> None:
        if isinstance(item, np.ndarray) or is_torch(item, "Tensor"):
            raise UnsupportedValueError(
                f"{what}: {show_path(path)} is a tensor; only plain values go here", path=show_path(path)
            )

    return pack(flatten(value, refuse))
