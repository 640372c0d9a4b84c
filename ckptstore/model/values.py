"""Plain values as msgpack, and back as exactly what they were.

msgpack's own types hold None, bool, int (64 bit), float, str, bytes, list and dict. Everything else is
an *extension*: ext code 1 marks a container kind and stands first in an array
(``[ext(1, "tuple"), item, ...]``); the other codes hold one scalar each (docs/format.md lists them).
Anything not listed here is refused with the path to it: nothing is ever pickled unasked.

Pure and torch-free: torch's small value types are known by name and rebuilt only when torch is there.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from ckptstore.errors import CkptstoreError, DocumentError, UnsupportedValueError
from ckptstore.model.targets import Opaque

PathKey = Any
StatePath = tuple[PathKey, ...]

MAX_DEPTH = 128
MAX_TREE_BYTES = 1 << 30

EXT_CONTAINER: Final = 1
EXT_BIG_INT: Final = 2
EXT_COMPLEX: Final = 3
EXT_BYTEARRAY: Final = 4
EXT_NUMPY_SCALAR: Final = 5
EXT_NAMED: Final = 6  # [kind, text]: path, uuid, decimal, dtype, device, ...
EXT_TENSOR: Final = 7  # [layout index, kind, detail]
EXT_OPAQUE: Final = 8  # [class path, pickle bytes], only with allow_pickle

_DEFAULT_FACTORIES: Final = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, set, tuple)}


@dataclasses.dataclass(slots=True)
class Leaf:
    """A tensor-like value met in a tree: where, and what; `index` is set before packing.

    Attributes:
        path: keys from the root to it.
        value: the live object.
        kind: "torch", "numpy", "bytes", "bytearray" or "str".
        detail: what else is needed to rebuild it (a numpy dtype string), else None.
        index: its row in the layout.
    """

    path: StatePath
    value: Any
    kind: str
    detail: str | None = None
    index: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Composite:
    """A value made of several tensors (sparse, or a tensor subclass): stored by its parts.

    Attributes:
        kind: "sparse" or "subclass".
        head: plain values needed to put it together again.
        parts: the inner tensors by name; they are tensors of their own, under its path.
    """

    kind: str
    head: Any
    parts: dict[str, Any]


LeafOf = Callable[[Any, StatePath], "Leaf | Composite | msgpack.ExtType | Any | None"]


class Container(str):
    """Marks the kind of a container in the plain form; never a user's value."""

    __slots__ = ()


def show_path(path: Sequence[PathKey]) -> str:
    """``optimizer.param_groups[0].hook``: for messages."""
    out = ""
    for key in path:
        if isinstance(key, str) and key.isprintable() and key:
            out += f".{key}" if out else key
        else:
            out += f"[{key!r}]"
    return out or "the state"


def flatten(value: Any, leaf_of: LeafOf, path: StatePath = ()) -> Any:
    """The tree in plain form: msgpack types, markers and :class:`Leaf` objects.

    Args:
        leaf_of: called for every value that is not a plain scalar or container; returns a Leaf to store
            it as a tensor, another object to put in its place (it is flattened in turn), or None.

    Raises:
        UnsupportedValueError: names the path and the type of what cannot be stored.
    """
    if len(path) > MAX_DEPTH:
        raise UnsupportedValueError(
            f"{show_path(path[:6])}... is nested deeper than {MAX_DEPTH} levels, or contains itself",
            path=show_path(path),
        )
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _big_int(value)
    if kind is dict:
        return _flatten_dict(value, leaf_of, path)
    if kind is list:
        return [flatten(item, leaf_of, (*path, i)) for i, item in enumerate(value)]
    if kind is tuple:
        return [Container("tuple"), *(flatten(item, leaf_of, (*path, i)) for i, item in enumerate(value))]
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


def _flatten_dict(value: dict[Any, Any], leaf_of: LeafOf, path: StatePath) -> dict[Any, Any]:
    return {_key(key, path): flatten(item, leaf_of, (*path, key)) for key, item in value.items()}


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
        if factory is not None and _DEFAULT_FACTORIES.get(name) is not factory:
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
        items = [flatten(item, leaf_of, (*path, i)) for i, item in enumerate(value)]
        return [Container("deque"), value.maxlen, items]
    if kind is slice or kind is range:
        parts = (value.start, value.stop, value.step)
        return [Container(kind.__name__), *(flatten(part, leaf_of, path) for part in parts)]
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    if _is_torch(value, "Size"):
        return [Container("torch.Size"), *(int(n) for n in value)]
    hint = None
    if isinstance(value, enum.Enum):
        hint = "save its .name or .value"
    elif _is_torch(value, "Generator"):
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
        if _is_torch(value, name):
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


def _is_torch(value: Any, name: str) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def class_path_of(value: Any) -> str:
    """``module.Class`` of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


# --- bytes ------------------------------------------------------------------------------------


def _default(value: Any) -> Any:
    if type(value) is Leaf:
        if value.index < 0:
            raise AssertionError(f"leaf {show_path(value.path)} has no index")
        return msgpack.ExtType(EXT_TENSOR, _pack([value.index, value.kind, value.detail]))
    if type(value) is Container:
        return msgpack.ExtType(EXT_CONTAINER, value.encode())
    if type(value) is tuple:  # only dict keys and set items get here
        return list(value)
    raise TypeError(f"not in plain form: {type(value)}")


def _pack(plain: Any) -> bytes:
    packed: bytes = msgpack.packb(plain, default=_default, strict_types=True, unicode_errors="surrogatepass")
    return packed


def pack(plain: Any) -> bytes:
    """The plain form of :func:`flatten`, its leaves numbered, as bytes."""
    return _pack(plain)


def encode(value: Any, what: str = "value") -> bytes:
    """A tree without tensors as bytes.

    Raises:
        UnsupportedValueError: something in it cannot be stored, or is a tensor.
    """

    def refuse(item: Any, path: StatePath) -> None:
        if isinstance(item, np.ndarray) or _is_torch(item, "Tensor"):
            raise UnsupportedValueError(
                f"{what}: {show_path(path)} is a tensor; only plain values go here", path=show_path(path)
            )

    return pack(flatten(value, refuse))


TensorOf = Callable[[int, str, "str | None"], Any]
Compose = Callable[[Composite], Any]


def decode(
    data: bytes,
    tensor_of: TensorOf | None = None,
    what: str = "value",
    compose: Compose | None = None,
) -> Any:
    """The tree back.

    Args:
        tensor_of: called with (layout index, kind, detail) for each tensor.
        compose: called with each :class:`Composite`; without it they are returned as such.
        what: names the document in errors.

    Raises:
        DocumentError: `data` is not such a tree; nothing in it was run.
    """
    decoder = _Decoder(tensor_of, what, compose)
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=decoder.ext,
            list_hook=decoder.list,
            object_pairs_hook=decoder.pairs,
            strict_map_key=False,
            use_list=True,
            unicode_errors="surrogatepass",
            max_bin_len=MAX_TREE_BYTES,
            max_str_len=MAX_TREE_BYTES,
        )
        return decoder.checked(value)
    except (CkptstoreError, MemoryError):
        raise
    # Constructors of a dozen types see what may be hostile bytes: each has errors of its own.
    except Exception as error:
        raise DocumentError(f"{what} does not decode: {error!r:.200}") from error


class _Decoder:
    def __init__(self, tensor_of: TensorOf | None, what: str, compose: Compose | None) -> None:
        self._tensor_of = tensor_of
        self._what = what
        self._compose = compose

    def checked(self, value: Any) -> Any:
        """Refuses what may not stand as a value: a marker on its own, msgpack's own timestamps."""
        if type(value) is Container or type(value) is msgpack.Timestamp:
            raise DocumentError(f"{self._what}: {value!r:.60} is no value")
        return value

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        out = {self.checked(key): self.checked(value) for key, value in pairs}
        if len(out) != len(pairs):
            raise DocumentError(f"{self._what}: a map has a key twice")
        return out

    def list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not Container:
            for item in items:
                self.checked(item)
            return items
        kind, rest = items[0], [self.checked(item) for item in items[1:]]
        match str(kind):
            case "tuple":
                return tuple(rest)
            case "OrderedDict":
                return collections.OrderedDict(rest[0])
            case "Counter":
                return collections.Counter(rest[0])
            case "defaultdict":
                factory = _DEFAULT_FACTORIES[rest[0]] if rest[0] else None
                return collections.defaultdict(factory, rest[1])
            case "set":
                return set(rest)
            case "frozenset":
                return frozenset(rest)
            case "deque":
                return collections.deque(rest[1], maxlen=rest[0])
            case "slice":
                return slice(*rest)
            case "range":
                return range(*rest)
            case "sparse" | "subclass":
                composite = Composite(str(kind), rest[0], rest[1])
                return composite if self._compose is None else self._compose(composite)
            case "torch.Size":
                if not all(type(n) is int and 0 <= n < 2**63 for n in rest):
                    raise DocumentError(f"{self._what}: no torch.Size: {rest!r:.60}")
                torch = sys.modules.get("torch")
                return torch.Size(rest) if torch is not None else tuple(rest)
        raise DocumentError(f"{self._what}: unknown container {str(kind)[:40]!r}")

    def ext(self, code: int, data: bytes) -> Any:
        match code:
            case 1:
                return Container(data.decode())
            case 2:
                return int.from_bytes(data, "little", signed=True)
            case 3:
                return complex(np.frombuffer(data, "<c16")[0])
            case 4:
                return bytearray(data)
            case 5:
                text, raw = msgpack.unpackb(data)
                return np.frombuffer(raw, _plain_dtype(text))[0]
            case 6:
                return self._named(*msgpack.unpackb(data, unicode_errors="surrogatepass"))
            case 7:
                if self._tensor_of is None:
                    raise DocumentError(f"{self._what}: a tensor where none may be")
                index, kind, detail = msgpack.unpackb(data)
                return self._tensor_of(int(index), str(kind), detail)
            case 8:
                class_path, payload = msgpack.unpackb(data)
                return Opaque(
                    str(class_path),
                    "it was pickled at save; allow_pickle=True loads it, if you trust where it came from",
                    bytes(payload),
                )
        raise DocumentError(f"{self._what}: unknown extension {code}")

    def _named(self, kind: str, text: Any) -> Any:
        match kind:
            case "datetime":
                when = datetime.datetime.fromisoformat(text[0]).replace(fold=text[1])
                if len(text) > 3:
                    return when.replace(
                        tzinfo=datetime.timezone(when.utcoffset() or datetime.timedelta(), text[3])
                    )
                return when.replace(tzinfo=zoneinfo.ZoneInfo(text[2])) if len(text) > 2 else when
            case "timedelta":
                return datetime.timedelta(*text)
            case "date":
                return datetime.date.fromisoformat(text)
            case "time":
                return datetime.time.fromisoformat(text[0]).replace(fold=text[1])
            case "path":
                return pathlib.Path(text)
            case "PurePosixPath":
                return pathlib.PurePosixPath(text)
            case "PureWindowsPath":
                return pathlib.PureWindowsPath(text)
            case "UUID":
                return uuid.UUID(text)
            case "Decimal":
                return decimal.Decimal(text)
            case "Ellipsis":
                return Ellipsis
            case "numpy.dtype":
                return _plain_dtype(text)
            case "torch.dtype" | "torch.memory_format" | "torch.layout" | "torch.device":
                return self._torch_value(kind, text)
        raise DocumentError(f"{self._what}: unknown value kind {kind[:40]!r}")

    def _torch_value(self, kind: str, text: str) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return Opaque(kind, "torch is not imported here", text)
        if kind == "torch.device":
            return torch.device(text)
        found = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(found, getattr(torch, kind.removeprefix("torch."))):
            return Opaque(kind, f"this torch has no {text}", text)
        return found


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in "biufcmM" or dtype.shape:
        raise ValueError(f"no plain dtype: {text!r:.40}")
    return dtype


def walk(value: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Every leaf of a decoded tree with its path (dicts, lists, tuples, deques are gone through)."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, (list, tuple, collections.deque)) and not _is_torch(value, "Size"):
        for i, item in enumerate(value):
            yield from walk(item, (*path, i))
    else:
        yield path, value
