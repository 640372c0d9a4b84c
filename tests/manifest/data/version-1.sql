-- A manifest of schema version 1, as dumped on the day it was frozen. Never edit.
PRAGMA application_id = 1667985524;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE boxes (
    tensor_id INTEGER NOT NULL REFERENCES tensors ON DELETE CASCADE,
    box INTEGER NOT NULL,
    offsets TEXT NOT NULL,
    shape TEXT NOT NULL,
    ranges TEXT NOT NULL,
    PRIMARY KEY (tensor_id, box)
) STRICT, WITHOUT ROWID;
INSERT INTO "boxes" VALUES(1,0,'[0, 0]','[4, 4]','[0:4, 0:4]');
INSERT INTO "boxes" VALUES(1,1,'[4, 0]','[4, 4]','[4:8, 0:4]');
INSERT INTO "boxes" VALUES(2,0,'[0, 0]','[4, 4]','[0:4, 0:4]');
INSERT INTO "boxes" VALUES(2,1,'[4, 0]','[4, 4]','[4:8, 0:4]');
INSERT INTO "boxes" VALUES(3,0,'[0, 0]','[4, 4]','[0:4, 0:4]');
INSERT INTO "boxes" VALUES(3,1,'[4, 0]','[4, 4]','[4:8, 0:4]');
INSERT INTO "boxes" VALUES(4,0,'[0, 0]','[4, 4]','[0:4, 0:4]');
INSERT INTO "boxes" VALUES(4,1,'[4, 0]','[4, 4]','[4:8, 0:4]');
CREATE TABLE checkpoint_tensors (
    replica_id INTEGER NOT NULL REFERENCES replicas ON DELETE CASCADE,
    tensor_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    PRIMARY KEY (replica_id, tensor_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "checkpoint_tensors" VALUES(1,1,'5513e3eabba6d75402c1c34c7365c6fac01024589d0a6996329255cd18fec5cc',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(1,2,'a93875fe509ac2fae0e0939d3ec71c4d978244c7398dd7185ca68c393426a5a6',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(1,3,'9dc6366a2003d418ace6b6c74e29980f7844abbc3511a78bcbe973e800b71574',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(1,4,'ecbe93f9c7fbf3c6a01b3bff4b6ecdd823fc43ea82010f1ee42a4293ce139a55',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(2,1,'18d6e1cac2a8adaf25577cca14db7753507f4f03a288124ce9fe2d60babd7bb0',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(2,2,'253d950f11ebdbeb4c2d54c57803deb69869b832a2e03010620d462a85d15290',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(2,3,'d939926f05444b0f4495fb9629ecbfa80d99a8ec1a20d06800ca5a3d5f4fd276',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(2,4,'0d7f0e336166042f8cc9e4c20ae427ba367c279d6e3dfd1bd7247b0fbce61d50',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(3,1,'98ce94b2b196906ca4859e068b8ef92e6de9e641972d54de4af1d6eaa6431147',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(3,2,'1d800ad9f4e99e1c61aa45473623da4013509f1ab2e23718f713de921b0eee90',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(3,3,'58c0e7476a0d98d74ec64f7d9241c9d5e7c0e0991739eb1cde0b4d173a988e14',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(3,4,'484aa6ccd17c9fe96eb955b9b56ed0c883b275301479deec1b817afe2abdaf72',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(4,1,'1032746e7e3338a630f96b947de5165b7511f00a0fb4f7fc0e99b1c74b0f77cd',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(4,2,'02925afd44e2946e583a7f6434585a77c146fcf4533cd4b3793f62f0d5b7c60c',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(4,3,'6d27ca189b30af4f85eab024881ab00a37ef4bab14248c18349e900f40510397',64,64,2);
INSERT INTO "checkpoint_tensors" VALUES(4,4,'e86574df7434a3b185fb0ee23d093e6815e565798898627fd4842d3fd36d0b26',64,64,2);
CREATE TABLE checkpoints (
    checkpoint_id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    checkpoint TEXT NOT NULL,
    replica_id INTEGER REFERENCES replicas ON DELETE SET NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    place_epoch INTEGER NOT NULL,
    place_sequence INTEGER NOT NULL,
    created_at TEXT,
    created_unix REAL,
    session TEXT NOT NULL,
    origin TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ok', 'damaged', 'invalid', 'doomed', 'expiring')),
    restorable INTEGER NOT NULL CHECK (restorable IN (0, 1)),
    is_latest INTEGER NOT NULL CHECK (is_latest IN (0, 1)),
    damaged INTEGER NOT NULL CHECK (damaged IN (0, 1)),
    damaged_reason TEXT,
    invalid_reason TEXT,
    doomed INTEGER NOT NULL CHECK (doomed IN (0, 1)),
    forgotten INTEGER NOT NULL CHECK (forgotten IN (0, 1)),
    verified_at TEXT,
    verified_unix REAL,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    metrics_json TEXT NOT NULL,
    tags_json TEXT NOT NULL,
    timings_json TEXT NOT NULL,
    UNIQUE (run_id, checkpoint)
) STRICT;
INSERT INTO "checkpoints" VALUES(1,1,'01M8KJT9G10000000000000001-0-0',1,0,1,0,1,0,'2026-11-29T12:00:00.123Z',1795953600.123,'01M8KJT9G10000000000000001','save','ok',1,0,0,NULL,NULL,0,0,NULL,NULL,4,8,256,256,0,'{"loss": 1.0}','["paper"]','{"capture": 0.25, "write": 1.5}');
INSERT INTO "checkpoints" VALUES(2,1,'01M8KJT9G10000000000000001-1-0',2,1,1,1,1,1,'2026-11-29T12:00:01.123Z',1795953601.123,'01M8KJT9G10000000000000001','save','ok',1,0,0,NULL,NULL,0,0,NULL,NULL,4,8,256,256,0,'{"loss": 0.5}','[]','{"capture": 0.25, "write": 1.5}');
INSERT INTO "checkpoints" VALUES(3,1,'01M8KJT9G10000000000000001-2-0',3,2,1,2,1,2,'2026-11-29T12:00:02.123Z',1795953602.123,'01M8KJT9G10000000000000001','save','invalid',0,0,0,NULL,'NaN',0,0,NULL,NULL,4,8,256,256,0,'{"loss": 0.3333333333333333}','[]','{"capture": 0.25, "write": 1.5}');
INSERT INTO "checkpoints" VALUES(4,1,'01M8KJT9G10000000000000001-3-0',4,3,1,3,1,3,'2026-11-29T12:00:03.123Z',1795953603.123,'01M8KJT9G10000000000000001','save','ok',1,1,0,NULL,NULL,0,0,NULL,NULL,4,8,256,256,0,'{"loss": 0.25}','[]','{"capture": 0.25, "write": 1.5}');
CREATE TABLE components (
    replica_id INTEGER NOT NULL REFERENCES replicas ON DELETE CASCADE,
    component TEXT NOT NULL,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    PRIMARY KEY (replica_id, component)
) STRICT, WITHOUT ROWID;
INSERT INTO "components" VALUES(1,'model',4,8,256,256,0);
INSERT INTO "components" VALUES(2,'model',4,8,256,256,0);
INSERT INTO "components" VALUES(3,'model',4,8,256,256,0);
INSERT INTO "components" VALUES(4,'model',4,8,256,256,0);
CREATE TABLE dooms (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    PRIMARY KEY (tier_id, run_id, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE ends (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('void', 'gone')),
    reason TEXT NOT NULL,
    PRIMARY KEY (tier_id, run_id, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE layouts (
    layout_id INTEGER PRIMARY KEY,
    layout_digest TEXT NOT NULL UNIQUE,
    chunk_bytes INTEGER NOT NULL,
    tensors INTEGER NOT NULL,
    boxes INTEGER NOT NULL,
    boxes_expanded INTEGER NOT NULL CHECK (boxes_expanded IN (0, 1))
) STRICT;
INSERT INTO "layouts" VALUES(1,'fad39bef6e95e9fac25782067f4eb72cf88e223fb3fcf97d7ff414d81add3e1f',16777216,4,8,1);
CREATE TABLE metrics (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    metric TEXT NOT NULL,
    value REAL,
    exact TEXT NOT NULL,
    PRIMARY KEY (checkpoint_id, metric)
) STRICT, WITHOUT ROWID;
INSERT INTO "metrics" VALUES(1,'loss',1.0,'1.0');
INSERT INTO "metrics" VALUES(2,'loss',0.5,'0.5');
INSERT INTO "metrics" VALUES(3,'loss',3.33333333333333314829e-01,'0.3333333333333333');
INSERT INTO "metrics" VALUES(4,'loss',0.25,'0.25');
CREATE TABLE notes (
    note_id INTEGER PRIMARY KEY,
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    note_key TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    attempt TEXT,
    number INTEGER NOT NULL,
    ulid TEXT NOT NULL,
    kind TEXT NOT NULL,
    noted_at TEXT,
    noted_unix REAL,
    author TEXT NOT NULL,
    data_json TEXT NOT NULL,
    UNIQUE (tier_id, run_id, note_key)
) STRICT;
INSERT INTO "notes" VALUES(1,1,1,'notes/llama-8b-quoted-name-74eb14219002d6a5/01M8KJT9G10000000000000001-0-0.1.00000000010000000000000000.mp','01M8KJT9G10000000000000001-0-0',NULL,1,'00000000010000000000000000','tag','2026-11-29T12:00:01.123Z',1795953601.123,'ann','{"tag": "paper"}');
INSERT INTO "notes" VALUES(2,1,1,'notes/llama-8b-quoted-name-74eb14219002d6a5/01M8KJT9G10000000000000001-2-0.1.00000000010000000000000000.mp','01M8KJT9G10000000000000001-2-0',NULL,1,'00000000010000000000000000','invalid','2026-11-29T12:00:01.123Z',1795953601.123,'ann','{"reason": "NaN"}');
CREATE TABLE pins (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    intent TEXT NOT NULL,
    run_key TEXT NOT NULL,
    attempt TEXT NOT NULL,
    kind TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    user TEXT NOT NULL,
    created_at TEXT,
    created_unix REAL,
    reason TEXT NOT NULL,
    PRIMARY KEY (tier_id, intent, run_key, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE replicas (
    replica_id INTEGER PRIMARY KEY,
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    generation INTEGER NOT NULL,
    layout_id INTEGER NOT NULL REFERENCES layouts,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    created_at TEXT,
    created_unix REAL,
    session TEXT NOT NULL,
    origin TEXT NOT NULL,
    parents_json TEXT NOT NULL,
    world_size INTEGER NOT NULL,
    host TEXT NOT NULL,
    writer TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ok', 'damaged', 'invalid', 'doomed', 'expiring')),
    restorable INTEGER NOT NULL CHECK (restorable IN (0, 1)),
    damaged_reason TEXT,
    verified_at TEXT,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL,
    saved_metrics_json TEXT NOT NULL,
    saved_tags_json TEXT NOT NULL,
    timings_json TEXT NOT NULL,
    metadata_json TEXT NOT NULL,
    not_captured_json TEXT NOT NULL,
    state_info_json TEXT NOT NULL,
    UNIQUE (tier_id, run_id, attempt)
) STRICT;
INSERT INTO "replicas" VALUES(1,1,1,1,'01M8KJT9G10000000000000001-0-0',0,1,0,1,0,'2026-11-29T12:00:00.123Z',1795953600.123,'01M8KJT9G10000000000000001','save','[]',1,'node-1','ckptstore 0.1','ok',1,NULL,NULL,4,8,256,256,0,900,'{"loss": 1.0}','[]','{"capture": 0.25, "write": 1.5}','{"lr": 0.0003, "shape": [1, 2]}','["loader"]','{}');
INSERT INTO "replicas" VALUES(2,2,1,1,'01M8KJT9G10000000000000001-1-0',0,1,1,1,1,'2026-11-29T12:00:01.123Z',1795953601.123,'01M8KJT9G10000000000000001','save','[]',1,'node-1','ckptstore 0.1','ok',1,NULL,NULL,4,8,256,256,0,900,'{"loss": 0.5}','[]','{"capture": 0.25, "write": 1.5}','{"lr": 0.0003, "shape": [1, 2]}','["loader"]','{}');
INSERT INTO "replicas" VALUES(3,3,1,1,'01M8KJT9G10000000000000001-2-0',0,1,2,1,2,'2026-11-29T12:00:02.123Z',1795953602.123,'01M8KJT9G10000000000000001','save','[]',1,'node-1','ckptstore 0.1','invalid',0,NULL,NULL,4,8,256,256,0,900,'{"loss": 0.3333333333333333}','[]','{"capture": 0.25, "write": 1.5}','{"lr": 0.0003, "shape": [1, 2]}','["loader"]','{}');
INSERT INTO "replicas" VALUES(4,4,1,1,'01M8KJT9G10000000000000001-3-0',0,1,3,1,3,'2026-11-29T12:00:03.123Z',1795953603.123,'01M8KJT9G10000000000000001','save','[]',1,'node-1','ckptstore 0.1','ok',1,NULL,NULL,4,8,256,256,0,900,'{"loss": 0.25}','[]','{"capture": 0.25, "write": 1.5}','{"lr": 0.0003, "shape": [1, 2]}','["loader"]','{}');
CREATE TABLE runs (
    run_id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    run_key TEXT NOT NULL UNIQUE,
    created_at TEXT,
    created_unix REAL
) STRICT;
INSERT INTO "runs" VALUES(1,'llama 8b/''quoted''
name','llama-8b-quoted-name-74eb14219002d6a5','2026-11-29T12:00:00.123Z',1795953600.123);
CREATE TABLE schema_migrations (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at TEXT NOT NULL
) STRICT;
INSERT INTO "schema_migrations" VALUES(1,'first','2026-11-29T19:53:19.288Z');
CREATE TABLE sessions (
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    session TEXT NOT NULL,
    session_key TEXT NOT NULL,
    host TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at TEXT,
    started_unix REAL,
    resumed_from TEXT,
    rewound INTEGER NOT NULL CHECK (rewound IN (0, 1)),
    PRIMARY KEY (run_id, epoch)
) STRICT;
INSERT INTO "sessions" VALUES(1,1,'01M8KJT9G10000000000000001','k','node-1','boot',4242,'2026-11-29T12:00:00.123Z',1795953600.123,NULL,0);
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store_uuid TEXT NOT NULL,
    file_inode TEXT NOT NULL,
    created_at TEXT NOT NULL,
    written_by TEXT NOT NULL
) STRICT;
INSERT INTO "store" VALUES(1,'0f8fad5b-d9cb-469f-a165-70867728950e','2287314','2026-11-29T19:53:19.288Z','ckptstore 0.1.0');
CREATE TABLE tags (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    tag TEXT NOT NULL,
    PRIMARY KEY (checkpoint_id, tag)
) STRICT, WITHOUT ROWID;
INSERT INTO "tags" VALUES(1,'paper');
CREATE TABLE tensors (
    tensor_id INTEGER PRIMARY KEY,
    layout_id INTEGER NOT NULL REFERENCES layouts ON DELETE CASCADE,
    tensor TEXT NOT NULL,
    component TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,
    elements INTEGER,
    kind TEXT NOT NULL,
    content_tensor_id INTEGER NOT NULL
) STRICT;
INSERT INTO "tensors" VALUES(1,1,'model.layers.0.weight','model','bfloat16','[8, 4]',32,'parameter',1);
INSERT INTO "tensors" VALUES(2,1,'model.layers.1.weight','model','bfloat16','[8, 4]',32,'parameter',2);
INSERT INTO "tensors" VALUES(3,1,'model.layers.2.weight','model','bfloat16','[8, 4]',32,'parameter',3);
INSERT INTO "tensors" VALUES(4,1,'model.layers.3.weight','model','bfloat16','[8, 4]',32,'parameter',4);
INSERT INTO "tensors" VALUES(5,1,'model.head.weight','model','bfloat16','[8, 4]',32,'parameter',1);
CREATE TABLE tiers (
    tier_id INTEGER PRIMARY KEY,
    tier_uuid TEXT NOT NULL UNIQUE,
    tier_order INTEGER NOT NULL,
    name TEXT NOT NULL,
    url TEXT NOT NULL
) STRICT;
INSERT INTO "tiers" VALUES(1,'7c9e6679-7425-40de-944b-e07fc1f90ae7',0,'local','file:///ckpts');
CREATE TABLE timings (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    phase TEXT NOT NULL,
    seconds REAL,
    PRIMARY KEY (checkpoint_id, phase)
) STRICT, WITHOUT ROWID;
INSERT INTO "timings" VALUES(1,'capture',0.25);
INSERT INTO "timings" VALUES(1,'write',1.5);
INSERT INTO "timings" VALUES(2,'capture',0.25);
INSERT INTO "timings" VALUES(2,'write',1.5);
INSERT INTO "timings" VALUES(3,'capture',0.25);
INSERT INTO "timings" VALUES(3,'write',1.5);
INSERT INTO "timings" VALUES(4,'capture',0.25);
INSERT INTO "timings" VALUES(4,'write',1.5);
CREATE INDEX runs_run ON runs (run);
CREATE INDEX sessions_resumed_from ON sessions (run_id, resumed_from);
CREATE INDEX tensors_layout ON tensors (layout_id);
CREATE INDEX tensors_tensor ON tensors (tensor, layout_id);
CREATE INDEX checkpoints_step ON checkpoints (run_id, step);
CREATE INDEX checkpoints_place ON checkpoints (run_id, place_epoch, place_sequence, checkpoint, restorable);
CREATE UNIQUE INDEX checkpoints_latest ON checkpoints (run_id) WHERE is_latest;
CREATE INDEX checkpoints_name ON checkpoints (checkpoint);
CREATE INDEX checkpoints_replica ON checkpoints (replica_id);
CREATE INDEX replicas_checkpoint ON replicas (checkpoint_id, tier_id);
CREATE INDEX replicas_layout ON replicas (layout_id);
CREATE INDEX replicas_run ON replicas (run_id);
CREATE INDEX metrics_metric ON metrics (metric, value);
CREATE INDEX tags_tag ON tags (tag);
CREATE INDEX notes_checkpoint ON notes (run_id, checkpoint);
CREATE INDEX pins_attempt ON pins (attempt);
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
LEFT JOIN layouts AS l ON l.layout_id = r.layout_id;
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
JOIN checkpoint_tensors AS x ON x.replica_id = r.replica_id AND x.tensor_id = t.content_tensor_id;
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
WINDOW w AS (PARTITION BY c.run_id ORDER BY c.epoch, c.sequence, c.checkpoint);
CREATE VIEW v_metrics AS
SELECT runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.restorable, m.metric, m.value, m.exact
FROM metrics AS m
JOIN checkpoints AS c USING (checkpoint_id)
JOIN runs USING (run_id);
CREATE VIEW v_timings AS
SELECT runs.run, c.step, c.checkpoint, c.epoch, c.sequence, c.created_at, t.phase, t.seconds, c.new_bytes
FROM timings AS t
JOIN checkpoints AS c USING (checkpoint_id)
JOIN runs USING (run_id);
CREATE VIEW v_replicas AS
SELECT
    runs.run, c.step, c.checkpoint, t.name AS tier, t.tier_order, r.attempt, r.generation,
    r.state, r.restorable, r.damaged_reason, r.verified_at, r.verified_at IS NULL AS unverified,
    c.replica_id = r.replica_id AS counts, r.created_at, r.logical_bytes, r.new_bytes, r.reused_bytes,
    r.record_bytes, t.url
FROM replicas AS r
JOIN checkpoints AS c USING (checkpoint_id)
JOIN tiers AS t ON t.tier_id = r.tier_id
JOIN runs ON runs.run_id = c.run_id;
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
ORDER BY runs.run, t.tier_order;
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
JOIN runs USING (run_id);
COMMIT;
