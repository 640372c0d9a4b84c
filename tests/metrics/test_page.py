"""docs/metrics.md against what is exported."""

from __future__ import annotations

import re
from pathlib import Path

from ckptstore.events import save_line
from ckptstore.metrics import definitions
from tests.metrics.made import COMMITTED

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(ckptstore_\w+)` \| (\w+) \| (\w+) \| (.+?) \| .+ \|$", re.MULTILINE)
PROCESS, STORE = set(definitions.OF_A_PROCESS), set(definitions.OF_A_STORE)
ROUND = set(definitions.OF_A_ROUND)


def full_name(definition) -> str:
    return f"ckptstore_{definition.name}" + ("_total" if definition.kind == "counter" else "")


def source_of(definition) -> str:
    if definition in ROUND:
        return "gc"
    return "both" if definition in PROCESS & STORE else "process" if definition in PROCESS else "store"


def test_the_table_has_every_metric():
    told = {
        (name, kind, source, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, source, labels in ROW.findall(TEXT)
    }
    assert told == {
        (
            full_name(given),
            given.kind,
            source_of(given),
            tuple(label for label in given.labels if label != "rank"),
        )
        for given in PROCESS | STORE | ROUND
    }


def test_alerts_and_graphs_ask_for_metrics_that_exist():
    known = {full_name(given) for given in PROCESS | STORE | ROUND}
    known |= {
        full_name(given) + suffix
        for given in PROCESS
        if given.kind in ("histogram", "summary")
        for suffix in ("_sum", "_count", "_bucket")
    }
    assert set(re.findall(r"\bckptstore_[a-z_]+", TEXT)) <= known


def test_the_example_of_the_log_is_of_its_form():
    shape = re.sub(r"[0-9.]+", "0", save_line(COMMITTED)).replace("gpt", "llama-0b")
    assert shape in re.sub(r"[0-9.]+", "0", TEXT)
