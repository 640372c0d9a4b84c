"""docs/questions.md: every question in it is asked of a real store, and its answer is what the page shows.

python -m tests.inspect.test_questions      writes the page anew
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from ckptstore.inspect.formats import lines
from ckptstore.inspect.query import query
from ckptstore.manifest.questions import QUESTIONS, by_name
from tests.inspect import example

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"
FILLED = {
    "latest": {},
    "tensor_history": {"run": example.TUNED, "tensor": example.TENSOR},
    "bytes_per_component": {"run": example.TUNED},
    "best": {"metric": "val_loss"},
    "grown_tensors": {"run": example.TUNED},
    "largest_tensors": {"run": example.RUN},
    "sessions": {"run": example.RUN},
}
INTRODUCTION = """\
# Questions and answers

Each answer below is of a small store with two runs: `gpt-small`, which was resumed once, has a checkpoint
that was damaged on disk and one that somebody marked invalid; and `gpt-small-chat`, which began with the
weights of `gpt-small@1000` and trains only its last block. Your own store answers the same way:

```python
from ckptstore.inspect.query import query

store = ckptstore.open("ckpts")
for row in query(store, "SELECT run, step FROM v_checkpoints WHERE is_latest").rows:
    print(row)
```

What stands in the SQL as `:run`, `:tensor` or `:metric` is filled in by the asker: `query(store, sql, {"run":
"gpt-small"})`. `ckptstore ui` shows the same questions as web pages, with a field for each:

![A question in datasette: which steps hold a tensor, and where did it change?](images/datasette.png)

A query can only read. It sees the store as it is when it is asked, is stopped after 8 seconds, and does not
keep a training from saving. [The manifest](manifest.md) describes every table, view and column.
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with example.make(tmp_path_factory.mktemp("example") / "store") as made:
        yield made


def answer(store, question):
    return query(store, question.sql, FILLED.get(question.name, {}))


def page(store) -> str:
    parts = [INTRODUCTION]
    for question in QUESTIONS:
        filled = FILLED.get(question.name, {})
        parts.append(f"\n## {question.title}\n\n{question.about}\n\n```sql\n{question.sql}\n```\n")
        if filled:
            values = " and ".join(f"`:{name}` = `{value}`" for name, value in filled.items())
            parts.append(f"\nWith {values}:\n")
        parts.append("\n```text\n" + "\n".join(lines(answer(store, question), "table")) + "\n```\n")
    return "".join(parts)


def without_durations(text: str) -> str:
    """Durations differ from machine to machine, and with them which saves were the slowest."""
    out = []
    skip = False
    for line in text.splitlines():
        if line.startswith("## "):
            skip = "slow" in line or "How long" in line
        if not skip or not re.match(r"gpt|---", line):
            out.append(line)
    return re.sub(r" +", " ", "\n".join(out))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
def test_each_question_is_answered(store, question):
    found = answer(store, question)
    rows = list(found.rows)
    assert rows
    assert all(len(row) == len(found.columns) for row in rows)
    assert len(set(found.columns)) == len(found.columns)
    assert set(question.parameters) == set(FILLED.get(question.name, {}))


def test_the_page_shows_what_comes_out(store):
    assert without_durations(PAGE.read_text()) == without_durations(page(store))


def test_the_answers_are_right(store):
    history = list(answer(store, by_name("tensor_history")).rows)
    changed = [row[0] for row in history if row[3]]
    assert [row[0] for row in history] == list(range(1000, 1060, 10))
    assert changed == [1000, 1030]
    grown = list(answer(store, by_name("grown_tensors")).rows)
    assert ("model.embed.weight", 1030, "[512, 64]", "[576, 64]", 512 * 256, 576 * 256) in grown
    missing = list(answer(store, by_name("missing_components")).rows)
    assert missing == [(example.RUN, 900, "loader")]
    best = list(answer(store, by_name("best")).rows)
    assert best[0][1] == 900
    assert best[0][2] == min(row[2] for row in best)
    bad = list(answer(store, by_name("unrestorable")).rows)
    assert [(row[1], row[2]) for row in bad] == [(200, "damaged"), (800, "invalid")]
    sessions = list(answer(store, by_name("sessions")).rows)
    assert [(row[0], row[3], row[5]) for row in sessions] == [(1, None, 6), (2, 600, 4)]
    runs = {row[0]: row for row in answer(store, by_name("bytes_per_run")).rows}
    assert runs[example.RUN][3] == sum(c.record.new_bytes for c in store.run(example.RUN).checkpoints())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(example.make(Path(folder) / "store")))
    sys.exit(0)
