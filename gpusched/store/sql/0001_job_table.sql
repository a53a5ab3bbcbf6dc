-- Instants are UTC epoch seconds, units are in the names. No CHECK compares two instants: the wall clock may be
-- set back while a job runs, and its end must be recorded all the same.
--
-- A text that SQLite cannot hold as it is (a byte that is no UTF-8, a NUL) is stored as a JSON string, beginning
-- with a double quote. Columns that hold a JSON document say so by json_valid.
--
-- Words are compared one by one: for `IN (...)` SQLite builds a temporary index at every row that is written,
-- which made the commit of 1,000 jobs half as long again.

-- What was asked, and where it stands. AUTOINCREMENT: the id of a pruned job is not given to another.
CREATE TABLE jobs (
    id            INTEGER PRIMARY KEY AUTOINCREMENT CHECK (id > 0),
    uid           INTEGER NOT NULL CHECK (uid >= 0),
    user          TEXT    NOT NULL,
    submit_at     REAL    NOT NULL,
    -- what was asked; changed only on request
    name          TEXT    NOT NULL CHECK (length(name) BETWEEN 1 AND 2500),
    queue         TEXT    NOT NULL,
    account       TEXT    NOT NULL,
    nice          INTEGER NOT NULL CHECK (nice BETWEEN -10000 AND 10000),
    time_limit_s  INTEGER CHECK (time_limit_s > 0),
    begin_at      REAL,
    dependency    TEXT,
    submit_hold   INTEGER NOT NULL CHECK (submit_hold IN (0, 1)),
    request       TEXT    NOT NULL CHECK (json_valid(request)),
    launch        TEXT    NOT NULL CHECK (json_valid(launch)),
    retry         TEXT    NOT NULL CHECK (json_valid(retry)),
    -- where it stands; changed by the scheduler
    state         TEXT    NOT NULL,
    queued_at     REAL    NOT NULL,
    eligible_at   REAL    NOT NULL,
    start_at      REAL,
    end_at        REAL,
    hold          TEXT    CHECK (hold IN ('user', 'admin')),
    run           INTEGER NOT NULL CHECK (run >= 0),
    failures      INTEGER NOT NULL CHECK (failures >= 0),
    requeues      INTEGER NOT NULL CHECK (requeues >= 0),
    exit_code     INTEGER,
    signal        INTEGER,
    reason        TEXT,
    reason_text   TEXT,
    cancel_at     REAL,
    CONSTRAINT end_at_is_set_exactly_when_the_state_is_final CHECK (
        CASE WHEN end_at IS NULL
        THEN state = 'PENDING' OR state = 'RUNNING' OR state = 'COMPLETING' OR state = 'SUSPENDED'
        ELSE state = 'COMPLETED' OR state = 'FAILED' OR state = 'CANCELLED' OR state = 'TIMEOUT'
          OR state = 'OUT_OF_MEMORY' OR state = 'NODE_FAIL' OR state = 'PREEMPTED' OR state = 'DEADLINE' END)
) STRICT;

-- Unfinished jobs by id (their end is NULL, and the id is the last part of every index), and ended ones by their end.
CREATE INDEX jobs_by_end ON jobs (end_at);
CREATE INDEX jobs_by_uid ON jobs (uid);

-- One attempt at a job.
CREATE TABLE runs (
    job_id                  INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number                  INTEGER NOT NULL CHECK (number > 0),
    state                   TEXT    NOT NULL,
    node                    TEXT    NOT NULL,
    boot_id                 TEXT    NOT NULL,
    intent_at               REAL    NOT NULL,
    gpus                    TEXT    NOT NULL CHECK (json_valid(gpus)),
    cpus                    REAL    NOT NULL CHECK (cpus >= 0),
    mem_mib                 INTEGER NOT NULL CHECK (mem_mib >= 0),
    start_at                REAL,
    end_at                  REAL,
    supervisor_pid          INTEGER,
    supervisor_start_ticks  INTEGER,
    pid                     INTEGER,
    exit_code               INTEGER,
    signal                  INTEGER,
    outcome                 TEXT,
    reason                  TEXT,
    reason_text             TEXT,
    cpu_s                   REAL,
    peak_mem_mib            REAL,
    peak_vram_mib           INTEGER,
    mean_utilisation        REAL,
    energy_j                REAL,
    stdout_path             TEXT,
    stderr_path             TEXT,
    PRIMARY KEY (job_id, number),
    CONSTRAINT end_and_outcome_are_set_exactly_when_the_run_has_ended CHECK (
        CASE state
        WHEN 'STARTING' THEN outcome IS NULL AND end_at IS NULL
        WHEN 'RUNNING' THEN outcome IS NULL AND end_at IS NULL
        WHEN 'ENDED' THEN end_at IS NOT NULL AND outcome IS NOT NULL
        ELSE 0 END),
    CONSTRAINT outcome_is_a_final_state CHECK (
        outcome IS NULL OR outcome = 'COMPLETED' OR outcome = 'FAILED' OR outcome = 'CANCELLED'
        OR outcome = 'TIMEOUT' OR outcome = 'OUT_OF_MEMORY' OR outcome = 'NODE_FAIL' OR outcome = 'PREEMPTED'
        OR outcome = 'DEADLINE')
) STRICT, WITHOUT ROWID;

CREATE INDEX runs_open ON runs (job_id, number) WHERE end_at IS NULL;

-- The job's story. Lines are added, and go only together with the job.
CREATE TABLE job_events (
    id      INTEGER PRIMARY KEY,
    job_id  INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    at      REAL    NOT NULL,
    kind    TEXT    NOT NULL CHECK (length(kind) > 0),
    text    TEXT    NOT NULL,
    run     INTEGER CHECK (run > 0)
) STRICT;

CREATE INDEX job_events_by_job ON job_events (job_id);

CREATE TRIGGER job_events_are_append_only BEFORE UPDATE ON job_events
BEGIN
    SELECT RAISE(ABORT, 'the story of a job is only added to');
END;

-- Scripts and environments by the SHA-256 of their bytes; equal ones are kept once.
CREATE TABLE payloads (
    sha   TEXT NOT NULL PRIMARY KEY CHECK (length(sha) = 64),
    body  BLOB NOT NULL
) STRICT;

-- Machines and cards that were seen, for history; what is there now is read, not remembered.
CREATE TABLE nodes (
    name            TEXT NOT NULL PRIMARY KEY,
    driver_version  TEXT,
    first_seen_at   REAL NOT NULL,
    last_seen_at    REAL NOT NULL
) STRICT;

CREATE TABLE gpus (
    uuid            TEXT    NOT NULL PRIMARY KEY,
    node            TEXT    NOT NULL REFERENCES nodes (name),
    "index"         INTEGER NOT NULL,
    name            TEXT    NOT NULL,
    vram_total_mib  INTEGER,
    first_seen_at   REAL    NOT NULL,
    last_seen_at    REAL    NOT NULL
) STRICT;

-- Nodes by name and GPUs by UUID on which nothing may be placed.
CREATE TABLE drains (
    target   TEXT NOT NULL PRIMARY KEY,
    message  TEXT NOT NULL
) STRICT;
