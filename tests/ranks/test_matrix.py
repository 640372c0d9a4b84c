"""Any layout saved, any layout loaded: content exact, and little read that is not needed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

import ckptstore
from tests.ranks import counted, layouts
from tests.ranks.layouts import Case
from tests.ranks.pool import RankPool

CHUNK_BYTES = 1 << 10
SHARED = False

_numbers = itertools.count()

# Shrinking takes dozens of runs on real processes; the draw itself is small enough to be read.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check_case(pool: RankPool, folder: Path, case: Case) -> None:
    """Saves and loads it, in a store of its own; all ranks of a pool are on one host."""
    number = next(_numbers)
    directory = folder / f"store-{number}"
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    run = {True: pool.run_plain, False: pool.run}
    saved = run[case.saving.plain](
        counted.save_case, str(directory), case, f"save-{number}", world=case.saving.world
    )
    assert len({checkpoint for checkpoint, _ in saved}) == 1
    loaded = run[case.loading.plain](
        counted.load_case, str(directory), case, f"load-{number}", world=case.loading.world
    )
    for rank, found in enumerate(loaded):
        assert not found.differing, f"rank {rank}: {found.differing}"
        assert found.values == {"steps": 7, "of": ["a", 0]}
    with ckptstore.open(directory) as store:
        checkpoint = store.run(counted.RUN).latest
        assert checkpoint is not None
        assert checkpoint.id == saved[0][0]
        _check_whole(checkpoint, case)
        wanted = [found.wanted for found in loaded]
        readers = [counted.together(wanted)] if case.together and SHARED else wanted
        assert sum(found.read for found in loaded) <= counted.most_bytes(checkpoint, readers)
    shutil.rmtree(directory)


def _check_whole(checkpoint: ckptstore.Checkpoint, case: Case) -> None:
    """One process without ranks loads the logical tensors."""
    loaded = checkpoint.load()["model"]
    assert sorted(loaded) == sorted(drawn.name for drawn in case.tensors)
    for drawn in case.tensors:
        whole = loaded[drawn.name]
        assert tuple(whole.shape) == drawn.shape
        assert str(whole.dtype).removeprefix("torch.") == drawn.dtype
        expected = layouts.content(drawn.name, drawn.shape, drawn.dtype)
        assert b"".join(layouts.bytes_of(whole)) == expected.tobytes()


@given(case=layouts.cases())
@settings(max_examples=12, phases=PHASES, suppress_health_check=CHECKS)
def test_what_any_ranks_save_any_others_load(rank_pool, tmp_path, case):
    check_case(rank_pool, tmp_path, case)
