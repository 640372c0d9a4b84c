"""Questions that people ask a store, with their SQL: for docs/questions.md and for `ckptstore ui`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        name: short, fit for a URL.
        title: the question.
        about: what to know about the answer.
        sql: one SELECT; ``:run``, ``:tensor`` and ``:metric`` are what the asker fills in.
    """

    name: str
    title: str
    about: str
    sql: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """What the asker fills in."""
        return tuple(name for name in ("run", "tensor", "metric") if f":{name}" in self.sql)


QUESTIONS: tuple[Question, ...] = (
    Question(
        "latest",
        "What is the latest checkpoint of every run?",
        "What a restore would take now. A checkpoint gone back to is the latest until the next save.",
        """\
SELECT run, step, created_at, logical_bytes, metrics
FROM v_checkpoints
WHERE is_latest
ORDER BY run;""",
    ),
    Question(
        "tensor_history",
        "Which steps hold a tensor, and where did it change?",
        "Equal digests are equal bytes: nothing was read to say so. The first row is where it first appears.",
        """\
WITH steps AS (
    SELECT step, state, shape, digest, new_bytes, epoch, sequence,
           lag(digest) OVER (ORDER BY epoch, sequence) AS before
    FROM v_tensors
    WHERE run = :run AND tensor = :tensor
)
SELECT step, state, shape, digest IS NOT before AS changed, new_bytes, substr(digest, 1, 12) AS content
FROM steps
ORDER BY epoch, sequence;""",
    ),
    Question(
        "bytes_per_run",
        "How many bytes does each run hold, and what did reuse save?",
        "New bytes were written by the saves; the rest of the logical bytes was there already. What deleting "
        "would free is another question: `ckptstore du` answers it.",
        """\
SELECT run, count(*) AS checkpoints, sum(logical_bytes) AS logical_bytes, sum(new_bytes) AS new_bytes,
       sum(reused_bytes) AS reused_bytes,
       round(100.0 * sum(reused_bytes) / nullif(sum(logical_bytes), 0), 1) AS reused_percent
FROM v_reuse
GROUP BY run
ORDER BY sum(new_bytes) DESC;""",
    ),
    Question(
        "bytes_per_component",
        "Which part of the state costs the bytes, step by step?",
        "A component is a top-level key of the state.",
        """\
SELECT c.step, p.component, p.tensors, p.logical_bytes, p.new_bytes
FROM checkpoints AS c
JOIN runs USING (run_id)
JOIN components AS p USING (replica_id)
WHERE runs.run = :run
ORDER BY c.epoch DESC, c.sequence DESC, p.component
LIMIT 30;""",
    ),
    Question(
        "best",
        "Which checkpoints are the best by a metric?",
        "Smallest first; DESC for the largest. NaN never wins, and what cannot be restored is left out.",
        """\
SELECT run, step, value, checkpoint
FROM v_metrics
WHERE metric = :metric AND value IS NOT NULL AND restorable
ORDER BY value, epoch DESC, sequence DESC
LIMIT 5;""",
    ),
    Question(
        "tiers",
        "What is on which tier, and how much of it was never verified?",
        "`ckptstore verify` reads everything back. A damaged record counts as not verified.",
        """\
SELECT run, tier, checkpoints, restorable, only_elsewhere, damaged, unverified, oldest_verified_at
FROM v_tiers;""",
    ),
    Question(
        "unverified",
        "Which checkpoints were never verified, or not since they were damaged?",
        "The newest first: they are the ones that a restart would take.",
        """\
SELECT run, step, tier, state, created_at, damaged_reason
FROM v_replicas
WHERE unverified
ORDER BY created_at DESC
LIMIT 20;""",
    ),
    Question(
        "unrestorable",
        "Which checkpoints cannot be restored, and why?",
        "They are never taken unasked, and never deleted in silence.",
        """\
SELECT run, step, state, coalesce(damaged_reason, invalid_reason) AS reason
FROM v_checkpoints
WHERE NOT restorable
ORDER BY run, epoch, sequence;""",
    ),
    Question(
        "save_times",
        "How long did saves take, and in which phase?",
        "Seconds by the saver's clock. While a save is not in the background, their sum is training's pause.",
        """\
SELECT run, phase, count(*) AS saves, round(avg(seconds), 4) AS mean_seconds,
       round(max(seconds), 4) AS longest_seconds
FROM v_timings
GROUP BY run, phase
ORDER BY run, sum(seconds) DESC;""",
    ),
    Question(
        "slowest_saves",
        "Which saves were the slowest?",
        "Beside the bytes that each had to write.",
        """\
SELECT run, step, created_at, round(sum(seconds), 4) AS total_seconds, new_bytes
FROM v_timings
GROUP BY checkpoint, run
ORDER BY sum(seconds) DESC
LIMIT 10;""",
    ),
    Question(
        "grown_tensors",
        "Which tensors grew or shrank, and when?",
        "A vocabulary was extended, a cache filled up. Only where a run's layout changed can a size have "
        "changed, so only those checkpoints are looked at.",
        """\
WITH layouts_in_order AS (
    SELECT c.replica_id, r.layout_id, c.step, c.epoch, c.sequence,
           lag(r.layout_id) OVER (ORDER BY c.epoch, c.sequence) AS layout_before
    FROM checkpoints AS c
    JOIN runs USING (run_id)
    JOIN replicas AS r USING (replica_id)
    WHERE runs.run = :run
),
sizes AS (
    SELECT t.tensor, k.step, k.epoch, k.sequence, t.shape, x.bytes,
           lag(x.bytes) OVER w AS bytes_before, lag(t.shape) OVER w AS shape_before
    FROM layouts_in_order AS k
    JOIN tensors AS t USING (layout_id)
    JOIN checkpoint_tensors AS x ON x.replica_id = k.replica_id AND x.tensor_id = t.content_tensor_id
    WHERE k.layout_id IS NOT k.layout_before
    WINDOW w AS (PARTITION BY t.tensor ORDER BY k.epoch, k.sequence)
)
SELECT tensor, step, shape_before, shape, bytes_before, bytes
FROM sizes
WHERE bytes <> bytes_before
ORDER BY epoch, sequence, tensor;""",
    ),
    Question(
        "largest_tensors",
        "Which are the largest tensors of the latest checkpoint?",
        "Tied tensors have one content under several names; only the first is listed.",
        """\
SELECT t.tensor, t.dtype, t.shape, x.bytes, x.chunks, x.new_bytes
FROM checkpoints AS c
JOIN runs USING (run_id)
JOIN checkpoint_tensors AS x USING (replica_id)
JOIN tensors AS t USING (tensor_id)
WHERE runs.run = :run AND c.is_latest
ORDER BY x.bytes DESC, t.tensor
LIMIT 10;""",
    ),
    Question(
        "missing_components",
        "Which checkpoints miss a component that others of their run have?",
        "Such a checkpoint loads, but training may not be able to go on from it as it was.",
        """\
WITH usual AS (
    SELECT DISTINCT c.run_id, p.component
    FROM checkpoints AS c
    JOIN components AS p USING (replica_id)
)
SELECT runs.run, c.step, group_concat(usual.component, ', ') AS missing
FROM checkpoints AS c
JOIN runs USING (run_id)
JOIN usual USING (run_id)
LEFT JOIN components AS p ON p.replica_id = c.replica_id AND p.component = usual.component
WHERE p.component IS NULL
GROUP BY c.checkpoint_id
ORDER BY runs.run, c.epoch, c.sequence;""",
    ),
    Question(
        "sessions",
        "When was a run started, and what did it resume from?",
        "Each start is a session with a number. Null: it began with nothing.",
        """\
SELECT s.epoch, s.started_at, from_run.run AS resumed_run, c.step AS resumed_step, s.rewound,
       (SELECT count(*) FROM checkpoints AS x WHERE x.run_id = s.run_id AND x.epoch = s.epoch) AS saves
FROM sessions AS s
JOIN runs USING (run_id)
LEFT JOIN checkpoints AS c ON c.checkpoint = s.resumed_from
LEFT JOIN runs AS from_run ON from_run.run_id = c.run_id
WHERE runs.run = :run
ORDER BY s.epoch;""",
    ),
)


def by_name(name: str) -> Question:
    """The question of that name; raises KeyError."""
    return {question.name: question for question in QUESTIONS}[name]
