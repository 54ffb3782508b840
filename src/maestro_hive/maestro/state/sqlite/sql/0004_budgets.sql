-- Format 4: budgets. An account is a text: 'persona:NAME', 'run:ID', 'queue:NAME', 'day:2026-11-17',
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

-- What was spent before (kind 7) counts, for a run also what its children spent.
CREATE TEMP TABLE spent AS
    SELECT runs.name AS run, runs.workflow AS workflow,
           date(entries.at / 1000000, 'unixepoch') AS day,
           coalesce(json_extract(CAST(facts AS TEXT), '$.persona'), '') AS persona,
           CAST(coalesce(json_extract(CAST(facts AS TEXT), '$.tokens'), 0) AS INTEGER) AS tokens,
           CAST(round(coalesce(json_extract(CAST(facts AS TEXT), '$.usd'), 0) * 1000000) AS INTEGER) AS usd
    FROM entries JOIN runs ON runs.id = entries.id >> 32
    WHERE kind = 7 AND json_valid(CAST(facts AS TEXT));

INSERT INTO accounts
    WITH RECURSIVE families (member, ancestor) AS (
        SELECT name, name FROM runs
        UNION SELECT member, runs.parent FROM families JOIN runs ON runs.name = ancestor
        WHERE runs.parent IS NOT NULL
    ), charged (account, tokens, usd) AS (
        SELECT 'persona:' || persona, tokens, usd FROM spent
        UNION ALL SELECT 'day:' || day, tokens, usd FROM spent
        UNION ALL SELECT 'workflow:' || workflow, tokens, usd FROM spent
        UNION ALL SELECT 'model:', tokens, usd FROM spent
        UNION ALL SELECT 'run:' || ancestor, tokens, usd FROM spent JOIN families ON member = run
    )
    SELECT NULL, account, sum(tokens), sum(usd), 0, count(*), 0, 0, 0, 0, 0 FROM charged GROUP BY account;

DROP TABLE spent;
