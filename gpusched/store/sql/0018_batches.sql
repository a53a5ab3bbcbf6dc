-- Jobs that were accepted together, one for each line of a batch, and are made in pieces. The row stays while jobs remain
-- to be made, and with a key as long as any of them is in the table.
CREATE TABLE batches (
    first_id  INTEGER PRIMARY KEY CHECK (first_id > 0),
    jobs      INTEGER NOT NULL CHECK (jobs > 0),
    uid       INTEGER NOT NULL CHECK (uid >= 0),
    user      TEXT    NOT NULL,
    submit_at REAL    NOT NULL,
    spec      TEXT    NOT NULL CHECK (json_valid(spec)),
    lines_sha TEXT    NOT NULL,
    story     TEXT    NOT NULL,
    is_named  INTEGER NOT NULL CHECK (is_named IN (0, 1)),
    key       TEXT,
    made      INTEGER NOT NULL CHECK (made BETWEEN 0 AND jobs)
) STRICT;

CREATE INDEX batches_by_key ON batches (uid, key) WHERE key IS NOT NULL;
CREATE INDEX batches_to_make ON batches (first_id) WHERE made < jobs;
