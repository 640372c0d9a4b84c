"""Python objects that other checkpoint systems can only pickle."""

import datetime
import decimal
import enum
import pathlib
import re
import sys
import types
import uuid

import pytest
import torch

import ckptstore
from ckptstore.errors import UnsupportedValueError
from tests.model.made import difference
from tests.roundtrip.made import again, fresh, objects, roundtrip


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Config:
    def __init__(self, lr):
        self.lr = lr

    def __eq__(self, other):
        return isinstance(other, Config) and self.lr == other.lr

    __hash__ = None  # type: ignore[assignment]


def test_c156_common_objects_need_no_pickle():
    state = {
        "when": datetime.datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=datetime.UTC),
        "took": datetime.timedelta(days=-1, microseconds=7),
        "where": pathlib.Path("/data/a b"),
        "id": uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
        "money": decimal.Decimal("1.10"),
        "cut": slice(1, None, 2),
        "device": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }
    assert difference(state, roundtrip(state)) is None


@pytest.mark.parametrize("value", [Colour.RED, Config(0.1), {"x": {1, Colour.RED}}, re.compile("a")])
def test_c156_others_are_named_with_key_and_type_at_save_and_nothing_is_written(value):
    store = fresh()
    with pytest.raises(UnsupportedValueError) as caught:
        store.run("r").save(1, {"hparams": [1, {"it": value}]}).result()
    assert caught.value.path.startswith("hparams[1].it")
    assert (
        "pickle" in (caught.value.hint or "")
        or ".value" in (caught.value.hint or "")
        or "keys" in caught.value.hint
    )
    assert objects(store, "commits/", "chunks/", "packs/", "runs/") == {}


def test_c156_pickle_is_used_only_when_both_sides_ask_for_it():
    state = {"config": Config(0.5), "colour": Colour.RED, "level": [Level.LOW], "x": torch.ones(2)}
    store = fresh()
    store.run("r").save(1, state, allow_pickle=True).result()
    checkpoint = again(store).run("r").latest
    found = checkpoint.load(allow_pickle=True)
    assert (found["config"], found["colour"], found["level"]) == (Config(0.5), Colour.RED, [Level.LOW])
    assert type(found["level"][0]) is Level
    closed = checkpoint.load()
    assert isinstance(closed["config"], ckptstore.Opaque)
    assert closed["config"].class_path.endswith("Config")
    assert "allow_pickle=True" in closed["config"].reason
    assert torch.equal(closed["x"], torch.ones(2))


@pytest.mark.parametrize("value", [b"", bytearray(b"abc"), b"\0" * 10, bytes(range(256)) * 40_000], ids=len)
def test_c157_bytes_come_back_as_what_they_were(value):
    store = fresh(chunk_bytes=1 << 20)
    store.run("r").save(1, {"a": [value]}).result()
    assert difference({"a": [value]}, again(store).run("r").latest.load()) is None
    if len(value) > 1 << 20:
        assert max(objects(store).values()) <= 4 << 20
        assert store.run("r").save(2, {"a": [value]}, bases=[store.run("r").latest], wait=True).new_bytes == 0


@pytest.mark.parametrize("size", [3, 100_000])
def test_c157_a_memoryview_comes_back_as_bytes(size):
    assert difference({"a": b"x" * size}, roundtrip({"a": memoryview(b"x" * size)})) is None


def test_c159_an_object_whose_class_is_gone_is_a_placeholder_and_the_rest_loads(monkeypatch):
    module = types.ModuleType("a_config_library")
    module.ListConfig = type("ListConfig", (), {"__module__": "a_config_library"})
    monkeypatch.setitem(sys.modules, "a_config_library", module)
    item = module.ListConfig()
    item.values = [1, 2]
    store = fresh()
    store.run("r").save(
        1, {"hparams": {"layers": item}, "model": torch.ones(3), "n": 1}, allow_pickle=True
    ).result()
    monkeypatch.delitem(sys.modules, "a_config_library")
    for allow in (True, False):
        found = again(store).run("r").latest.load(allow_pickle=allow)
        assert isinstance(found["hparams"]["layers"], ckptstore.Opaque)
        assert found["hparams"]["layers"].class_path == "a_config_library.ListConfig"
        assert torch.equal(found["model"], torch.ones(3))
        assert found["n"] == 1


@pytest.mark.parametrize("key", [pathlib.Path("a"), Colour.RED, Level.LOW], ids=repr)
def test_g03_an_enum_or_path_as_key_is_refused_and_never_turns_into_an_int(key):
    for options in ({}, {"allow_pickle": True}):
        with pytest.raises(UnsupportedValueError, match="has a key of type"):
            fresh().run("r").save(1, {"a": {key: 1}}, **options).result()


@pytest.mark.parametrize("value", [Colour.RED, Level.LOW], ids=repr)
def test_g03_an_enum_as_value_is_refused_with_the_remedy(value):
    with pytest.raises(UnsupportedValueError, match=r"a\.b is of type .*(Colour|Level)") as caught:
        fresh().run("r").save(1, {"a": {"b": value}}).result()
    assert ".value" in caught.value.hint


@pytest.mark.parametrize(
    "path", [pathlib.Path("a/../b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:\\x")], ids=repr
)
def test_g03_a_path_as_value_keeps_its_class(path):
    assert difference({"p": path}, roundtrip({"p": path})) is None
