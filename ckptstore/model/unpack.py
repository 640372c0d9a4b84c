"""Trees back from bytes: as exactly what they were, or a DocumentError; nothing in them is ever run."""

from __future__ import annotations

import collections
import datetime
import decimal
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from ckptstore.errors import CkptstoreError, DocumentError
from ckptstore.model.plain import (
    DEFAULT_FACTORIES,
    MAX_TREE_BYTES,
    Composite,
    Container,
    StatePath,
    is_torch,
)
from ckptstore.model.targets import Opaque

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
                factory = DEFAULT_FACTORIES[rest[0]] if rest[0] else None
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
            case "sparse" | "subclass" | "per_rank":
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
    """Every leaf of a tree with its path (dicts, lists, tuples, deques, per-rank values are gone through).

    A list of shards of one tensor is one leaf.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, Composite) and value.kind == "per_rank":
        yield from walk(value.parts, path)
    elif isinstance(value, (list, tuple, collections.deque)) and not is_torch(value, "Size"):
        if value and getattr(value[0], "is_shard_of_tensor", False):
            yield path, value
            return
        for i, item in enumerate(value):
            yield from walk(item, (*path, i))
    else:
        yield path, value
