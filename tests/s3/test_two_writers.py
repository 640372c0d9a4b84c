"""Two writers of one name in a bucket, at the same moment."""

from __future__ import annotations

import contextlib
import threading

import pytest

from ckptstore.errors import ObjectExistsError
from ckptstore.testing.contract import pattern
from ckptstore_s3 import S3Backend

pytestmark = pytest.mark.s3

PART_BYTES = 5 << 20
ROUNDS = 4


def both(work):
    """Does it in two threads that start at once; what each returned or raised."""
    start = threading.Barrier(2)
    found = [None, None]

    def one(number):
        start.wait()
        try:
            found[number] = work(number)
        except ObjectExistsError as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def writers(s3_url):
    with contextlib.ExitStack() as stack:
        made = [S3Backend.from_url(s3_url, {"part_bytes": PART_BYTES}) for _ in range(2)]
        for backend in made:
            stack.callback(backend.close)
        yield made


def test_c076_the_same_chunk_in_parts_from_two_writers_is_whole(writers):
    content = pattern(PART_BYTES + 16)
    for n in range(2):
        assert both(lambda writer, n=n: writers[writer].put(f"chunks/{n}", [content])) == [None, None]
        buffer = bytearray(len(content))
        writers[0].read_into(f"chunks/{n}", 0, memoryview(buffer))
        assert bytes(buffer) == content


@pytest.mark.parametrize("size", [1000, PART_BYTES + 1])
def test_c076_of_two_records_under_one_name_one_wins_whole(writers, size):
    if not writers[0].capabilities.create_if_absent:
        pytest.skip("the server has no conditional PUT")
    contents = [pattern(size, number) for number in (1, 2)]
    for n in range(ROUNDS if size < PART_BYTES else 1):
        key = f"commits/{n}"
        found = both(lambda writer, key=key: writers[writer].put(key, [contents[writer]], if_absent=True))
        assert [type(one) for one in found].count(ObjectExistsError) == 1
        assert writers[0].get(key, max_bytes=size) == contents[found.index(None)]
