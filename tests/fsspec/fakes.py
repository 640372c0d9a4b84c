"""File systems of fsspec that misbehave, each in one way, over fsspec's own memory."""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Fake(MemoryFileSystem):  # type: ignore[misc]
    """Memory of its own, under a protocol of its own."""

    protocol = "fake"

    def __init_subclass__(cls) -> None:
        cls.store = {}
        cls.pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))


class IgnoresCreate(Fake):
    """Takes ``mode="create"`` and overwrites."""

    protocol = "ignorescreate"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **kwargs)


class KnowsNoModes(Fake):
    """As of before fsspec had ``mode``."""

    protocol = "knowsnomodes"

    def pipe_file(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


class Lags(Fake):
    """Keeps every listing and every answer to `info` in a cache of its own until told to forget."""

    protocol = "lags"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cached: dict[Any, Any] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.cached.clear()

    def _kept(self, key: Any, ask: Any) -> Any:
        if key not in self.cached:
            self.cached[key] = ask()
        return self.cached[key]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._kept(("ls", path, detail), lambda: super(Lags, self).ls(path, detail, **kwargs))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._kept(("info", path), lambda: super(Lags, self).info(path, **kwargs))


class LosesMoved(Fake):
    """A rename that says it worked and leaves half of the file."""

    protocol = "losesmoved"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        data = self.cat_file(path1)
        super().pipe_file(path2, data[: len(data) // 2])
        self.rm_file(path1)


class WillNotMove(Fake):
    """A rename that fails."""

    protocol = "willnotmove"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise OSError("no rename here")


class WillNotReplace(Fake):
    """A rename that refuses to replace a file, as HDFS's does."""

    protocol = "willnotreplace"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


class ReadsShort(Fake):
    """Gives fewer or more bytes than it was asked for."""

    protocol = "readsshort"
    by: ClassVar[int] = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **kwargs)
        return data[: self.by] if self.by < 0 else data + bytes(self.by)


class WritesShort(Fake):
    """Stores all but the last byte, and says nothing."""

    protocol = "writesshort"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value[:-1], mode=mode, **kwargs)


class ListsElsewhere(Fake):
    """Lists names that are not below what was asked for."""

    protocol = "listselsewhere"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return [{"name": "/elsewhere/file", "size": 1, "type": "file"}]


class Fails(AbstractFileSystem):  # type: ignore[misc]
    """Raises `error` at every read."""

    protocol = "fails"
    error: ClassVar[Exception] = OSError()

    def info(self, path: str, **kwargs: Any) -> Any:
        if "/" in path.strip("/"):
            raise self.error
        return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        raise self.error


ALL = (
    IgnoresCreate,
    KnowsNoModes,
    Lags,
    LosesMoved,
    WillNotMove,
    WillNotReplace,
    ReadsShort,
    WritesShort,
    ListsElsewhere,
    Fails,
)
