"""Files that lie: every one is refused in our words, and nothing is saved."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from ckptstore.errors import CkptstoreError, DocumentError, UnsupportedValueError
from ckptstore.transfer import import_


def _safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _x(offsets=(0, 4), shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (_safetensors({"x": _x()}, b"abcd", length=2**63), "its header would take"),
        (_safetensors({}, length=200_000_000), "its header would take"),
        (_safetensors({}, length=50), "its header would take"),
        (_safetensors(b"{"), "no JSON"),
        (_safetensors(b"[" * 100_000), "no JSON"),
        (_safetensors(b"\xff\xfe{}"), "no JSON"),
        (_safetensors(b"[]"), "not a map"),
        (_safetensors(b'{"x":{},"x":{}}'), "twice"),
        (_safetensors({"x": 3}), "not described"),
        (_safetensors({"x": _x(dtype=3)}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(shape=(True,))}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(shape=(-1,))}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(shape=(1.0,))}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(offsets=(0,))}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(shape=(2**60, 2**60))}, b"abcd"), "no proper dtype"),
        (_safetensors({"x": _x(shape=(2**40, 2**40))}, b"abcd"), "does not take 4 bytes"),
        (_safetensors({"x": _x(shape=(1,) * 100)}, b"abcd"), "does not take"),
        (_safetensors({"x": _x(offsets=(4, 0))}, b"abcd"), "does not take"),
        (_safetensors({"x": _x(), "y": _x()}, b"abcd"), "overlaps"),
        (_safetensors({"x": _x(), "y": _x((8, 12))}, b"abcd" * 3), "leaves a hole"),
        (_safetensors({"x": _x((4, 8))}, b"abcd" * 2), "leaves a hole"),
        (_safetensors({"x": _x()}, b"abc"), "4 bytes, and it has 3"),
        (_safetensors({"x": _x()}, b"abcde"), "4 bytes, and it has 5"),
        (_safetensors({"__metadata__": [1]}), "not a map"),
    ],
)
def test_a_lying_header_is_refused(store, tmp_path, data, words):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DocumentError, match=words):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0)
    assert not store.run("r").exists


def test_a_dtype_of_the_future_is_refused_by_name(store, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(_safetensors({"x": _x(dtype="F6_E2M3")}, b"abcd"))
    with pytest.raises(UnsupportedValueError, match=r"'x' has dtype F6_E2M3"):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0)
    (tmp_path / "x.safetensors").write_bytes(
        _safetensors({"x": _x(dtype="F4", shape=(3,), offsets=(0, 2))}, b"ab")
    )
    with pytest.raises(UnsupportedValueError, match="odd number"):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0)


@pytest.mark.parametrize(
    "ours",
    [
        "no json",
        json.dumps(
            {
                "aliases": {"y": "absent", "x": "x", "z": 3},
                "numpy": {"x": "O", "q": "<f4"},
                "json": ["a", 3, "b"],
            }
        ),
        json.dumps({"aliases": 3, "numpy": {"x": "<f8"}, "json": "x"}),
        json.dumps({"numpy": {"x": "i4,f4"}}),
        "[" * 100_000,
    ],
)
def test_what_claims_to_be_our_metadata_is_not_believed(store, tmp_path, ours):
    header = {"__metadata__": {"ckptstore": ours, "b": "[" * 2000}, "x": _x()}
    (tmp_path / "x.safetensors").write_bytes(_safetensors(header, b"abcd"))
    loaded = import_(store.run("r"), tmp_path / "x.safetensors", step=0).load()
    assert list(loaded["model"]) == ["x"]
    assert isinstance(loaded["model"]["x"], torch.Tensor)


def _torch_file(path, change):
    torch.save({"a": torch.arange(4.0), "b": torch.arange(4.0) + 9}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", change.pop("compression", zipfile.ZIP_STORED)) as archive:
        for name, data in members.items():
            new = change.get(name.split("/", 1)[1], data)
            if new is not None:
                archive.writestr(name, new)


class _Runs:
    def __reduce__(self):
        return (os.mkdir, ("i-ran",))


@pytest.mark.parametrize(
    "change",
    [
        {"data/0": None},
        {"data/0": b"short"},
        {"data.pkl": b"garbage"},
        {"data.pkl": b""},
        {"data.pkl": None},
        {"byteorder": b"big"},
        {"data.pkl": pickle.dumps(_Runs(), 2)},
        {"constants.pkl": b"", "byteorder": b"x"},
    ],
)
def test_a_torch_file_that_lies_is_refused(store, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    _torch_file(tmp_path / "x.pt", change)
    with pytest.raises(CkptstoreError):
        import_(store.run("r"), tmp_path / "x.pt", step=0)
    assert not (tmp_path / "i-ran").exists()
    assert not store.run("r").exists


def test_a_torch_file_that_was_packed_anew_is_read_right_or_refused(store, tmp_path):
    """torch works places out from how it writes itself; others are refused, never read as if they were it."""
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        _torch_file(tmp_path / "x.pt", {"compression": compression})
        try:
            loaded = import_(store.run("r"), tmp_path / "x.pt", step=0).load()["model"]
        except DocumentError:
            continue
        assert torch.equal(loaded["a"], torch.arange(4.0))
        assert torch.equal(loaded["b"], torch.arange(4.0) + 9)


def test_every_cut_of_a_torch_file_is_refused(store, tmp_path):
    torch.save({"a": torch.arange(4.0)}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for size in range(0, len(data), 97):
        (tmp_path / "x.pt").write_bytes(data[:size])
        with pytest.raises(CkptstoreError):
            import_(store.run("r"), tmp_path / "x.pt", step=0)


def test_old_torch_files_are_refused_with_the_way_out(store, tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedValueError, match=r"before torch 1\.6.*save it again"):
        import_(store.run("r"), tmp_path / "x.pt", step=0)


def _npy(header):
    out = io.BytesIO()
    out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    return out.getvalue()


@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"\x93NUMPY\x09\x00",
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }\n") + bytes(4),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n") + bytes(4),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n") + bytes(8),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999999999), }\n"),
        _npy(b"__import__('os').mkdir('i-ran')\n"),
    ],
)
def test_an_array_that_lies_is_refused(store, tmp_path, monkeypatch, member):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(DocumentError):
        import_(store.run("r"), tmp_path / "x.npz", step=0)
    assert not (tmp_path / "i-ran").exists()


def test_a_changed_byte_of_an_npz_is_found(store, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros(1000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[4000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(DocumentError, match="CRC"):
        import_(store.run("r"), tmp_path / "x.npz", step=0)
