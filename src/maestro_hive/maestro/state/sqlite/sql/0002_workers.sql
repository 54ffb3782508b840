-- Format 2: runs that belong to workers, and whose child a run is.

ALTER TABLE runs ADD COLUMN parent TEXT;    -- the name of the run that started it as its child

-- A run of a workflow starts with that record (kind 17), or with it behind a copy (kind 15).
UPDATE runs SET parent = (
    SELECT CASE WHEN json_valid(CAST(facts AS TEXT))
           THEN json_extract(CAST(facts AS TEXT), '$.parent') END
    FROM entries
    WHERE entries.id BETWEEN runs.id * 4294967296 + 1 AND runs.id * 4294967296 + 2 AND kind = 17
    LIMIT 1
) WHERE workflow <> '';

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
    deaths       INTEGER NOT NULL,      -- processes that died while they executed it
    woken        INTEGER NOT NULL       -- 1: while it was active
) STRICT;

CREATE INDEX dispatch_by_rank ON dispatch (state, queue, workflow, version, rank);
CREATE INDEX dispatch_by_due ON dispatch (boot, due) WHERE state = 1;
CREATE INDEX dispatch_suspects ON dispatch (queue, rank) WHERE deaths > 0;
