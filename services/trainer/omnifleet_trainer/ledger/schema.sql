-- A lineage is one unbroken life of the weights; a resume or rollback starts a new one at a step of its parent.
CREATE TABLE IF NOT EXISTS lineages (
    id TEXT PRIMARY KEY,
    parent TEXT,
    from_step INTEGER NOT NULL,
    started_unix_ms INTEGER NOT NULL
);

-- A prompt as it occurs in the order of training: once an epoch. This table is the data cursor.
CREATE TABLE IF NOT EXISTS occurrences (
    id INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'leased', 'done', 'given_up')),
    failures INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,
    error TEXT,
    UNIQUE (epoch, position)
);
CREATE INDEX IF NOT EXISTS occurrences_by_state ON occurrences (state, epoch, position);

-- outcome is NULL while the attempt runs.
CREATE TABLE IF NOT EXISTS attempts (
    id TEXT PRIMARY KEY,
    occurrence INTEGER NOT NULL REFERENCES occurrences (id),
    lineage TEXT NOT NULL REFERENCES lineages (id),
    version INTEGER NOT NULL,
    outcome TEXT,
    error TEXT,
    started_unix_ms INTEGER NOT NULL,
    ended_unix_ms INTEGER
);
CREATE INDEX IF NOT EXISTS attempts_by_occurrence ON attempts (occurrence);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome);

CREATE TABLE IF NOT EXISTS leases (
    occurrence INTEGER PRIMARY KEY REFERENCES occurrences (id),
    attempt TEXT NOT NULL UNIQUE REFERENCES attempts (id),
    owner TEXT NOT NULL,
    expires_unix_ms INTEGER NOT NULL
);

-- What one scored attempt brought; its id is the attempt's. At most one group of an occurrence is alive.
CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY REFERENCES attempts (id),
    occurrence INTEGER NOT NULL REFERENCES occurrences (id),
    prompt_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready' CHECK (state IN ('ready', 'consumed', 'expired')),
    oldest_version INTEGER NOT NULL,
    newest_version INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    payload BLOB NOT NULL,                -- empty once retention took it
    media TEXT NOT NULL DEFAULT ''        -- digests, in the order of the prompt, separated by spaces
);
CREATE UNIQUE INDEX IF NOT EXISTS one_live_group ON groups (occurrence) WHERE state != 'expired';
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state);
CREATE INDEX IF NOT EXISTS full_groups ON groups (state) WHERE payload != x'';

CREATE TABLE IF NOT EXISTS trajectories (
    id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups (id),
    sample INTEGER NOT NULL,
    reward REAL NOT NULL,
    tokens INTEGER NOT NULL,
    payload BLOB NOT NULL,                -- empty once retention took it
    reward_version TEXT NOT NULL DEFAULT '',
    spans TEXT NOT NULL DEFAULT '',       -- JSON: [lineage, number, first token, end, worker] each
    UNIQUE (group_id, sample)
);

-- Weights that made tokens; spans name them by lineage and number.
CREATE TABLE IF NOT EXISTS weights (
    lineage TEXT NOT NULL,
    number INTEGER NOT NULL,
    manifest TEXT NOT NULL,
    PRIMARY KEY (lineage, number)
);

-- A rollback voids what was trained after its checkpoint: those updates are not in the surviving weights.
CREATE TABLE IF NOT EXISTS consumptions (
    trajectory TEXT NOT NULL REFERENCES trajectories (id),
    lineage TEXT NOT NULL REFERENCES lineages (id),
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    voided_by TEXT REFERENCES lineages (id)
);
CREATE UNIQUE INDEX IF NOT EXISTS consumed_once ON consumptions (trajectory) WHERE voided_by IS NULL;
CREATE INDEX IF NOT EXISTS consumptions_by_step ON consumptions (step) WHERE voided_by IS NULL;
