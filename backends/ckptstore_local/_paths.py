"""Between what a user wrote (a path or a ``file://`` URL), the directory meant, and a URL fit for logs."""

from __future__ import annotations

import os
import urllib.parse

from ckptstore.errors import UsageError

_PREFIX = "file://"


def root_of(url: str) -> str:
    """The absolute directory that `url` means; only ``file://`` URLs are percent-decoded.

    Raises:
        UsageError: it is empty, holds a NUL, names another host, or is a URL with a query or fragment.
    """
    path = _decode(url) if url[: len(_PREFIX)].lower() == _PREFIX else url
    if not path:
        raise UsageError("the path of the store is empty", hint="use '.' for the current directory")
    if "\0" in path:
        raise UsageError(f"the path of the store holds a NUL character: {path!r}")
    # Absolute at once: a later chdir must not move the store.
    return os.path.abspath(path)


def _decode(url: str) -> str:
    rest = url[len(_PREFIX) :]
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise UsageError(
            f"{url!r} is not a URL of a local directory",
            hint="write file:///absolute/path, or the plain path",
        )
    if "?" in path or "#" in path:
        raise UsageError(
            f"{url!r} has a query or a fragment, which a directory has not",
            hint="percent-encode '?' as %3F and '#' as %23, or give the plain path",
        )
    return "/" + os.fsdecode(urllib.parse.unquote_to_bytes(path))


def url_of(root: str) -> str:
    """`root` itself where it can be shown as it is, else as a ``file://`` URL; `root_of` takes both."""
    if root.isprintable():
        return root
    return _PREFIX + urllib.parse.quote_from_bytes(os.fsencode(root))
