-- Which user drained a node or GPU, and when; none for what the daemon drained itself. The account may be gone since.
CREATE TABLE drainers (
    target  TEXT NOT NULL PRIMARY KEY,
    user    TEXT NOT NULL,
    at      REAL NOT NULL
) STRICT;
