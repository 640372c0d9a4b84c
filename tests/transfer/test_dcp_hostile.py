"""DCP directories that lie: every one is refused in our words, and nothing is saved."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import zipfile

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptstore.errors import CkptstoreError, DocumentError, UnsupportedValueError
from ckptstore.transfer import import_
from tests.transfer.dcp_made import dcp_save, read_metadata, write_metadata

_INDEX = dcp.MetadataIndex("w", (0, 0))


@pytest.fixture
def directory(tmp_path):
    """One tensor of 4 x 3, one value."""
    return dcp_save({"w": torch.arange(12.0).reshape(4, 3), "v": {"n": 1}}, tmp_path / "x")


def _refused(store, path, words, error=CkptstoreError, **options):
    with pytest.raises(error, match=words):
        import_(store.run("r"), path, step=0, **options)
    assert not store.run("r").exists
    is_open = [link.resolve() for link in pathlib.Path("/proc/self/fd").iterdir()]
    assert not [link for link in is_open if link.is_relative_to(path)], "a refused file is not left open"


def _chunks(*boxes):
    def change(found):
        found.state_dict_metadata["w"].chunks = [
            dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        info = found.storage_data[_INDEX]
        for offsets, _ in boxes:
            found.storage_data[dcp.MetadataIndex("w", offsets)] = info

    return change


def _info(**fields):
    return lambda found: found.storage_data[_INDEX].__dict__.update(fields)


def _size(*sizes):
    return lambda found: setattr(found.state_dict_metadata["w"], "size", sizes)


def _planner(**paths):
    return lambda found: found.planner_data.update({name.replace("_", "."): p for name, p in paths.items()})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_chunks(((0, 0), (3, 3))), "3 of 12 elements are not covered"),
        (_chunks(), "12 of 12 elements are not covered"),
        (_chunks(((0, 0), (3, 3)), ((2, 0), (2, 3))), "overlap"),
        (_chunks(((0, 0), (4, 3)), ((4, 0), (1, 3))), "outside of shape"),
        (_chunks(((0, 0), (4, 3)), ((1, 0), (3, 3))), "overlap"),
        (_chunks(((0,), (12,))), "a chunk of another dimension"),
        (_size(2**40, 2**40), "elements are not covered"),
        (_size(-4, 3), "no proper sizes"),
        (_size(True, 3), "no proper sizes"),
        (_size(4.0, 3), "no proper sizes"),
        (_size(*[1] * 100), "100 dimensions"),
        (_info(relative_path="../x/__0_0.distcp"), "is no file name"),
        (_info(relative_path="/etc/passwd"), "is no file name"),
        (_info(relative_path=".."), "is no file name"),
        (_info(relative_path=""), "is no file name"),
        (_info(relative_path="a\0b"), "is no file name"),
        (_info(relative_path=7), "is no file name"),
        (_info(relative_path="__9_9.distcp"), r"has no file __9_9\.distcp"),
        (_info(relative_path="."), "is no file name"),
        (_info(offset=-1), "no proper sizes"),
        (_info(offset=2**61), r"'w' should end at byte .*, and the file has"),
        (_info(length=2**61), r"'w' should end at byte .*, and the file has"),
        (_info(offset=1), r"__0_0\.distcp: 'w' is"),
        (_info(length=0), "'w' is no whole torch.save archive"),
        (_info(length=100), "'w' is no whole torch.save archive"),
        (lambda found: found.storage_data.clear(), "it does not say where 'w' at"),
        (lambda found: found.storage_data.pop(dcp.MetadataIndex("v.n")), "it does not say where 'v.n' lies"),
        (lambda found: found.storage_data.update(x=1), "a MetadataIndex is missing"),
        (lambda found: setattr(found, "storage_data", None), "storage_data is no map"),
        (lambda found: setattr(found, "state_dict_metadata", []), "state_dict_metadata is no map"),
        (lambda found: found.state_dict_metadata.update({3: None}), "a name that is no text"),
        (lambda found: found.state_dict_metadata.update(w=3), "a TensorStorageMetadata is missing"),
        (_planner(w=()), "no proper path"),
        (_planner(w=(0,)), "no proper path"),
        (_planner(w="w"), "no proper path"),
        (_planner(w=("w", -1)), "no proper path"),
        (_planner(w=("w", True)), "no proper path"),
        (_planner(w=("w",) * 200), "no proper path"),
        (_planner(w=("v", "n")), "is that of something else"),
        (_planner(w=("v",)), "is that of something else"),
        (_planner(w=("v", 0)), "is that of something else"),
        (_planner(w=("v", "n", "deep")), "is that of something else"),
        (_planner(w=("l", 2**30)), "would be a list of 1073741825"),
    ],
)
def test_lying_metadata_is_refused(store, directory, change, words):
    found = read_metadata(directory)
    change(found)
    write_metadata(directory, found)
    _refused(store, directory, words, DocumentError)


def test_a_chunk_is_what_the_metadata_says(store, directory):
    found = read_metadata(directory)
    found.state_dict_metadata["w"].properties.dtype = torch.int32
    write_metadata(directory, found)
    _refused(store, directory, r"'w' is float32\[4, 3\], and should be int32\[4, 3\]", DocumentError)
    _size(3, 4)(found)
    _chunks(((0, 0), (3, 4)))(found)
    write_metadata(directory, found)
    _refused(store, directory, r"should be int32\[3, 4\]", DocumentError)
    found.storage_data[_INDEX] = found.storage_data[dcp.MetadataIndex("v.n")]
    write_metadata(directory, found)
    _refused(store, directory, "'w' is no tensor", DocumentError)


class _Runs:
    def __reduce__(self):
        return (os.mkdir, ("i-ran",))


def test_nothing_of_the_metadata_runs(store, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = read_metadata(directory)
    found.storage_meta = _Runs()
    write_metadata(directory, found)
    for allow_pickle in (False, True):
        _refused(
            store, directory, r"\.metadata names \w+\.mkdir", UnsupportedValueError, allow_pickle=allow_pickle
        )
    assert not (tmp_path / "i-ran").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "a damaged pickle"),
        (b"\x80\x04", "a damaged pickle"),
        (b"no pickle", "is"),
        (pickle.dumps({}), "a Metadata is missing"),
        (pickle.dumps([1, 2], protocol=0), "the pickle operation"),
        (b"\x80\x04r\xff\xff\xff\xff.", "a damaged pickle"),
        (b"\x80\x04K\x01r\xff\xff\xff\xff.", "a Metadata is missing"),
        (b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.", "a damaged pickle"),
        (b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00ls\x85R.", "names os.system"),
        (b"\x80\x04ctorch\nload\n)R.", "names torch.load"),
        (b"\x80\x04cbuiltins\ngetattr\n(ctorch\nSize\nX\x04\x00\x00\x00maketR.", "a damaged pickle"),
        (b"\x80\x04ctorch\nSize\n(K\x01K\x02tR.", "a damaged pickle"),
        (b"\x80\x04ctorch\nfloat32\n)R.", "calls what is no function"),
        (b"\x80\x04ctorch\nfloat32\n)\x81.", "of what is no class"),
        (b"\x80\x04(.", "a damaged pickle"),
        (b"\x80\x04(t0.", "a damaged pickle"),
        (b"\x80\x04]]s.", "a damaged pickle"),
        (b"\x80\x04K\x01K\x02a.", "items of a int"),
        (b"\x80\x04}]K\x01s.", "a damaged pickle"),
        (b"\x80\x04K\x01Q.", "refers to something outside"),
    ],
)
def test_a_damaged_or_hostile_pickle_is_refused(store, directory, data, words):
    (directory / ".metadata").write_bytes(data)
    _refused(store, directory, words)


def _value(directory, name, value):
    """Puts other bytes in place of a value."""
    found = read_metadata(directory)
    file = directory / "__0_0.distcp"
    start = file.stat().st_size
    with file.open("ab") as out:
        out.write(value)
    found.storage_data[dcp.MetadataIndex(name)] = _StorageInfo(file.name, start, len(value))
    write_metadata(directory, found)


def _archive(pickled, *, compression=zipfile.ZIP_STORED, **more):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in more.items():
            archive.writestr(f"archive/{name}", data)
    return out.getvalue()


def _nested(levels):
    """A list of two lists of two lists...: small in the file, endless when walked."""
    node = [1]
    for _ in range(levels):
        node = [node, node]
    return pickle.dumps(node, protocol=2)


def _endless():
    node = []
    node.append(node)
    return pickle.dumps(node, protocol=2)


_TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu%stQ%s\x89NtR."
)
_ZERO = {"data/0": bytes(16)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "no whole torch.save archive"),
        (b"PK\x03\x04 and so on", "no whole torch.save archive"),
        (_archive(pickle.dumps(1, 2), compression=zipfile.ZIP_DEFLATED), "packed in another way"),
        (_archive(b"\x80\x02."), "a damaged pickle"),
        (_archive(pickle.dumps(1, 2), byteorder=b"big"), "big-endian"),
        (_archive(_nested(60)), "more than 10000000 values"),
        (_archive(_endless()), "contains itself"),
        (_archive(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "nested too deeply"),
        (_archive(pickle.dumps(_Runs(), 2)), r"'v\.n' names \w+\.mkdir"),
        (_archive(b"\x80\x02ctorch\nFloatStorage\n."), "holds more than tensors and plain values"),
        (
            _archive(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R."),
            "a damaged pickle",
        ),
        (_archive(b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00O\x89\x88\x87R."), "a numpy value of dtype 'O'"),
        (_archive(_TENSOR % (b"K\x04", b"K\x00K\x04\x85K\x01\x85")), "a damaged pickle"),
        (_archive(_TENSOR % (b"K\x05", b"K\x00K\x04\x85K\x01\x85"), **_ZERO), "shorter than it should be"),
        (_archive(_TENSOR % (b"K\x04", b"K\x00K\x05\x85K\x01\x85"), **_ZERO), "reaches beyond its storage"),
        (_archive(_TENSOR % (b"K\x04", b"K\x01K\x04\x85K\x01\x85"), **_ZERO), "reaches beyond its storage"),
        (_archive(_TENSOR % (b"K\x04", b"K\x00K\x02\x85K\x04\x85"), **_ZERO), "reaches beyond its storage"),
        (
            _archive(_TENSOR % (b"K\x04", b"K\x00K\x02\x85J\xff\xff\xff\xff\x85"), **_ZERO),
            "without proper sizes",
        ),
        (_archive(_TENSOR % (b"K\x04", b"K\x00K\x02\x85)"), **_ZERO), "without proper sizes"),
        (_archive(_TENSOR % (b"K\x04", b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85"), **_ZERO), None),
    ],
)
def test_lying_archives_are_refused(store, directory, value, words):
    _value(directory, "v.n", value)
    if words is not None:
        _refused(store, directory, words)
        return
    # An expanded tensor is huge and yet lies in the file; it is no lie, only large.
    source = import_(store.run("r"), directory, step=0, exclude="v.*")
    assert list(source.load()["model"]) == ["w"]


def test_two_members_of_one_name_are_refused(store, directory):
    with pytest.warns(UserWarning, match="Duplicate name"):
        value = _archive(pickle.dumps(1, 2), **{"data.pkl": pickle.dumps(2, 2)})
    _value(directory, "v.n", value)
    _refused(store, directory, "packed in another way", DocumentError)


def test_a_truncated_file_is_refused(store, directory):
    file = directory / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    _refused(store, directory, r"__0_0\.distcp: '.*' should end at byte", DocumentError)


def test_flipped_bits_are_refused_or_are_the_tensor_s_own(store, tmp_path):
    """Every byte of both files, turned over: an error of ours, or a state of the same structure."""
    directory = dcp_save({"w": torch.arange(4.0), "v": (1, "x")}, tmp_path / "x")
    for name in (".metadata", "__0_0.distcp"):
        file = directory / name
        data = file.read_bytes()
        for position in range(0, len(data), 7 if name == ".metadata" else 37):
            changed = bytearray(data)
            changed[position] ^= 0xFF
            file.write_bytes(changed)
            try:
                loaded = import_(store.run(f"r{position}"), directory, step=0).load()
            except CkptstoreError:
                continue
            assert isinstance(loaded["model"], dict)
        file.write_bytes(data)
