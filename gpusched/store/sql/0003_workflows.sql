-- Arrays, pipelines, alerts: what belongs together, and what has to be told.

-- What few submissions ask for, as one document of what is not the default.
ALTER TABLE jobs ADD COLUMN extras TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(extras));
ALTER TABLE jobs ADD COLUMN key TEXT;
ALTER TABLE jobs ADD COLUMN pipeline TEXT;
ALTER TABLE jobs ADD COLUMN array_id INTEGER;
ALTER TABLE jobs ADD COLUMN task INTEGER CHECK (task >= 0);
ALTER TABLE jobs ADD COLUMN tasks_left TEXT;

-- Of a job that has failed: the job that runs in its place. At most one.
ALTER TABLE jobs ADD COLUMN fallback_id INTEGER;

-- GPUs that do nothing: since when, and what was done about it so far.
ALTER TABLE runs ADD COLUMN idle_at REAL;
ALTER TABLE runs ADD COLUMN idle_step INTEGER NOT NULL DEFAULT 0 CHECK (idle_step >= 0);

-- What was submitted together with --dag. AUTOINCREMENT: no number is given twice.
CREATE TABLE pipelines (
    number    INTEGER PRIMARY KEY AUTOINCREMENT CHECK (number > 0),
    uid       INTEGER NOT NULL CHECK (uid >= 0),
    user      TEXT    NOT NULL,
    name      TEXT    NOT NULL CHECK (length(name) BETWEEN 1 AND 2500),
    submit_at REAL    NOT NULL,
    source    TEXT    NOT NULL
) STRICT;

CREATE INDEX jobs_by_key ON jobs (uid, key) WHERE key IS NOT NULL;
CREATE INDEX jobs_by_pipeline ON jobs (pipeline) WHERE pipeline IS NOT NULL;
CREATE INDEX jobs_that_are_arrays ON jobs (id) WHERE tasks_left IS NOT NULL;
CREATE INDEX jobs_by_array ON jobs (array_id, state) WHERE array_id IS NOT NULL;

-- What has to be told, and to whom: written with the change that causes it, gone when it was told.
CREATE TABLE alerts (
    key        TEXT    NOT NULL PRIMARY KEY CHECK (length(key) > 0),
    event      TEXT    NOT NULL,
    counts_as  TEXT    NOT NULL CHECK (json_valid(counts_as)),
    uid        INTEGER NOT NULL CHECK (uid >= 0),
    at         REAL    NOT NULL,
    facts      TEXT    NOT NULL CHECK (json_valid(facts)),
    targets    TEXT    NOT NULL CHECK (json_valid(targets)),
    job_id     INTEGER REFERENCES jobs (id) ON DELETE CASCADE,
    run        INTEGER CHECK (run > 0),
    state      TEXT    NOT NULL CHECK (state = 'armed' OR state = 'waiting' OR state = 'told'),
    settled    TEXT    NOT NULL CHECK (json_valid(settled))
) STRICT, WITHOUT ROWID;

CREATE INDEX alerts_by_job ON alerts (job_id) WHERE job_id IS NOT NULL;
