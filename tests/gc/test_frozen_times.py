"""A file system whose times stand still."""

from __future__ import annotations

import dataclasses

from ckptstore.testing import FaultBackend
from tests.crash._support import check_place
from tests.gc.made import announce, ends_as, garbage, gc, model_of, trained


class Frozen(FaultBackend):
    """Every object was written at the same moment, whenever one asks."""

    def head(self, key):
        return dataclasses.replace(super().head(key), modified=1.7e9)

    def list(self, prefix):
        return (dataclasses.replace(info, modified=1.7e9) for info in super().list(prefix))


def test_c066_a_round_collects_though_no_time_ever_changes():
    with trained(1, 2, 3) as (place, pins):
        report = gc(Frozen(place), pins[1])
        assert report.collected == (pins[1],)
        assert report.deleted_objects > 0
        assert not garbage(place)
        check_place(place, model_of(pins, 2, 3))


def test_c066_a_saver_that_cannot_be_told_to_be_silent_keeps_what_it_pins():
    with trained(1, 2) as (place, pins):
        announce(place, "save", pins[1])
        assert not gc(Frozen(place), pins[1]).collected
        assert ends_as(place, pins[1]) == "commit"
        check_place(place, model_of(pins, 1, 2))
