-- What the policy needs to remember: the QOS, deadline and reservation that a job asks for, preemption and suspension,
-- usage for fair share, the calendar, and how good estimates were.
ALTER TABLE jobs ADD COLUMN qos TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN deadline_at REAL;
ALTER TABLE jobs ADD COLUMN reservation TEXT;
ALTER TABLE jobs ADD COLUMN preempt_at REAL;
ALTER TABLE jobs ADD COLUMN is_front INTEGER NOT NULL DEFAULT 0 CHECK (is_front = 0 OR is_front = 1);
ALTER TABLE jobs ADD COLUMN suspended_at REAL;
ALTER TABLE jobs ADD COLUMN suspended_by TEXT CHECK (suspended_by = 'user' OR suspended_by = 'policy');
ALTER TABLE runs ADD COLUMN suspended_s REAL NOT NULL DEFAULT 0 CHECK (suspended_s >= 0);

-- What ended runs have used, amounts times seconds, decayed to the instant `at`.
CREATE TABLE usage (
    account     TEXT NOT NULL,
    user        TEXT NOT NULL,
    gpu_s       REAL NOT NULL CHECK (gpu_s >= 0),
    vram_mib_s  REAL NOT NULL CHECK (vram_mib_s >= 0),
    cpu_s       REAL NOT NULL CHECK (cpu_s >= 0),
    mem_mib_s   REAL NOT NULL CHECK (mem_mib_s >= 0),
    at          REAL NOT NULL,
    PRIMARY KEY (account, user)
) STRICT, WITHOUT ROWID;

-- The calendar: what is kept, when, for whom.
CREATE TABLE reservations (
    name        TEXT NOT NULL PRIMARY KEY CHECK (length(name) > 0),
    start_at    REAL NOT NULL,
    duration_s  INTEGER NOT NULL CHECK (duration_s > 0),
    every_s     INTEGER CHECK (every_s > 0),
    until_at    REAL,
    held        TEXT NOT NULL CHECK (json_valid(held)),
    users       TEXT NOT NULL CHECK (json_valid(users)),
    accounts    TEXT NOT NULL CHECK (json_valid(accounts)),
    made_by     TEXT NOT NULL,
    made_at     REAL NOT NULL
) STRICT;

-- The first estimate of each job's start, and when it did start.
CREATE TABLE estimates (
    job_id    INTEGER NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    made_at   REAL NOT NULL,
    low_at    REAL NOT NULL,
    high_at   REAL,
    start_at  REAL
) STRICT;
