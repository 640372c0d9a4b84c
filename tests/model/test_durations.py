import math

import pytest

from ckptstore.errors import UsageError
from ckptstore.model.durations import duration_text, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (25, 25.0),
        (0.5, 0.5),
        ("11135", 11135.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("25 s", 25.0),
        ("25s", 25.0),
        (" 20min ", 1200.0),
        ("20 Minutes", 1200.0),
        ("1.5h", 5400.0),
        ("1 h 30 min", 5400.0),
        ("1h30min5s", 5405.0),
        ("2.5d", 216000.0),
        ("1week", 604800.0),
        ("250 ms", 0.25),
    ],
)
def test_a_length_of_time_is_read(text, seconds):
    found = seconds_of(text, "mtbf")
    assert type(found) is float
    assert found == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "soon",
            "h",
            "5 parsecs",
            "5m",
            "3 3s",
            "1h 30",
            "-3s",
            "1,5h",
            "nan",
            "inf",
            "0x10",
            "٣s",
        ),
        *("1_000", "1e999", "1e999s", "5s!", "1:30"),
        *(-1, -0.5, math.nan, math.inf, True, None, b"5", [5], 10**400),
    ],
)
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(UsageError, match="mtbf must be a length of time") as error:
        seconds_of(text, "mtbf")
    assert "20min" in error.value.hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00123, "0.00123 s"),
        (59.96, "60 s"),
        (60, "1 min"),
        (84.4, "84.4 s"),
        (119.96, "120 s"),
        (333.7, "5.56 min"),
        (1155.9, "19.3 min"),
        (3600, "1 h"),
        (23400, "6.5 h"),
        (4623.8, "77.1 min"),
        (11135, "3.09 h"),
        (178161, "49.5 h"),
        (54 * 86400, "54 d"),
        (1e9, "11574 d"),
    ],
)
def test_a_length_of_time_is_shown(seconds, text):
    assert duration_text(seconds) == text
