"""The conformance suite: what every backend must do, one test a sentence of ``ckptstore/backend.py``.

A third party proves a backend by subclassing it in a test module, with one fixture::

    from ckptstore.testing import BackendContract

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}/store"     # a fresh place each time, not made yet

and, where the backend is not installed as a plug-in, with :meth:`BackendContract.open_backend` overridden.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ckptstore import backend as contract
from ckptstore.backend import Backend, Capabilities, DeleteResult, ObjectInfo, ReadableBuffer
from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShortReadError,
)

MIB = 1 << 20
PATIENCE_SECONDS = 60.0

BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/.b",
    ".a",
    "a b",
    "a\nb",
    "a\0b",
    "a\\b",
    "a%2Fb",
    "a#b",
    "a?b",
    "a:b",
    "ä",
    "a/" * 256 + "a",
    "n" * 256,
    "a\n",
)

GOOD_KEYS = (
    "a",
    "Z/z",
    "0",
    "-",
    "_",
    "a..b",
    "a.",
    "a/b/c/d/e/f",
    "chunks/0f/" + "0f" * 32 + ".01ARZ3NDEKTSV4RRFFQ69G5FAV-1200-1.7",
    "/".join(["k" * 63] * 8),
    "n" * 255,
)


@functools.cache
def _block(seed: int) -> bytes:
    words = ((seed + 1) * 1_000_003 + n * 2_654_435_761 & 0xFFFFFFFF for n in range(16_411))
    return b"".join(word.to_bytes(4, "little") for word in words)


def pattern(size: int, seed: int = 0) -> bytes:
    """`size` bytes in which every shift, swap and truncation shows; others for another `seed`."""
    block = _block(seed)
    return (block * (size // len(block) + 1))[:size]


class BackendContract:
    """Subclass it, give it a ``url`` fixture, and pytest runs the contract against that backend."""

    # --- what a subclass may replace -----------------------------------------------------------

    def open_backend(self, url: str) -> Backend:
        """A new handle for `url`; the default looks for an installed plug-in."""
        return contract.open_backend(url)

    @pytest.fixture
    def url(self) -> str:
        """Where one test may play: a place that does not exist yet. A subclass must define this fixture."""
        raise NotImplementedError("define a `url` fixture: a fresh place, not made yet")

    @pytest.fixture
    def backend(self, url: str) -> Iterator[Backend]:
        """A handle for `url`, with its root made."""
        made = self.open_backend(url)
        made.create_root()
        yield made
        made.close()

    @pytest.fixture
    def second(self, backend: Backend, url: str) -> Iterator[Callable[[], Backend]]:
        """Opens more handles to the place of `backend`, as another process would."""
        opened: list[Backend] = []

        def open_one() -> Backend:
            opened.append(self.open_backend(url))
            return opened[-1]

        yield open_one
        for one in opened:
            one.close()

    # --- the root ------------------------------------------------------------------------------

    def test_opening_touches_nothing(self, url: str) -> None:
        self.open_backend(url).close()
        with pytest.raises(BackendError):
            list(self.open_backend(url).list(""))

    def test_only_create_root_makes_the_root(self, url: str) -> None:
        backend = self.open_backend(url)
        attempts: Sequence[Callable[[], object]] = (
            lambda: backend.put("a", [b"1"]),
            lambda: backend.put("a/b", [b"1"]),
            lambda: backend.put("a/b", [b"1"], if_absent=True),
            lambda: list(backend.list("")),
            lambda: list(backend.list("a/")),
        )
        for attempt in attempts:
            with pytest.raises(BackendError) as caught:
                attempt()
            assert not isinstance(caught.value, ObjectNotFoundError)
        backend.close()
        with pytest.raises(BackendError):
            list(self.open_backend(url).list(""))

    def test_a_missing_root_is_no_missing_object(self, url: str) -> None:
        backend = self.open_backend(url)
        for attempt in (lambda: backend.get("a", max_bytes=1), lambda: backend.head("a/b")):
            with pytest.raises(BackendError) as caught:
                attempt()
            assert not isinstance(caught.value, ObjectNotFoundError)
        assert [bool(result.error) for result in backend.delete(["a"])] == [True]

    def test_create_root_again_keeps_everything(self, backend: Backend) -> None:
        backend.put("a/b", [b"1"])
        backend.create_root()
        assert backend.get("a/b", max_bytes=1) == b"1"

    def test_make_prefixes_is_idempotent_and_lists_nothing(self, backend: Backend) -> None:
        for _ in range(2):
            backend.make_prefixes(["chunks/00", "chunks/01/", "packs/00"])
        assert list(backend.list("")) == []
        backend.put("chunks/00/a", [b"1"])
        backend.make_prefixes(["chunks/00"])
        assert backend.get("chunks/00/a", max_bytes=1) == b"1"

    # --- put and get ---------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "size", [0, 1, 4095, 4096, 4097, 262_143, 262_144, 262_145, MIB + 1, 20 * MIB + 11]
    )
    def test_what_was_put_comes_back(self, backend: Backend, size: int) -> None:
        content = pattern(size)
        backend.put("a/b", [content])
        assert backend.get("a/b", max_bytes=size) == content
        assert backend.head("a/b").size_bytes == size
        backend.put("a/c", [content], if_absent=True)
        assert backend.get("a/c", max_bytes=size) == content

    def test_no_buffers_and_empty_buffers_are_an_empty_object(self, backend: Backend) -> None:
        backend.put("none", [])
        backend.put("empty", [b"", bytearray(), memoryview(b"")])
        for key in ("none", "empty"):
            assert backend.get(key, max_bytes=0) == b""
            assert backend.head(key).size_bytes == 0

    def test_many_buffers_of_all_kinds_are_joined_in_order(self, backend: Backend) -> None:
        content = pattern(3 * MIB + 5)
        pieces: list[ReadableBuffer] = []
        place = 0
        for n in range(5_000):
            size = min(n * 37 % 1_291, len(content) - place)
            pieces.append((bytes, bytearray, memoryview)[n % 3](content[place : place + size]))
            place += size
        pieces.append(memoryview(content)[place:])
        backend.put("a", pieces)
        assert backend.get("a", max_bytes=len(content)) == content

    def test_large_pieces_between_small_ones_are_joined_in_order(self, backend: Backend) -> None:
        content = pattern(9 * MIB + 77)
        cuts = [0, 3, 100_003, 104_099, 4 * MIB, 4 * MIB + 1, 9 * MIB, len(content)]
        backend.put("a", [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)])
        assert backend.get("a", max_bytes=len(content)) == content

    @pytest.mark.parametrize("shift", [0, 1, 64, 4095])
    def test_unaligned_memory_is_stored_as_it_is(self, backend: Backend, shift: int) -> None:
        content = bytearray(pattern(2 * MIB + shift))
        backend.put("a", [memoryview(content)[shift:]])
        assert backend.get("a", max_bytes=2 * MIB) == content[shift:]

    def test_views_of_other_types_and_read_only_views_are_stored_as_bytes(self, backend: Backend) -> None:
        content = pattern(512 * 1024)
        views: Any = [memoryview(content).cast("d"), memoryview(bytearray(content)).cast("B", (512, 1024))]
        backend.put("a", views)
        assert backend.get("a", max_bytes=MIB) == content * 2

    def test_the_buffers_are_free_when_put_returns(self, backend: Backend) -> None:
        content = bytearray(pattern(MIB))
        backend.put("a", [content])
        content[:] = bytes(MIB)
        assert backend.get("a", max_bytes=MIB) == pattern(MIB)

    def test_put_replaces_by_a_longer_and_by_a_shorter_object(self, backend: Backend) -> None:
        for size in (10, 400_000, 3, 0):
            backend.put("a/b", [pattern(size, size)])
            assert backend.get("a/b", max_bytes=MIB) == pattern(size, size)
            assert [info.size_bytes for info in backend.list("a/")] == [size]

    @pytest.mark.parametrize("count", [0, 1, 2, 9])
    def test_put_many_stores_each_under_its_key(self, backend: Backend, count: int) -> None:
        memory = bytearray(pattern(3 * MIB))
        held = memoryview(memory)
        objects: dict[str, list[ReadableBuffer]] = {"a/none": [], "b/last": [b"1", held[5:MIB]]}
        objects |= {f"{'ab'[n % 2]}/{n}": [held[n * 4096 : (n + n % 3) * 262_144 + 4096]] for n in range(7)}
        some = list(objects.items())[:count]
        backend.put_many(some)
        wanted = {key: b"".join(buffers) for key, buffers in some}
        memory[:] = bytes(3 * MIB)
        assert {info.key: info.size_bytes for info in backend.list("")} == {
            key: len(content) for key, content in wanted.items()
        }
        for key, content in wanted.items():
            assert backend.get(key, max_bytes=3 * MIB) == content
        backend.put_many([(key, [b"other"]) for key in wanted])
        assert all(backend.get(key, max_bytes=5) == b"other" for key in wanted)
        backend.sync()

    def test_put_many_with_an_invalid_key_stores_no_part_of_an_object(self, backend: Backend) -> None:
        with pytest.raises(BackendError) as caught:
            backend.put_many([("a/b", [b"1"]), ("a/../b", [b"2"]), ("a/c", [b"3"])])
        assert not caught.value.transient
        assert {info.key for info in backend.list("")} <= {"a/b", "a/c"}

    @pytest.mark.parametrize("key", GOOD_KEYS)
    def test_every_valid_key_works(self, backend: Backend, key: str) -> None:
        backend.put(key, [b"1"])
        assert [info.key for info in backend.list("")] == [key]
        assert backend.get(key, max_bytes=1) == b"1"
        assert backend.delete([key]) == [DeleteResult(key)]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_an_invalid_key_is_refused_by_every_method(self, backend: Backend, key: str) -> None:
        backend.put("a/b", [b"1"])
        attempts: Sequence[Callable[[], object]] = (
            lambda: backend.put(key, [b"2"]),
            lambda: backend.put(key, [b"2"], if_absent=True),
            lambda: backend.get(key, max_bytes=1),
            lambda: backend.head(key),
            lambda: backend.read_into(key, 0, memoryview(bytearray(1))),
        )
        for attempt in attempts:
            with pytest.raises(BackendError) as caught:
                attempt()
            assert not caught.value.transient
        assert [bool(result.error) for result in backend.delete([key])] == [True]
        assert [info.key for info in backend.list("")] == ["a/b"]

    # --- create if absent ----------------------------------------------------------------------

    def test_if_absent_leaves_what_is_there(self, backend: Backend, second: Callable[[], Backend]) -> None:
        backend.put("a/b", [b"first"], if_absent=True)
        for handle in (backend, second()):
            with pytest.raises(ObjectExistsError) as caught:
                handle.put("a/b", [b"other"], if_absent=True)
            assert not caught.value.transient
        assert backend.get("a/b", max_bytes=5) == b"first"
        assert list(backend.list_temporaries("")) == []

    def test_if_absent_meets_an_object_of_a_plain_put(self, backend: Backend) -> None:
        backend.put("a", [b""])
        with pytest.raises(ObjectExistsError):
            backend.put("a", [b"other"], if_absent=True)

    def test_if_absent_works_again_after_delete(self, backend: Backend) -> None:
        backend.put("a", [b"1"], if_absent=True)
        backend.delete(["a"])
        backend.put("a", [b"2"], if_absent=True)
        assert backend.get("a", max_bytes=1) == b"2"

    @pytest.mark.parametrize("size", [10, 300_000])
    def test_of_sixteen_writers_one_creates(
        self, backend: Backend, second: Callable[[], Backend], size: int
    ) -> None:
        if not backend.capabilities.create_if_absent:
            pytest.skip("this backend cannot create atomically, and says so")
        handles = [second() for _ in range(16)]
        for round_ in range(5):
            start = threading.Barrier(16)

            def race(n: int, key: str = f"race/{round_}", start: threading.Barrier = start) -> bool:
                start.wait(PATIENCE_SECONDS)
                try:
                    handles[n].put(key, [pattern(size, n)], if_absent=True)
                except ObjectExistsError:
                    return False
                return True

            with concurrent.futures.ThreadPoolExecutor(16) as threads:
                won = list(threads.map(race, range(16)))
            assert sum(won) == 1
            assert backend.get(f"race/{round_}", max_bytes=size) == pattern(size, won.index(True))

    # --- atomic replacement --------------------------------------------------------------------

    def test_readers_see_the_former_or_the_new_object_and_never_a_part(
        self, backend: Backend, second: Callable[[], Backend]
    ) -> None:
        versions = [pattern(300_000 + 1_000 * n, n) for n in range(4)]
        valid = set(versions)
        backend.put("a", [versions[0]])
        done = threading.Event()

        def read(handle: Backend) -> int:
            reads = 0
            while not done.is_set() or reads == 0:
                assert handle.get("a", max_bytes=MIB) in valid
                assert [info.key for info in handle.list("")] == ["a"]
                reads += 1
            return reads

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read, second()) for _ in range(3)]
            try:
                for n in range(40):
                    backend.put("a", [versions[n % 4]])
            finally:
                done.set()
            assert all(reader.result(PATIENCE_SECONDS) > 0 for reader in readers)

    # --- reading -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "size"),
        [
            (0, 0),
            (0, 1),
            (1, 4096),
            (4096, 4096),
            (4095, 8194),
            (0, 3_000_000),
            (1_234_567, 1_765_433),
            (2_999_999, 1),
        ],
    )
    def test_read_into_fills_exactly_the_buffer(self, backend: Backend, offset: int, size: int) -> None:
        content = pattern(3_000_000)
        backend.put("a", [content])
        for shift in (0, 1, 64):
            memory = bytearray(b"\xee" * (shift + size + 16))
            backend.read_into("a", offset, memoryview(memory)[shift : shift + size])
            assert memory[shift : shift + size] == content[offset : offset + size]
            assert memory[:shift] + memory[shift + size :] == b"\xee" * (shift + 16)

    def test_read_into_takes_views_of_other_types(self, backend: Backend) -> None:
        backend.put("a", [pattern(800)])
        memory = bytearray(800)
        doubles: Any = memoryview(memory).cast("d", (10, 10))
        backend.read_into("a", 0, doubles)
        assert memory == pattern(800)

    @pytest.mark.parametrize("offset", [0, 1, 4096, 12_288])
    @pytest.mark.parametrize(
        "sizes",
        [(), (0, 0), (7,), (5, 0, 1), (1,) * 1500, (4096, 2_000_000, 4096), (65_536, 3, 1_500_000, 70_000)],
        ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
    )
    def test_read_parts_fills_one_buffer_after_the_other(
        self, backend: Backend, offset: int, sizes: tuple[int, ...]
    ) -> None:
        content = pattern(2_500_000)
        backend.put("a", [content])
        memory = [bytearray(b"\xee" * (size + 2)) for size in sizes]
        buffers = [memoryview(each)[1:-1] for each in memory]
        backend.read_parts("a", offset, buffers)
        for each, size in zip(memory, sizes, strict=True):
            assert each[1:-1] == content[offset : offset + size]
            assert each[0] == each[-1] == 0xEE
            offset += size

    def test_a_short_read_of_parts_raises(self, backend: Backend) -> None:
        backend.put("a", [pattern(100)])
        with pytest.raises(ShortReadError):
            backend.read_parts("a", 50, [memoryview(bytearray(40)), memoryview(bytearray(11))])
        with pytest.raises(ObjectNotFoundError):
            backend.read_parts("b", 0, [memoryview(bytearray(1)), memoryview(bytearray(1))])

    @pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (99, 2), (1_000, 1), (50, 3 * MIB)])
    def test_a_short_read_raises(self, backend: Backend, offset: int, size: int) -> None:
        backend.put("a", [pattern(100)])
        with pytest.raises(ShortReadError) as caught:
            backend.read_into("a", offset, memoryview(bytearray(size)))
        assert not caught.value.transient

    def test_get_refuses_more_than_max_bytes(self, backend: Backend) -> None:
        backend.put("a", [pattern(1_001)])
        with pytest.raises(ObjectTooLargeError):
            backend.get("a", max_bytes=1_000)
        assert backend.get("a", max_bytes=1_001) == pattern(1_001)

    def test_a_missing_object_is_told_by_its_own_error(self, backend: Backend) -> None:
        backend.put("a/b", [b"1"])
        for key in ("b", "a/c", "c/d/e"):
            attempts: Sequence[Callable[[], object]] = (
                lambda key=key: backend.get(key, max_bytes=1),  # type: ignore[misc]
                lambda key=key: backend.head(key),  # type: ignore[misc]
                lambda key=key: backend.read_into(key, 0, memoryview(bytearray(1))),  # type: ignore[misc]
            )
            for attempt in attempts:
                with pytest.raises(ObjectNotFoundError) as caught:
                    attempt()
                assert not caught.value.transient
                assert key in str(caught.value)

    def test_head_tells_size_and_a_sensible_time(self, backend: Backend) -> None:
        backend.put("a/b", [pattern(1_234)])
        info = backend.head("a/b")
        assert (info.key, info.size_bytes) == ("a/b", 1_234)
        assert abs(info.modified - time.time()) < 86_400
        assert list(backend.list("a/")) == [info]

    def test_many_threads_share_one_handle(self, backend: Backend) -> None:
        def work(n: int) -> bool:
            content = pattern(200_000 + n * 4_001, n)
            backend.put(f"t/{n}", [content[:n], content[n:]])
            memory = bytearray(len(content))
            backend.read_into(f"t/{n}", 0, memoryview(memory))
            return memory == content and backend.head(f"t/{n}").size_bytes == len(content)

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(48)))
        assert len(list(backend.list("t/"))) == 48

    # --- listing -------------------------------------------------------------------------------

    def test_list_is_complete_and_names_each_object_once(self, backend: Backend) -> None:
        keys = {f"d{n % 7}/e{n % 3}/k{n}" for n in range(300)} | {"top", "d0/file", "d0.x/y", "d0-/z"}
        for key in keys:
            backend.put(key, [key.encode()])
        listed = list(backend.list(""))
        assert sorted(info.key for info in listed) == sorted(keys)
        assert all(info.size_bytes == len(info.key) for info in listed)

    def test_list_keeps_to_the_prefix(self, backend: Backend) -> None:
        for key in ("a/b", "a/c/d", "ab", "abc/c", "b/a/b", "a-b/c"):
            backend.put(key, [b""])
        assert sorted(info.key for info in backend.list("a/")) == ["a/b", "a/c/d"]
        assert [info.key for info in backend.list("a/c/")] == ["a/c/d"]
        assert [info.key for info in backend.list("a/b/")] == []
        assert [info.key for info in backend.list("absent/deep/")] == []

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "./", "a/../", ".a/", "a b/", "a\0/"])
    def test_other_prefixes_are_refused(self, backend: Backend, prefix: str) -> None:
        with pytest.raises(BackendError):
            list(backend.list(prefix))

    def test_an_ordered_list_is_in_code_point_order(self, backend: Backend) -> None:
        if not backend.capabilities.ordered_list:
            pytest.skip("this backend does not promise an order")
        for key in ("b", "a/z", "a-b", "a.b", "a0", "A", "a/b/c", "_", "9"):
            backend.put(key, [b""])
        keys = [info.key for info in backend.list("")]
        assert keys == sorted(keys)

    def test_list_is_lazy_and_survives_changes_meanwhile(self, backend: Backend) -> None:
        kept = {f"p/{n % 4}/keep{n}" for n in range(200)}
        doomed = [f"p/{n % 4}/drop{n}" for n in range(200)]
        for key in [*kept, *doomed]:
            backend.put(key, [b""])
        listing = backend.list("p/")
        seen = [next(listing).key]
        backend.delete(doomed)
        for n in range(100):
            backend.put(f"p/{n % 4}/new{n}", [b""])
        seen += [info.key for info in listing]
        assert len(seen) == len(set(seen))
        assert kept <= set(seen)

    def test_an_unfinished_listing_can_be_dropped(self, backend: Backend) -> None:
        for n in range(10):
            backend.put(f"a/{n}", [b""])
        listing = backend.list("")
        assert isinstance(next(listing), ObjectInfo)
        del listing
        assert len(list(backend.list(""))) == 10

    def test_a_change_by_another_handle_is_seen_at_once(
        self, backend: Backend, second: Callable[[], Backend]
    ) -> None:
        other = second()
        assert list(other.list("")) == []
        with pytest.raises(ObjectNotFoundError):
            other.head("a/b")
        for content in (b"1", b"22", b"33"):
            backend.put("a/b", [content])
            assert other.get("a/b", max_bytes=2) == content
            assert [(info.key, info.size_bytes) for info in other.list("")] == [("a/b", len(content))]
        backend.delete(["a/b"])
        assert list(other.list("")) == []
        with pytest.raises(ObjectNotFoundError):
            other.get("a/b", max_bytes=2)

    # --- deleting ------------------------------------------------------------------------------

    def test_delete_answers_for_each_key_in_order(self, backend: Backend) -> None:
        for n in range(5):
            backend.put(f"a/{n}", [b""])
        keys = ["a/3", "a/absent", "a/1", "nowhere/at/all"]
        assert backend.delete(keys) == [DeleteResult(key) for key in keys]
        assert sorted(info.key for info in backend.list("")) == ["a/0", "a/2", "a/4"]
        assert backend.delete(keys) == [DeleteResult(key) for key in keys]
        assert backend.delete([]) == []

    def test_delete_takes_thousands(self, backend: Backend) -> None:
        keys = [f"a/{n}" for n in range(1_100)]
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: backend.put(key, [b""]), keys))
        results = backend.delete(keys)
        assert [result.key for result in results] == keys
        assert all(result.error is None for result in results)
        assert list(backend.list("")) == []

    def test_a_prefix_is_not_an_object(self, backend: Backend) -> None:
        backend.put("a/b/c", [b"1"])
        for attempt in (lambda: backend.get("a/b", max_bytes=9), lambda: backend.head("a")):
            with pytest.raises(BackendError):
                attempt()
        backend.delete(["a/b", "a"])
        assert backend.get("a/b/c", max_bytes=1) == b"1"

    # --- handles -------------------------------------------------------------------------------

    def test_sync_and_close_may_be_repeated_and_close_is_not_the_end(self, backend: Backend) -> None:
        backend.sync()
        backend.put("a", [b"1"])
        backend.sync()
        backend.sync()
        backend.close()
        backend.close()
        assert backend.get("a", max_bytes=1) == b"1"
        backend.put("b", [b"2"])
        backend.sync()

    def test_a_handle_survives_pickling(self, backend: Backend) -> None:
        backend.put("a", [b"1"])
        copy = pickle.loads(pickle.dumps(backend))  # noqa: S301 - our own, of just now
        assert isinstance(copy, type(backend))
        assert copy.url == backend.url
        assert copy.get("a", max_bytes=1) == b"1"
        copy.put("b", [b"2"], if_absent=True)
        assert backend.get("b", max_bytes=1) == b"2"
        copy.close()

    def test_a_handle_survives_fork(self, backend: Backend) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            pytest.skip("there is no fork on this system")
        backend.put("a/b", [pattern(400_000)])
        if _in_fork(lambda: backend.get("a/b", max_bytes=MIB) == pattern(400_000)) != 0:
            pytest.fail("a forked child could not read")
        if _in_fork(lambda: _writes_and_syncs(backend)) != 0:
            pytest.fail("a forked child could not write")
        backend.put("a/d", [pattern(400_000, 2)])
        backend.sync()
        assert backend.get("a/d", max_bytes=MIB) == pattern(400_000, 2)

    def test_url_opens_the_same_place_and_capabilities_are_sane(self, backend: Backend) -> None:
        backend.put("a", [b"1"])
        again = self.open_backend(backend.url)
        assert again.get("a", max_bytes=1) == b"1"
        assert again.url == backend.url
        again.close()
        capabilities = backend.capabilities
        assert isinstance(capabilities, Capabilities)
        assert capabilities.part_bytes > 0
        assert capabilities.concurrency > 0

    def test_errors_are_ours_and_can_be_pickled(self, backend: Backend) -> None:
        with pytest.raises(BackendError) as caught:
            backend.get("no/such", max_bytes=1)
        copy: Any = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own, of just now
        assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
        assert copy.transient is caught.value.transient

    def test_leftover_temporaries_are_not_listed_and_can_be_deleted(self, backend: Backend) -> None:
        backend.put("a/b", [b"1"])
        leftovers = [info.key for info in backend.list_temporaries("")]
        assert all(result.error is None for result in backend.delete(leftovers))
        assert [info.key for info in backend.list("")] == ["a/b"]


def _writes_and_syncs(backend: Backend) -> bool:
    backend.put("a/c", [pattern(400_000, 1)])
    backend.put("a/x", [b"1"], if_absent=True)
    backend.sync()
    return backend.get("a/c", max_bytes=MIB) == pattern(400_000, 1)


def _in_fork(work: Callable[[], bool]) -> int:
    """Exit status of a forked child that does `work`: 0 if it gave True. The child never returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1
