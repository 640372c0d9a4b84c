"""A reader of the store format, written from docs/format.md alone: it imports nothing of the library.

Slow and small on purpose. Tensors come back as :class:`Array` (bytes and what the format says of them),
torch's own value types as :class:`Named`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import itertools
import json
import math
import pathlib
import re
import struct
import unicodedata
import uuid
import zoneinfo

import blake3
import msgpack
import numpy as np

DTYPES = {
    **{1: ("bool", 1), 2: ("uint8", 1), 3: ("int8", 1), 4: ("uint16", 2), 5: ("int16", 2), 6: ("uint32", 4)},
    **{7: ("int32", 4), 8: ("uint64", 8), 9: ("int64", 8), 10: ("float16", 2), 11: ("bfloat16", 2)},
    **{12: ("float32", 4), 13: ("float64", 8), 14: ("complex32", 4), 15: ("complex64", 8)},
    **{16: ("complex128", 16), 17: ("float8_e4m3fn", 1), 18: ("float8_e4m3fnuz", 1)},
    **{19: ("float8_e5m2", 1), 20: ("float8_e5m2fnuz", 1), 21: ("float8_e8m0fnu", 1)},
    22: ("float4_e2m1fn_x2", 1),
}
KINDS = ("torch", "numpy", "bytes", "bytearray", "str")
ATTEMPT = re.compile(r"([0-9A-HJKMNP-TV-Z]{26})-(-?[0-9]{1,19})-([0-9]{1,10})")
OBJECT = re.compile(
    r"(chunks|packs)/([0-9a-f]{2})/([0-9a-f]{64})\.([0-9A-HJKMNP-TV-Z]{26}--?[0-9]{1,19}-[0-9]{1,10})\.([0-9]{1,10})"
)
FACTORIES = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, set, tuple)}


class FormatError(Exception):
    """What a reader must reject."""


class TooNewError(FormatError):
    """Written by a newer release."""


@dataclasses.dataclass(frozen=True)
class Array:
    kind: str
    dtype: str
    shape: tuple
    detail: str | None
    data: bytes
    row: int


@dataclasses.dataclass(frozen=True)
class Named:
    kind: str
    text: object


@dataclasses.dataclass(frozen=True)
class Made:
    """A sparse tensor or subclass, by its parts."""

    kind: str
    head: object
    parts: dict


class Mark(str):
    """A container's kind."""


def require(good, why):
    if not good:
        raise FormatError(why)


def digest(data):
    return blake3.blake3(data).digest()


def run_key(name):
    text = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:40].strip("-") or "run"
    return f"{slug}-{digest(name.encode('utf-8', 'surrogatepass')).hex()[:16]}"


# --- 3: documents -----------------------------------------------------------------------------


def unpack(data, **options):
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", **options)
    except (ValueError, TypeError, msgpack.UnpackException, LookupError, ArithmeticError) as error:
        raise FormatError(f"does not decode: {error!r}") from error


def field(body, name, *types):
    value = body.get(name)
    require(type(value) in types, f"field {name} is missing or of another type")
    return value


def open_document(data, *kinds):
    require(len(data) <= 64 << 20, "too long")
    envelope = unpack(data)
    require(isinstance(envelope, dict), "not a map")
    number = field(envelope, "format", int)
    if number > 1:
        raise TooNewError(f"format {number}")
    body = field(envelope, "body", bytes)
    require(number == 1 and field(envelope, "digest", bytes) == digest(body), "the digest does not match")
    require(envelope.get("kind") in kinds, f"a {envelope.get('kind')!r} may not stand here")
    content = unpack(body)
    require(isinstance(content, dict), "the body is not a map")
    return envelope["kind"], content


# --- 5: tables --------------------------------------------------------------------------------


def columns(data, **expected):
    require(len(data) >= 8, "cut short")
    magic, length = struct.unpack_from("<4sI", data)
    require(magic == b"CKT1" and length <= 1 << 20 and 8 + length <= len(data), "not a table")
    found = {}
    position = 8 + length
    for name, dtype, count in unpack(data[8:position]):
        require(
            dtype in ("|u1", "<u2", "<u4", "<u8", "<i8") and name not in found and count >= 0,
            f"column {name}",
        )
        position += -position % 8
        end = position + count * int(dtype[-1])
        require(end <= len(data), f"column {name} is cut short")
        found[name] = np.frombuffer(data[position:end], dtype)
        require(name not in expected or dtype == expected[name], f"column {name} is {dtype}")
        position = end
    require(position == len(data), "bytes after the last column")
    require(set(expected) <= set(found), "a column is missing")
    return {name: found[name].tolist() for name in expected}


def texts(table, name):
    raw, ends = bytes(table[f"{name}_text"]), table[f"{name}_ends"]
    starts = [0, *ends][: len(ends)]
    require(all(a <= b for a, b in zip(starts, ends, strict=True)), "text positions")
    require((ends[-1] if ends else 0) == len(raw), "text positions")
    return [raw[a:b].decode("utf-8", "surrogatepass") for a, b in zip(starts, ends, strict=True)]


TEXT = {"text": "|u1", "ends": "<i8"}


def text_columns(*names):
    return {f"{name}_{part}": dtype for name in names for part, dtype in TEXT.items()}


# --- 7: the grid ------------------------------------------------------------------------------


def cell_of(shape, itemsize, chunk_bytes):
    cell = list(shape)
    for dim in range(len(shape)):
        row = itemsize * math.prod(shape[dim + 1 :])
        if row <= chunk_bytes:
            fits = chunk_bytes // max(row, 1)
            while fits & (fits - 1):
                fits &= fits - 1
            cell[dim] = fits
            break
        cell[dim] = 1
    return cell


def cut(offsets, sizes, cell):
    """(offsets, sizes) of the chunks of a box."""
    if 0 in sizes:
        return
    spans = []
    for offset, size, step in zip(offsets, sizes, cell, strict=True):
        lines = [line for line in range(0, offset + size, step) if line > offset]
        edges = [offset, *lines, offset + size]
        spans.append(list(itertools.pairwise(edges)))
    for spot in itertools.product(*spans):
        yield [a for a, _ in spot], [b - a for a, b in spot]


# --- 6: the tree ------------------------------------------------------------------------------


def named(kind, payload):
    match kind:
        case "datetime":
            when = datetime.datetime.fromisoformat(payload[0]).replace(fold=payload[1])
            if len(payload) == 4:
                return when.replace(tzinfo=datetime.timezone(when.utcoffset(), payload[3]))
            return when.replace(tzinfo=zoneinfo.ZoneInfo(payload[2])) if len(payload) > 2 else when
        case "timedelta":
            return datetime.timedelta(*payload)
        case "date":
            return datetime.date.fromisoformat(payload)
        case "time":
            return datetime.time.fromisoformat(payload[0]).replace(fold=payload[1])
        case "path":
            return pathlib.Path(payload)
        case "PurePosixPath" | "PureWindowsPath":
            return getattr(pathlib, kind)(payload)
        case "UUID":
            return uuid.UUID(payload)
        case "Decimal":
            return decimal.Decimal(payload)
        case "Ellipsis":
            return ...
        case "numpy.dtype":
            return np.dtype(payload)
        case "torch.dtype" | "torch.device" | "torch.memory_format" | "torch.layout":
            return Named(kind, payload)
    raise FormatError(f"unknown kind {kind!r}")


def container(items):
    if not items or type(items[0]) is not Mark:
        return items
    kind, rest = str(items[0]), items[1:]
    match kind:
        case "tuple":
            return tuple(rest)
        case "torch.Size":
            return Named(kind, tuple(rest))
        case "set" | "frozenset":
            return {"set": set, "frozenset": frozenset}[kind](rest)
        case "OrderedDict" | "Counter":
            return getattr(collections, kind)(rest[0])
        case "defaultdict":
            return collections.defaultdict(FACTORIES[rest[0]] if rest[0] else None, rest[1])
        case "deque":
            return collections.deque(rest[1], maxlen=rest[0])
        case "slice":
            return slice(*rest)
        case "range":
            return range(*rest)
        case "sparse" | "subclass":
            return Made(kind, rest[0], rest[1])
    raise FormatError(f"unknown container {kind!r}")


def pairs(items):
    out = dict(items)
    require(len(out) == len(items), "a map has a key twice")
    return out


def tree_of(data, tensor=None):
    def extension(code, raw):
        match code:
            case 1:
                return Mark(raw.decode())
            case 2:
                return int.from_bytes(raw, "little", signed=True)
            case 3:
                return complex(*struct.unpack("<dd", raw))
            case 4:
                return bytearray(raw)
            case 5:
                dtype, value = unpack(raw)
                return np.frombuffer(value, dtype)[0]
            case 6:
                return named(*unpack(raw))
            case 7:
                require(tensor is not None, "a tensor where none may be")
                return tensor(*unpack(raw))
            case 8:
                return Named("pickle", unpack(raw)[0])
        raise FormatError(f"unknown extension {code}")

    found = unpack(
        data,
        ext_hook=extension,
        list_hook=container,
        object_pairs_hook=pairs,
        strict_map_key=False,
        use_list=True,
    )
    require(isinstance(found, dict), "the tree is not a map")
    return found


# --- the store --------------------------------------------------------------------------------


class Checkpoint:
    def __init__(self, root, record):
        self.root = root
        self.record = record
        self._layout()
        self._objects()

    def _table(self, name):
        ref = self.record["tables"][name]
        data = ref["inline"]
        if data is None:
            parts = []
            for name_digest, key, size in ref["pieces"]:
                match = OBJECT.fullmatch(key)
                require(match and bytes.fromhex(match[3]) == name_digest, "a piece under another name")
                parts.append((self.root / key).read_bytes())
                require(len(parts[-1]) == size, "a piece of another size")
            data = b"".join(parts)
        require(len(data) == ref["size_bytes"] and digest(data) == ref["digest"], f"table {name} was changed")
        return data

    def _layout(self):
        table = columns(
            self._table("layout"),
            **text_columns("name", "component", "alias"),
            **{
                "component": "<u4",
                "dtype": "|u1",
                "kind": "|u1",
                "ndim": "|u1",
                "shape": "<i8",
                "boxes": "<u4",
            },
            **{"box_offsets": "<i8", "box_sizes": "<i8", "alias_of": "<u4", "chunk_bytes": "<u8"},
        )
        names, components, aliases = (texts(table, name) for name in ("name", "component", "alias"))
        require(len({*names, *aliases}) == len(names) + len(aliases), "a name twice")
        require(all(row < len(names) for row in table["alias_of"]), "an alias of nothing")
        self.chunk_bytes = table["chunk_bytes"][0]
        self.names = names
        self.aliases = dict(zip(aliases, table["alias_of"], strict=True))
        self.tensors = []
        shape = iter(table["shape"])
        offsets, sizes = iter(table["box_offsets"]), iter(table["box_sizes"])
        rows = zip(*(table[c] for c in ("component", "dtype", "kind", "ndim", "boxes")), strict=True)
        for component, dtype, kind, ndim, boxes in rows:
            own = list(itertools.islice(shape, ndim))
            require(len(own) == ndim <= 64 and min(own, default=0) >= 0, "shape")
            require(component < len(components) and dtype in DTYPES and kind < len(KINDS), "row out of range")
            cell = cell_of(own, DTYPES[dtype][1], self.chunk_bytes)
            held = [
                (list(itertools.islice(offsets, ndim)), list(itertools.islice(sizes, ndim)))
                for _ in range(boxes)
            ]
            self._check_cover(own, held)
            chunks = [piece for box in held for piece in cut(*box, cell)]
            self.tensors.append((components[component], *DTYPES[dtype], KINDS[kind], tuple(own), chunks))
        require(len(names) == len(self.tensors), "columns differ in length")
        require(next(shape, None) is next(offsets, None) is next(sizes, None) is None, "too many entries")

    @staticmethod
    def _check_cover(shape, boxes):
        seen = np.zeros(shape, np.uint8)
        for offsets, sizes in boxes:
            require(
                all(o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(offsets, sizes, shape, strict=True)),
                "a box outside of its tensor",
            )
            seen[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        require((seen == 1).all(), "boxes do not cover their tensor exactly once")

    def _objects(self):
        raw = bytes(columns(self._table("digests"), digest="|u1")["digest"])
        self.digests = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        table = columns(
            self._table("keys"),
            **{"digest": "|u1", "is_pack": "|u1", "attempt": "<u4", "rank": "<u4", "size": "<i8"},
            **text_columns("attempt"),
        )
        attempts = texts(table, "attempt")
        require(all(ATTEMPT.fullmatch(attempt) for attempt in attempts), "not an attempt id")
        raw = bytes(table["digest"])
        self.sizes = table["size"]
        self.keys = []
        for i, (pack, attempt, rank) in enumerate(
            zip(table["is_pack"], table["attempt"], table["rank"], strict=True)
        ):
            text = raw[32 * i : 32 * i + 32].hex()
            self.keys.append(f"{'packs' if pack else 'chunks'}/{text[:2]}/{text}.{attempts[attempt]}.{rank}")
        require(all(a < b for a, b in itertools.pairwise(self.keys)), "keys are not sorted")
        require(min(self.sizes, default=0) >= 0, "a negative size")
        table = columns(self._table("locations"), object="<u4", offset="<i8", length="<i8", codec="|u1")
        self.locations = list(
            zip(*(table[name] for name in ("object", "offset", "length", "codec")), strict=True)
        )
        self.first = [0, *itertools.accumulate(len(tensor[-1]) for tensor in self.tensors)]
        count = self.first[-1]
        require(len(self.locations) == len(self.digests) == count, "rows differ from the layout's chunks")

    def tensor_bytes(self, row):
        _, _, itemsize, _, shape, chunks = self.tensors[row]
        whole = np.zeros((*shape, itemsize), np.uint8)
        for number, (offsets, sizes) in enumerate(chunks, self.first[row]):
            where, offset, length, codec = self.locations[number]
            require(codec == 0 and length == math.prod(sizes) * itemsize, "codec or length")
            require(
                where < len(self.keys) and 0 <= offset <= self.sizes[where] - length, "outside of its object"
            )
            with (self.root / self.keys[where]).open("rb") as file:
                file.seek(offset)
                data = file.read(length)
            require(digest(data) == self.digests[number], f"a chunk in {self.keys[where]} is damaged")
            spot = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[spot] = np.frombuffer(data, np.uint8).reshape(*sizes, itemsize)
        return whole.tobytes()

    def load(self):
        made = {}

        def tensor(row, kind, detail):
            require(0 <= row < len(self.tensors), "row out of range")
            if (row, kind, detail) not in made:
                _, dtype, _, own_kind, shape, _ = self.tensors[row]
                data = self.tensor_bytes(row)
                require(kind in KINDS and own_kind in KINDS, "kind")
                made[row, kind, detail] = {
                    "bytes": lambda: data,
                    "bytearray": lambda: bytearray(data),
                    "str": lambda: data.decode("utf-8", "surrogatepass"),
                }.get(kind, lambda: Array(kind, dtype, shape, detail, data, row))()
            return made[row, kind, detail]

        return tree_of(self._table("tree"), tensor)


class Store:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.marker = json.loads((self.root / "ckptstore.json").read_bytes())
        if self.marker["format"] > 1 or self.marker["features"]:
            raise TooNewError("the marker")
        require(self.marker["format"] == 1 and self.marker["hash"] == "blake3-256", "the marker")

    def _documents(self, prefix):
        for path in sorted((self.root / prefix).glob("*.mp")):
            if not path.name.startswith("."):
                yield path, path.read_bytes()

    def runs(self):
        found = {}
        for path in (self.root / "runs").glob("*/run.mp"):
            name = field(open_document(path.read_bytes(), "run")[1], "run", str)
            require(run_key(name) == path.parent.name, "a run under another key")
            found[name] = path.parent.name
        return found

    def epochs(self, run):
        found = [
            open_document(data, "epoch")[1] for _, data in self._documents(f"runs/{run_key(run)}/epochs")
        ]
        return sorted(found, key=lambda epoch: field(epoch, "number", int))

    def records(self, run):
        """Live records in the run's order, each with what its notes say."""
        key = run_key(run)
        found = []
        for path, data in self._documents(f"commits/{key}"):
            kind, body = open_document(data, "commit", "void", "gone")
            require((kind == "commit") == (len(data) >= 128), "the size does not tell the kind")
            if kind == "commit":
                require(field(body, "attempt", str) == path.stem, "a record under another key")
                require(
                    set(field(body, "tables", dict)) == {"layout", "tree", "digests", "locations", "keys"},
                    "tables",
                )
                found.append(body)
        counting = {}
        for record in sorted(found, key=lambda r: (-r["generation"], r["attempt"])):
            counting.setdefault(record["checkpoint"], record)
        place = {name: (record["epoch"], record["sequence"]) for name, record in counting.items()}
        for epoch in self.epochs(run):
            if epoch["resumed_from"] in place:
                place[epoch["resumed_from"]] = max(place[epoch["resumed_from"]], (epoch["number"], 0))
        return [counting[name] for name in sorted(place, key=lambda name: (place[name], name))]

    def facts(self, run, record):
        """(metrics, tags, whether it is restorable) after all notes."""
        notes = []
        for path, data in self._documents(f"notes/{run_key(run)}"):
            if path.name.startswith(record["checkpoint"] + "."):
                notes.append(open_document(data, "note")[1])
        metrics, tags, bad = dict(record["metrics"]), set(record["tags"]), set()
        for note in sorted(notes, key=lambda note: (note["number"], note["ulid"])):
            match note["kind"]:
                case "metrics":
                    metrics.update(note["data"]["metrics"])
                case "tag":
                    tags.add(note["data"]["tag"])
                case "untag":
                    tags.discard(note["data"]["tag"])
                case "invalid" as kind:
                    bad.add(kind)
                case "forgotten" as kind:
                    (bad.add if note["data"].get("forgotten", True) else bad.discard)(kind)
                case "valid":
                    bad.discard("invalid")
                case "damaged" if note["attempt"] == record["attempt"]:
                    bad.add("damaged")
                case "verified" if note["attempt"] == record["attempt"] and note["data"]["complete"]:
                    bad.discard("damaged")
        if (self.root / f"dooms/{run_key(run)}/{record['attempt']}.mp").exists():
            bad.add("doomed")
        return metrics, tags, not bad

    def latest(self, run):
        return next((r for r in reversed(self.records(run)) if self.facts(run, r)[2]), None)

    def checkpoint(self, record):
        return Checkpoint(self.root, record)
