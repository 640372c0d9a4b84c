from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from ckptstore import backend
from ckptstore.errors import BackendError, UnknownSchemeError
from ckptstore_local import LocalBackend
from ckptstore_memory import MemoryBackend


def plug_in(monkeypatch, scheme, value):
    point = importlib.metadata.EntryPoint(scheme, value, backend.ENTRY_POINT_GROUP)
    known = {name: point for name, point in backend.installed_schemes().items() if name != scheme}
    monkeypatch.setattr(backend, "installed_schemes", lambda: {**known, scheme: point})


@pytest.mark.parametrize(
    "url", ["relative/dir", "/absolute", "file:///absolute", "FILE:///absolute", "s3:/no-url", "a b://c"]
)
def test_paths_and_file_urls_are_local(url):
    assert isinstance(backend.open_backend(url), LocalBackend)


def test_another_scheme_is_found_by_its_entry_point():
    assert isinstance(backend.open_backend("memory://x"), MemoryBackend)


def test_an_unknown_scheme_says_what_is_installed():
    with pytest.raises(UnknownSchemeError) as caught:
        backend.open_backend("gopher://place")
    text = str(caught.value)
    assert "gopher://" in text
    assert "file" in text
    assert "memory" in text
    assert backend.ENTRY_POINT_GROUP in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "fsspec"), ("sftp", "fsspec")])
def test_a_scheme_that_an_extra_brings_names_the_extra(monkeypatch, scheme, extra):
    known = {name: point for name, point in backend.installed_schemes().items() if name != scheme}
    monkeypatch.setattr(backend, "installed_schemes", lambda: known)
    with pytest.raises(UnknownSchemeError, match=rf"ckptstore\[{extra}\]"):
        backend.open_backend(f"{scheme}://bucket/prefix")


def test_credentials_in_a_url_are_not_shown():
    with pytest.raises(UnknownSchemeError) as caught:
        backend.open_backend("gopher://user:secret@host/x")
    assert "secret" not in str(caught.value)


def test_a_plug_in_that_cannot_be_imported_says_why(monkeypatch):
    plug_in(monkeypatch, "odd", "no_such_module_anywhere:Backend")
    with pytest.raises(UnknownSchemeError, match="no_such_module_anywhere"):
        backend.open_backend("odd://x")


def test_a_plug_in_without_the_named_class_says_so(monkeypatch):
    plug_in(monkeypatch, "odd", "ckptstore_memory:NoSuchBackend")
    with pytest.raises(UnknownSchemeError, match="NoSuchBackend"):
        backend.open_backend("odd://x")


@pytest.mark.parametrize("value", ["json:loads", "collections:OrderedDict"])
def test_a_plug_in_that_is_no_backend_is_refused(monkeypatch, value):
    plug_in(monkeypatch, "odd", value)
    with pytest.raises(UnknownSchemeError, match="is not a"):
        backend.open_backend("odd://x")


def test_the_core_imports_no_backend_by_itself():
    code = (
        "import sys, ckptstore.backend;"
        "print([m for m in sys.modules if m.startswith('ckptstore_') or m == 'pytest'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_test_tools_import_pytest_only_for_the_contract():
    code = "import sys, ckptstore.testing; print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("key", ["a", "a/b", "n" * 255, "k/" * 255 + "k"])
def test_keys_are_accepted(key):
    backend.check_key(key)


@pytest.mark.parametrize("key", ["", "a/", "/a", "a/../b", "a\n", "n" * 256, "k/" * 256 + "k", "é"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(BackendError, match="not an object key"):
        backend.check_key(key)
