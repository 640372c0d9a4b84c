"""docs/format.md is enough to write a reader from: an independent one reads exactly what was saved."""

import ast
import collections
import dataclasses
import datetime
import decimal
import math
import pathlib
import re
import shutil
import uuid
import zoneinfo

import numpy as np
import pytest

import ckptstore
from ckptstore.model import boxes, dtypes, layout, record, tables, values
from ckptstore.model.ids import run_key
from tests.docs import reader

torch = pytest.importorskip("torch")

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
CHUNK_BYTES = 1024


def all_dtypes():
    found = {}
    raw = torch.randint(0, 255, (16 * 33,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for dtype in dtypes.BY_NAME.values():
        kind = getattr(torch, dtype.name, None)
        if kind is None:
            continue
        data = raw[: 33 * dtype.itemsize] & 1 if dtype.name == "bool" else raw[: 33 * dtype.itemsize]
        found[dtype.name] = data.clone().view(kind).reshape(3, 11)
    return found


def all_values():
    return {
        "none": None,
        "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**200), True, False],
        "floats": [0.0, -0.0, 1e-320, math.inf, -math.inf, 0.1],
        "complex": -1.5 + 2j,
        "text": "ä\udc80\n",
        "bytes": [b"", b"\0\xff", bytearray(b"xy")],
        "tuple": (1, (2, [3, ()])),
        "keys": {1: "a", (1, "b"): 2, None: 3, True + 1: 4, b"k": 5, 2.5: 6, 2**70: 7},
        "sets": [{1, 2}, frozenset({"a", "b"}), set()],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, {"x": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "slice": slice(1, None, 2),
        "range": range(2, 9, 3),
        "numpy": [
            np.float32(1.5),
            np.int8(-3),
            np.datetime64("2026-01-02", "D"),
            np.bool_(True),
            np.complex64(1j),
        ],
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        "zoned": datetime.datetime(2026, 7, 2, 3, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "day": [datetime.date(2026, 1, 2), datetime.time(3, 4), datetime.timedelta(-1, 2, 3)],
        "path": [pathlib.Path("a/b"), pathlib.PureWindowsPath("c:\\d")],
        "id": [uuid.UUID(int=5), decimal.Decimal("1.20"), ..., np.dtype("<M8[s]")],
        "torch": [
            torch.bfloat16,
            torch.device("cuda:1"),
            torch.Size([2, 3]),
            torch.channels_last,
            torch.strided,
        ],
    }


def make_state():
    shared = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    return {
        "dtypes": all_dtypes(),
        "model": {
            "large": torch.arange(1000 * 6, dtype=torch.float32).reshape(1000, 6),
            "wide": torch.arange(3 * 700, dtype=torch.float32).reshape(3, 700),
            "view": torch.arange(100).reshape(10, 10).T[1:4],
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "tied": shared,
            "head": shared,
            "same bytes": shared.clone(),
            "many": {f"layer.{i:04}": torch.full((7,), i, dtype=torch.int16) for i in range(2200)},
            "a.b": torch.zeros(1),
            "a": {"b": torch.ones(1)},
            "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True).coalesce(),
        },
        "arrays": {
            "plain": np.arange(1000, dtype=np.uint16).reshape(10, 100),
            "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
            "big": np.arange(5, dtype=">f4"),
            "times": np.array(["2026-01-02", "NaT"], "<M8[s]"),
        },
        "blobs": {"bytes": b"x" * 70_000, "text": "ü" * 70_000, "array": bytearray(b"y" * 65_536)},
        "values": all_values(),
    }


def raw_of(value):
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<")).tobytes()
    value = value.contiguous()
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def assert_same(read, saved, path=""):
    """That the reader's `read` is what was saved, types and bits included."""
    if isinstance(saved, torch.Tensor) and saved.layout is torch.sparse_coo:
        assert read.head == ["sparse_coo", [3], True]
        assert_same(read.parts["indices"], saved.indices(), path)
        assert_same(read.parts["values"], saved.values(), path)
    elif isinstance(saved, (torch.Tensor, np.ndarray)):
        assert read.data == raw_of(saved), path
        assert read.shape == tuple(saved.shape), path
        if isinstance(saved, np.ndarray):
            assert (read.kind, np.dtype(read.detail or read.dtype)) == ("numpy", saved.dtype), path
        else:
            assert (read.kind, f"torch.{read.dtype}") == ("torch", str(saved.dtype)), path
    elif isinstance(saved, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        assert read == reader.Named(f"torch.{type(saved).__name__}", str(saved)), path
    elif isinstance(saved, torch.Size):
        assert read == reader.Named("torch.Size", tuple(saved)), path
    elif isinstance(saved, dict):
        assert type(read) is type(saved), path
        assert list(read) == list(saved), path
        for key, item in saved.items():
            assert_same(read[key], item, f"{path}.{key}")
    elif isinstance(saved, (list, tuple)):
        assert type(read) is type(saved), path
        assert len(read) == len(saved), path
        for number, (a, b) in enumerate(zip(read, saved, strict=True)):
            assert_same(a, b, f"{path}[{number}]")
    else:
        assert type(read) is type(saved), path
        assert repr(read) == repr(saved), path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store with several checkpoints that reuse one another's chunks and tables."""
    root = tmp_path_factory.mktemp("format") / "ckpts"
    with ckptstore.init(root, chunk_bytes=CHUNK_BYTES) as store:
        run = store.run("Llama 8B/ä")
        state = make_state()
        run.save(1, state, metrics={"loss": 2.0}, metadata={"who": ("me", 1)}, tags=["first"]).result()
        state["model"]["large"][500] += 1
        run.save(2, state, metrics={"loss": 1.0}).result()
        run.save(3, {"model": {"w": torch.ones(2)}}).result()
        run.rewind(2)
        store.run("fork").fork_from(run[1])
        run.tag(1, "good")
        run.untag(1, "first")
        run.annotate(1, metrics={"val": 0.5})
        run.invalidate(3, "too small")
    return root


@pytest.fixture
def copy(place, tmp_path):
    return pathlib.Path(shutil.copytree(place, tmp_path / "copy"))


def test_the_reader_imports_nothing_of_the_library():
    tree = ast.parse(pathlib.Path(reader.__file__).read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("ckptstore", "torch"))]


@pytest.mark.parametrize("number", [0, 1])
def test_the_reader_gets_exactly_what_was_saved(place, number):
    state = make_state()
    state["model"]["large"][500] += number
    store = reader.Store(place)
    found = sorted(store.records("Llama 8B/ä"), key=lambda r: r["step"])[number]
    read = store.checkpoint(found).load()
    assert_same(read, state)
    assert read["model"]["tied"] is read["model"]["head"]
    assert read["model"]["same bytes"] is not read["model"]["tied"]


def test_a_fork_reads_the_same_and_has_no_chunks_of_its_own(place):
    store = reader.Store(place)
    (found,) = store.records("fork")
    opened = store.checkpoint(found)
    assert_same(opened.load(), make_state())
    assert not [key for key in opened.keys if found["attempt"] in key]


def test_the_store_of_this_test_has_what_the_format_can_have(place):
    store = reader.Store(place)
    first = min(store.records("Llama 8B/ä"), key=lambda r: r["step"])
    opened = store.checkpoint(first)
    assert {key.partition("/")[0] for key in opened.keys} == {"chunks", "packs"}
    assert any(ref["pieces"] for ref in first["tables"].values()), "no table is long enough for pieces"
    assert any(ref["inline"] for ref in first["tables"].values())
    assert opened.aliases
    assert len({place[:2] for place in opened.locations}) < len(opened.locations), "no chunks are shared"


def test_order_and_facts_are_the_librarys(place):
    store = reader.Store(place)
    with ckptstore.open(place) as opened:
        run = opened.run("Llama 8B/ä")
        theirs = run.checkpoints()
        ours = store.records(run.name)
        assert [found["checkpoint"] for found in ours] == [found.id for found in theirs]
        assert [found["step"] for found in ours] == [1, 3, 2]
        for mine, other in zip(ours, theirs, strict=True):
            assert store.facts(run.name, mine) == (dict(other.metrics), set(other.tags), other.restorable)
        assert store.latest(run.name)["checkpoint"] == run.latest.id
        assert reader.tree_of(ours[0]["metadata"]) == {"who": ("me", 1)}
        assert set(store.runs()) == {row.run for row in opened.runs()}


def test_the_reader_finds_a_flipped_bit_anywhere_in_a_record(copy):
    store = reader.Store(copy)
    (path,) = (copy / "commits" / run_key("fork")).glob("*.mp")
    good = path.read_bytes()
    for position in range(0, len(good), max(len(good) // 40, 1)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        with pytest.raises(reader.FormatError):
            store.records("fork")


def test_the_reader_finds_a_flipped_bit_in_every_object(copy):
    store = reader.Store(copy)
    (found,) = store.records("fork")
    keys = store.checkpoint(found).keys
    keys += [piece[1] for ref in found["tables"].values() for piece in ref["pieces"]]
    for key in keys[:: max(len(keys) // 15, 1)]:
        good = (copy / key).read_bytes()
        (copy / key).write_bytes(bytes([good[0] ^ 1]) + good[1:])
        with pytest.raises(reader.FormatError):
            store.checkpoint(found).load()
        (copy / key).write_bytes(good)


# --- the page says what the code does ----------------------------------------------------------


def test_the_hex_example_is_what_the_code_writes():
    shown = re.search(r"```text\n(0000 .*?)```", PAGE, re.DOTALL)[1]
    data = b"".join(bytes.fromhex(line[6:53]) for line in shown.splitlines())
    two = tables.Locations(
        np.array([0, 0]), np.array([0, 40]), np.array([40, 12]), np.array([0, 0], np.uint8)
    )
    assert data == two.encode()
    assert len(data) == 106


def test_the_dtype_table_is_complete():
    rows = re.findall(r"\| (\d+) \| (\w+) \| (\d+) (?=\|)", PAGE)
    assert {(int(code), name, int(size)) for code, name, size in rows} == {
        (dtype.code, dtype.name, dtype.itemsize) for dtype in dtypes.BY_CODE.values()
    }
    assert {dtype.code: (dtype.name, dtype.itemsize) for dtype in dtypes.BY_CODE.values()} == reader.DTYPES


def test_every_field_of_a_record_is_described():
    for kind in (
        record.CommitRecord,
        record.EpochDoc,
        record.IntentDoc,
        record.Note,
        record.ComponentSummary,
    ):
        for found in dataclasses.fields(kind):
            assert f"`{found.name}`" in PAGE, f"{kind.__name__}.{found.name}"
    for kind in (*record.NOTE_KINDS, *record.INTENT_KINDS, *record.TABLE_NAMES, *layout.KINDS[:1]):
        assert f"`{kind}`" in PAGE, kind
    for column in layout._COLUMNS:
        assert f"`{column}`" in PAGE, column
    for number in range(1, 9):
        assert re.search(rf"^\| {number} \| ", PAGE, re.MULTILINE)
        assert number in [value for name, value in vars(values).items() if name.startswith("EXT_")]


def test_the_run_key_example():
    assert "`Llama 8B/ä` gives `llama-8b-a-3d43c0017950c756`" in PAGE
    for name in ("Llama 8B/ä", "x", "漢字", "a" * 100, " -- ", "A__b--C", "\N{LATIN SMALL LIGATURE FI}sh"):
        assert reader.run_key(name) == run_key(name)
    assert run_key("Llama 8B/ä") == "llama-8b-a-3d43c0017950c756"


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [((1000, 6), 4), ((3, 700), 4), ((), 8), ((5, 0, 3), 4), ((2, 3, 4, 5), 2), ((7, 1025), 1)],
)
def test_the_grid_is_the_librarys(shape, itemsize):
    cell = boxes.cell_shape(shape, itemsize, CHUNK_BYTES)
    assert reader.cell_of(shape, itemsize, CHUNK_BYTES) == list(cell)
    whole = boxes.Box.whole(shape)
    ours = [(tuple(o), tuple(n)) for o, n in reader.cut(whole.offsets, whole.sizes, cell)]
    assert ours == [(box.offsets, box.sizes) for box in boxes.cut(whole, cell)]


def test_the_worked_examples_of_the_grid():
    assert "| (1000, 6) | 24 | (32, 6) | rows 20 to 99 | rows 20–31, 32–63, 64–95, 96–99 |" in PAGE  # noqa: RUF001
    assert reader.cell_of((1000, 6), 4, 1024) == [32, 6]
    pieces = list(reader.cut((20, 0), (80, 6), (32, 6)))
    assert [(o[0], o[0] + n[0] - 1) for o, n in pieces] == [(20, 31), (32, 63), (64, 95), (96, 99)]
    assert "| (3, 700) | 2800, then 4 | (1, 256) | whole | per row: columns 0–255, 256–511, 512–699 |" in PAGE  # noqa: RUF001
    assert reader.cell_of((3, 700), 4, 1024) == [1, 256]
    assert [(o[1], o[1] + n[1] - 1) for o, n in reader.cut((0, 0), (3, 700), (1, 256))][:3] == [
        (0, 255),
        (256, 511),
        (512, 699),
    ]
