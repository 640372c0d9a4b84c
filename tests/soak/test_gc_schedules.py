"""Savers, readers and rounds through thousands of drawn schedules: `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from tests.gc.schedules.test_schedules import Past, alone, drawn, past

__all__ = ["alone", "past"]

SCHEDULES = int(os.environ.get("CKPTSTORE_SOAK_SCHEDULES", "20000"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("quarter", range(4))
def test_in_thousands_of_schedules_nothing_is_lost(past: Past, alone: None, quarter: int) -> None:
    first = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    first += quarter * SCHEDULES // 4
    for seed in range(first, first + SCHEDULES // 4):
        drawn(past, seed)
