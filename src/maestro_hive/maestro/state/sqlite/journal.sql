-- Everything that grows has an integer key and no second index: each further tree would
-- be another page in every commit (docs/adr/0002).

CREATE TABLE runs (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again after a purge
    name        TEXT    NOT NULL UNIQUE,
    workflow    TEXT    NOT NULL,
    status      TEXT    NOT NULL,
    created_at  INTEGER NOT NULL,   -- microseconds since 1970, UTC, here and everywhere
    updated_at  INTEGER NOT NULL,
    parent      TEXT                -- the name of the run that started it as its child
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

CREATE TABLE dispatch (             -- a row per unfinished run that belongs to workers
    run          INTEGER PRIMARY KEY,   -- runs.id
    workflow     TEXT    NOT NULL,
    queue        TEXT    NOT NULL,
    priority     INTEGER NOT NULL,
    rank         INTEGER NOT NULL,      -- when it was first due, a minute earlier for each priority
    state        INTEGER NOT NULL,      -- see DispatchState
    boot         TEXT    NOT NULL,      -- of a scheduled one: what due is relative to
    due          REAL    NOT NULL,      -- seconds since that boot, sleep included
    due_at       INTEGER NOT NULL,      -- the same by wall time, for another boot
    wait         REAL    NOT NULL,      -- seconds that it is scheduled for in all
    version      TEXT,
    enqueued_at  INTEGER NOT NULL,
    deaths       INTEGER NOT NULL,      -- processes that died in a row: see RESETS_DEATHS
    woken        INTEGER NOT NULL       -- 1: while it was active
) STRICT;

CREATE INDEX dispatch_by_rank ON dispatch (state, queue, workflow, version, rank);
CREATE INDEX dispatch_by_due ON dispatch (boot, due) WHERE state = 1;
-- A part of this format that no query uses.
CREATE INDEX dispatch_suspects ON dispatch (queue, rank) WHERE deaths > 0;

-- Streams: what the steps of a run write while they are executed. As entries, chunks are
-- only ever added at a run's end, and read on from any number without an index.

CREATE TABLE chunks (
    id       INTEGER PRIMARY KEY,   -- runs.id * 4294967296 + 1, 2, 3, … within the run
    step     INTEGER NOT NULL,      -- the step's number within the run, as in entries
    attempt  INTEGER NOT NULL,
    at       INTEGER NOT NULL,      -- when the step wrote it
    kind     INTEGER NOT NULL,      -- 0: the step starts over; 1: data is a text; 2: data is bytes
    data     BLOB    NOT NULL
) STRICT;

-- Budgets. An account is a text: 'persona:NAME', 'run:ID', 'queue:NAME', 'day:2026-11-17',
-- 'workflow:NAME' or 'model:NAME'; the last two are only counted.
-- Money is in millionths of a US dollar.

CREATE TABLE limits (
    account   TEXT    PRIMARY KEY,      -- with '*' as its name: each account of that kind
    tokens    INTEGER,                  -- NULL: no limit
    usd       INTEGER,
    declared  TEXT,                     -- what a program last asked for, as JSON
    zone      TEXT                      -- of 'day:*': the time zone of days; NULL: UTC
) STRICT, WITHOUT ROWID;

CREATE TABLE limit_epoch (              -- one row: it grows with each change of a limit
    epoch     INTEGER NOT NULL
) STRICT;
INSERT INTO limit_epoch VALUES (0);

CREATE TABLE accounts (             -- a row per account that anything was spent or reserved of
    id               INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again: processes remember it
    account          TEXT    NOT NULL UNIQUE,
    tokens           INTEGER NOT NULL,  -- settled
    usd              INTEGER NOT NULL,
    cached           INTEGER NOT NULL,  -- tokens read from a provider's cache, apart from the others
    calls            INTEGER NOT NULL,  -- how often something was spent
    reserved_tokens  INTEGER NOT NULL,  -- of calls that are made, and of those whose process died
    reserved_usd     INTEGER NOT NULL,
    in_flight        INTEGER NOT NULL,  -- reservations of calls that are made
    unsized          INTEGER NOT NULL,  -- of these, such of which nobody knows what they will spend
    warned           INTEGER NOT NULL   -- the percentage of its limit that was last warned of
) STRICT;

CREATE TABLE reservations (         -- a row per attempt under a limit, until it is settled
    run       INTEGER NOT NULL,     -- runs.id
    step      INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    fence     INTEGER NOT NULL,     -- leases.id of the run when it was admitted
    accounts  TEXT    NOT NULL,     -- JSON: those that it is reserved of
    tokens    INTEGER NOT NULL,     -- what is left of it
    usd       INTEGER NOT NULL,
    unsized   INTEGER NOT NULL,
    lost      INTEGER NOT NULL,     -- 1: its process died before it was settled
    at        INTEGER NOT NULL,
    PRIMARY KEY (run, step, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE estimates (            -- what a call of a step is expected to spend
    persona   TEXT    NOT NULL,
    step      TEXT    NOT NULL,
    tokens    INTEGER NOT NULL,
    usd       INTEGER NOT NULL,
    model     TEXT    NOT NULL,
    PRIMARY KEY (persona, step)
) STRICT, WITHOUT ROWID;
