-- From when on nothing passes a pending job that room was reserved for; tasks of arrays need no row of their own for it.
CREATE TABLE fences (
    job_id   INTEGER NOT NULL PRIMARY KEY,
    fence_at REAL NOT NULL
) STRICT;

-- Where room was last reserved for those past their fence: there it stays, also after a restart.
CREATE TABLE kept_places (
    job_id INTEGER NOT NULL PRIMARY KEY,
    place  TEXT NOT NULL CHECK (json_valid(place))
) STRICT;
