"""The tables of the embedded index, how older ones become them, and its longer questions."""

from __future__ import annotations

from omnifleet_media.index.port import Kind, Unit

VERSION = 2
_SCHEMA = """
CREATE TABLE objects (
    digest TEXT PRIMARY KEY, kind TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
    timestamps_us TEXT NOT NULL, facts TEXT NOT NULL, used_ms INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE frames (
    media TEXT NOT NULL, position INTEGER NOT NULL, frame TEXT NOT NULL, PRIMARY KEY (media, position)
) WITHOUT ROWID;
CREATE INDEX frames_by_digest ON frames (frame);
CREATE TABLE aliases (alias TEXT PRIMARY KEY, media TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX aliases_by_media ON aliases (media);
CREATE TABLE sources (
    digest TEXT PRIMARY KEY, used_ms INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE segments (
    key TEXT PRIMARY KEY, media TEXT NOT NULL, fingerprint TEXT NOT NULL, token_count INTEGER NOT NULL,
    grid TEXT NOT NULL, bytes INTEGER NOT NULL, content TEXT NOT NULL, used_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE leases (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, run TEXT NOT NULL, expires_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE leased (digest TEXT NOT NULL, lease TEXT NOT NULL, PRIMARY KEY (digest, lease)) WITHOUT ROWID;
CREATE INDEX leased_by_lease ON leased (lease);
CREATE INDEX objects_by_use ON objects (used_ms);
CREATE INDEX sources_by_use ON sources (used_ms);
CREATE INDEX segments_by_use ON segments (used_ms);
"""
_SINCE_2 = """
CREATE INDEX leases_by_end ON leases (expires_ms);
CREATE INDEX leases_by_run ON leases (run);
CREATE TABLE flights (key TEXT PRIMARY KEY, owner TEXT NOT NULL, expires_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE stores (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
_FROM_1 = """
ALTER TABLE objects ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sources ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
UPDATE objects SET bytes = width * height * 3 * (SELECT COUNT(DISTINCT frame) FROM frames WHERE media = digest);
"""
CHANGES = {0: _SCHEMA + _SINCE_2, 1: _FROM_1 + _SINCE_2, VERSION: ""}
"""Version found -> statements that lead to VERSION."""
TABLES = {
    Unit.OBJECT: ("objects", "digest"),
    Unit.SOURCE: ("sources", "digest"),
    Unit.SEGMENT: ("segments", "key"),
}
HELD = "EXISTS (SELECT 1 FROM leased JOIN leases ON id = lease WHERE expires_ms > :now AND leased.digest IN ({}))"
IDLE = f"""
SELECT * FROM (SELECT 'object', digest, used_ms FROM objects o WHERE NOT {HELD.format("o.digest")}
               ORDER BY used_ms LIMIT :most)
UNION ALL
SELECT * FROM (SELECT 'source', digest, used_ms FROM sources s WHERE NOT {HELD.format("s.digest")}
               ORDER BY used_ms LIMIT :most)
UNION ALL
SELECT * FROM (SELECT 'segment', key, used_ms FROM segments g WHERE NOT {HELD.format("g.key, g.media")}
               ORDER BY used_ms LIMIT :most)
ORDER BY used_ms LIMIT :limit OFFSET :skip
"""
OWNERS = {
    Kind.FRAME: "SELECT media FROM frames WHERE frame = :digest",
    Kind.MANIFEST: ":digest",
    Kind.SOURCE: ":digest",
    Kind.SEGMENT: ":digest, (SELECT media FROM segments WHERE key = :digest)",
}
KNOWN = (
    "SELECT EXISTS (SELECT 1 FROM aliases WHERE alias = ?1) OR EXISTS (SELECT 1 FROM segments WHERE key = ?1)"
)
SIZES_HELD = """
SELECT DISTINCT leased.digest, COALESCE(objects.bytes, segments.bytes, sources.bytes, 0)
FROM leases JOIN leased ON lease = id
LEFT JOIN objects ON objects.digest = leased.digest
LEFT JOIN segments ON segments.key = leased.digest
LEFT JOIN sources ON sources.digest = leased.digest
WHERE run = :run AND expires_ms > :now
"""
