"""The views: what people query. Made anew at every migration, so they are not versioned."""

from __future__ import annotations

VIEWS: dict[str, str] = {
    "v_checkpoints": """
CREATE VIEW v_checkpoints AS
SELECT
    runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.created_at, c.state, c.restorable, c.is_latest,
    c.damaged, c.damaged_reason, c.invalid_reason, c.doomed, c.forgotten, c.verified_at,
    c.metrics_json AS metrics, c.tags_json AS tags,
    c.tensors, c.chunks, c.logical_bytes, c.new_bytes, c.reused_bytes,
    c.timings_json AS timings, c.session, c.origin, r.parents_json AS parents, r.world_size, r.host, r.writer,
    r.metadata_json AS metadata, r.not_captured_json AS not_captured,
    r.attempt, r.generation, t.name AS tier, l.layout_digest, l.boxes, l.boxes_expanded, runs.run_key
FROM checkpoints AS c
JOIN runs USING (run_id)
LEFT JOIN replicas AS r ON r.replica_id = c.replica_id
LEFT JOIN tiers AS t ON t.tier_id = r.tier_id
LEFT JOIN layouts AS l ON l.layout_id = r.layout_id""",
    # From the tensor's name to its layouts, to the replicas with that layout, to one row each: no step
    # scans checkpoint_tensors, the one table that is large.
    "v_tensors": """
CREATE VIEW v_tensors AS
SELECT
    runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.state, c.restorable,
    t.tensor, t.component, t.dtype, t.shape, t.elements, t.kind,
    x.digest, x.bytes, x.new_bytes, x.chunks,
    (SELECT tied.tensor FROM tensors AS tied
      WHERE tied.tensor_id = t.content_tensor_id AND tied.tensor_id <> t.tensor_id) AS alias_of,
    (SELECT count(*) FROM boxes WHERE boxes.tensor_id = t.content_tensor_id) AS boxes,
    l.boxes_expanded
FROM tensors AS t
JOIN layouts AS l USING (layout_id)
JOIN replicas AS r ON r.layout_id = t.layout_id
JOIN checkpoints AS c ON c.replica_id = r.replica_id
JOIN runs ON runs.run_id = c.run_id
JOIN checkpoint_tensors AS x ON x.replica_id = r.replica_id AND x.tensor_id = t.content_tensor_id""",
    "v_reuse": """
CREATE VIEW v_reuse AS
SELECT
    runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.created_at,
    c.logical_bytes, c.new_bytes, c.reused_bytes,
    round(100.0 * c.reused_bytes / nullif(c.new_bytes + c.reused_bytes, 0), 2) AS reused_percent,
    sum(c.new_bytes) OVER w AS run_new_bytes,
    sum(c.logical_bytes) OVER w AS run_logical_bytes,
    c.tensors, c.chunks
FROM checkpoints AS c
JOIN runs USING (run_id)
WINDOW w AS (PARTITION BY c.run_id ORDER BY c.epoch, c.sequence, c.checkpoint)""",
    "v_metrics": """
CREATE VIEW v_metrics AS
SELECT runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.restorable, m.metric, m.value, m.exact
FROM metrics AS m
JOIN checkpoints AS c USING (checkpoint_id)
JOIN runs USING (run_id)""",
    "v_timings": """
CREATE VIEW v_timings AS
SELECT runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.created_at, t.phase, t.seconds, c.new_bytes
FROM timings AS t
JOIN checkpoints AS c USING (checkpoint_id)
JOIN runs USING (run_id)""",
    "v_replicas": """
CREATE VIEW v_replicas AS
SELECT
    runs.run, c.step, c.checkpoint, t.name AS tier, t.tier_order, r.attempt, r.generation,
    r.state, r.restorable, r.damaged_reason, r.verified_at, r.verified_at IS NULL AS unverified,
    c.replica_id = r.replica_id AS counts, r.created_at, r.logical_bytes, r.new_bytes, r.reused_bytes,
    r.record_bytes, t.url
FROM replicas AS r
JOIN checkpoints AS c USING (checkpoint_id)
JOIN tiers AS t ON t.tier_id = r.tier_id
JOIN runs ON runs.run_id = c.run_id""",
    "v_tiers": """
CREATE VIEW v_tiers AS
SELECT
    runs.run, t.name AS tier, t.tier_order,
    count(DISTINCT r.checkpoint_id) AS checkpoints,
    count(DISTINCT iif(r.restorable, r.checkpoint_id, NULL)) AS restorable,
    (SELECT count(*) FROM checkpoints AS c WHERE c.run_id = runs.run_id)
        - count(DISTINCT r.checkpoint_id) AS only_elsewhere,
    coalesce(sum(r.damaged_reason IS NOT NULL), 0) AS damaged,
    coalesce(sum(r.verified_at IS NULL), 0) AS unverified,
    max(iif(r.restorable, r.step, NULL)) AS highest_restorable_step,
    min(r.verified_at) AS oldest_verified_at,
    coalesce(sum(r.new_bytes), 0) AS new_bytes,
    t.url
FROM runs
CROSS JOIN tiers AS t
LEFT JOIN replicas AS r ON r.run_id = runs.run_id AND r.tier_id = t.tier_id
GROUP BY runs.run_id, t.tier_id
ORDER BY runs.run, t.tier_order""",
    "v_retention": """
CREATE VIEW v_retention AS
WITH pinned AS (
    SELECT r.checkpoint_id, count(DISTINCT p.intent) AS pins
    FROM pins AS p
    JOIN runs ON runs.run_key = p.run_key
    JOIN replicas AS r ON r.tier_id = p.tier_id AND r.run_id = runs.run_id AND r.attempt = p.attempt
    GROUP BY r.checkpoint_id
),
tagged AS (SELECT checkpoint_id, count(*) AS tags FROM tags GROUP BY checkpoint_id),
ranked AS (
    SELECT
        c.*,
        iif(c.restorable, row_number() OVER (
            PARTITION BY c.run_id, c.restorable
            ORDER BY c.place_epoch DESC, c.place_sequence DESC, c.checkpoint DESC), NULL) AS newest_rank,
        row_number() OVER (
            PARTITION BY c.run_id, c.restorable AND c.verified_unix IS NOT NULL
            ORDER BY c.place_epoch DESC, c.place_sequence DESC, c.checkpoint DESC) AS verified_rank
    FROM checkpoints AS c
),
judged AS (
    SELECT
        ranked.*,
        restorable AND verified_unix IS NOT NULL AND verified_rank = 1 AS newest_verified,
        coalesce(tagged.tags, 0) AS tag_count,
        coalesce(pinned.pins, 0) AS pin_count
    FROM ranked
    LEFT JOIN tagged USING (checkpoint_id)
    LEFT JOIN pinned USING (checkpoint_id)
)
SELECT
    runs.run, j.step, j.checkpoint, j.created_at, j.state, j.restorable, j.newest_rank, j.is_latest,
    j.newest_verified, j.tags_json AS tags, j.pin_count AS pins,
    j.damaged, j.invalid_reason, j.doomed, j.forgotten,
    j.state = 'expiring' AS expiring,
    nullif(substr(
        iif(j.is_latest, ', newest restorable', '') || iif(j.newest_verified, ', newest verified', '')
        || iif(j.tag_count > 0, ', tag', '') || iif(j.pin_count > 0, ', pin', ''), 3), '') AS held_by,
    j.new_bytes
FROM judged AS j
JOIN runs USING (run_id)""",
}


def view_statements() -> list[str]:
    """What makes all views, whatever stood there before."""
    return [f"DROP VIEW IF EXISTS {name}" for name in reversed(VIEWS)] + list(VIEWS.values())
