"""Hundreds of layouts, saved and loaded by real processes: `make soak`."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings

from tests.ranks import layouts
from tests.ranks.pool import shared_pool
from tests.ranks.test_matrix import CHECKS, PHASES, check_case

DRAWS = int(os.environ.get("CKPTSTORE_SOAK_LAYOUTS", "300"))


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.timeout(7200)
@given(case=layouts.cases())
@settings(max_examples=DRAWS, phases=PHASES, suppress_health_check=CHECKS, derandomize=False, print_blob=True)
def test_whatever_any_ranks_save_any_others_load(tmp_path, case):
    check_case(shared_pool(), tmp_path, case)
