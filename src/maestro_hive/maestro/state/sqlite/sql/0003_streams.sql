-- Format 3: streams, what the steps of a run write while they are executed. As entries, chunks are
-- only ever added at a run's end, and read on from any number without an index.

CREATE TABLE chunks (
    id       INTEGER PRIMARY KEY,   -- runs.id * 4294967296 + 1, 2, 3, … within the run
    step     INTEGER NOT NULL,      -- the step's number within the run, as in entries
    attempt  INTEGER NOT NULL,
    at       INTEGER NOT NULL,      -- when the step wrote it
    kind     INTEGER NOT NULL,      -- 0: the step starts over; 1: data is a text; 2: data is bytes
    data     BLOB    NOT NULL
) STRICT;
