-- Format 1. Everything that grows has an integer key and no second index: each further tree would
-- be another page in every commit (docs/adr/0002).

CREATE TABLE runs (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again after a purge
    name        TEXT    NOT NULL UNIQUE,
    workflow    TEXT    NOT NULL,
    status      TEXT    NOT NULL,
    created_at  INTEGER NOT NULL,   -- microseconds since 1970, UTC, here and everywhere
    updated_at  INTEGER NOT NULL
) STRICT;

CREATE TABLE entries (
    id       INTEGER PRIMARY KEY,   -- runs.id * 4294967296 + 1, 2, 3, … within the run
    kind     INTEGER NOT NULL,      -- see EntryKind
    step     INTEGER NOT NULL,      -- the step's number within the run, 0 for none
    attempt  INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    facts    BLOB,                  -- canonical JSON
    value    BLOB,                  -- JSON with tags, if it is small
    payload  INTEGER,               -- payloads.id, if it is not
    sha256   BLOB,                  -- of the value
    identity BLOB                   -- of the call that it is about, or of a run's input
) STRICT;

CREATE TABLE payloads (
    id       INTEGER PRIMARY KEY,
    hash     INTEGER NOT NULL,      -- the first 8 bytes of sha256, to find a value stored before
    family   INTEGER NOT NULL,      -- a hash of run and family, to find what a value grew from
    size     INTEGER NOT NULL,      -- of the whole value
    added    INTEGER NOT NULL,      -- bytes stored since the last whole value of the chain
    base     INTEGER,               -- payloads.id that data is a difference to; NULL: data is whole
    sha256   BLOB    NOT NULL,      -- of the whole value
    data     BLOB    NOT NULL       -- last: a row is read without it where only the rest is needed
) STRICT;

-- Of large values only: in a commit of a few pages, one more counts.
CREATE INDEX payloads_by_hash ON payloads (hash) WHERE size >= 16384;

CREATE TABLE documents (
    id          INTEGER PRIMARY KEY,
    namespace   TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    value       BLOB    NOT NULL,
    sha256      BLOB    NOT NULL,
    updated_at  INTEGER NOT NULL,
    UNIQUE (namespace, key)
) STRICT;

CREATE TABLE leases (               -- a row per lease that is held; releasing one deletes it
    id       INTEGER PRIMARY KEY AUTOINCREMENT,  -- the fencing number: never used again
    name     TEXT    NOT NULL UNIQUE,
    holder   TEXT    NOT NULL,
    host     TEXT    NOT NULL,
    pid      INTEGER NOT NULL,
    since    INTEGER NOT NULL,
    boot     TEXT    NOT NULL,
    expires  REAL    NOT NULL       -- seconds awake since that boot
) STRICT;
