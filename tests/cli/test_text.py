from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cli.table import Column, table
from ckptstore.cli.text import ago, clip, duration, parse_size, shown, size, width


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("16MiB", 16 << 20),
        ("16m", 16 << 20),
        ("1.5 GiB", 3 << 29),
        ("10GB", 10**10),
        ("7 B", 7),
        ("2T", 2 << 40),
        ("5kB", 5000),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "MiB", "1..5M", "1 2", "\u0661", "1E5", "-1", "1iB", "9" * 40])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (39_102_032, "37.3 MiB"),
        (1 << 60, "1024.0 PiB"),
        (None, "-"),
    ],
)
def test_sizes_are_shown(nbytes, expected):
    assert size(nbytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (172800, "2 d ago"),
    ],
)
def test_ages_are_shown(seconds, expected):
    assert ago(1e9 - seconds, 1e9) == expected


def test_odd_ages():
    assert ago(None, 1e9) == "-"
    assert ago(1e9 + 3600, 1e9) == "in the future"
    assert ago(1e9 + 5, 1e9) == "0 s ago"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (61, "61 s"), (250, "4 min 10 s"), (11100, "3 h 5 min")],
)
def test_durations_are_shown(seconds, expected):
    assert duration(seconds) == expected


def test_width_counts_columns():
    assert width("abc") == 3
    assert width("名前") == 4
    assert width("e\u0301") == 1


@given(st.text(max_size=30), st.integers(1, 20))
def test_what_is_shown_is_printable_and_clipped_to_its_columns(text, columns):
    line = shown(text)
    assert line.isprintable()
    assert width(clip(line, columns)) <= columns


@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=5))
def test_columns_are_aligned_whatever_the_names_are(rows):
    cells = [(shown(name) or "-", shown(value) or "-") for name, value in rows]
    lines = table([Column("NAME"), Column("VALUE", right=True)], cells)
    assert len({width(line) for line in lines}) == 1


def test_a_narrow_terminal_drops_then_clips():
    columns = [Column("NAME", flexible=True), Column("STEP", right=True), Column("ID", droppable=True)]
    rows = [("a name that is rather long", "12", "01M8MDRYDX1NGFR0FSWN2YJB53-10-1")]
    assert "01M8" in table(columns, rows)[1]
    narrow = table(columns, rows, limit=34)
    assert narrow[0].split() == ["NAME", "STEP"]
    assert "rather long" in narrow[1]
    assert table(columns, rows, limit=16)[1] == "a name th…    12"


def test_empty_columns_are_left_out():
    assert table([Column("A"), Column("B"), Column("C")], [("1", "", "2")]) == ["A  C", "1  2"]
