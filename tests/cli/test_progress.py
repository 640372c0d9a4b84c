from __future__ import annotations

import io
import time

import pytest

from ckptstore.cli.invocation import Invocation
from ckptstore.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_sees_rate_and_time_left_and_at_the_end_nothing(monkeypatch, clock):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with Progress(Invocation(), "verify") as progress:
        progress(1 << 20, 64 << 20)
        assert screen.getvalue() == ""  # too early to say anything
        clock[0] += 2.0
        progress(16 << 20, 64 << 20)
        assert screen.getvalue() == "\r\x1b[Kverify: 16.0 MiB of 64.0 MiB, 8.0 MiB/s, 6.0 s left"
        progress(17 << 20, 64 << 20)
        assert "17.0" not in screen.getvalue()  # not oftener than people read
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("screen", "quiet"), [(io.StringIO, False), (Terminal, True)])
def test_elsewhere_and_when_quiet_there_is_none(monkeypatch, clock, screen, quiet):
    stream = screen()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(Invocation(quiet=quiet), "verify") as progress:
        clock[0] += 2.0
        progress(1, 2)
    assert stream.getvalue() == ""
