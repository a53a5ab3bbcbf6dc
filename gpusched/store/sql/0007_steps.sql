-- What srun started inside runs: one row for each call, from its start. Ended exactly once; gone with the job.
CREATE TABLE steps (
    job_id        INTEGER NOT NULL,
    run           INTEGER NOT NULL,
    number        INTEGER NOT NULL CHECK (number >= 0),
    name          TEXT    NOT NULL,
    command       TEXT    NOT NULL,
    node          TEXT    NOT NULL,
    start_at      REAL    NOT NULL,
    state         TEXT    NOT NULL,
    tasks         INTEGER NOT NULL CHECK (tasks > 0),
    cpus          REAL    NOT NULL CHECK (cpus >= 0),
    gpus          TEXT    NOT NULL CHECK (json_valid(gpus)),
    is_exclusive  INTEGER NOT NULL CHECK (is_exclusive IN (0, 1)),
    has_own_gpus  INTEGER NOT NULL CHECK (has_own_gpus IN (0, 1)),
    time_limit_s  INTEGER CHECK (time_limit_s > 0),
    end_at        REAL,
    exit_code     INTEGER,
    signal        INTEGER,
    cancel_uid    INTEGER,
    pid           INTEGER,
    start_ticks   INTEGER,
    PRIMARY KEY (job_id, run, number),
    FOREIGN KEY (job_id, run) REFERENCES runs (job_id, number) ON DELETE CASCADE,
    CONSTRAINT step_runs_exactly_until_its_end CHECK ((state = 'RUNNING') = (end_at IS NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX steps_open ON steps (job_id, run, number) WHERE end_at IS NULL;

CREATE TRIGGER steps_end_once BEFORE UPDATE ON steps WHEN old.end_at IS NOT NULL
BEGIN
    SELECT RAISE(ABORT, 'the end of a step is final');
END;
