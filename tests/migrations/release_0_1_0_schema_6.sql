BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'gpusched','0001_job_table','2026-11-23 04:37:45.439930+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'gpusched','0002_policy','2026-11-23 04:37:45.444699+00:00');
INSERT INTO "_sqlite_migrations" VALUES(3,'gpusched','0003_workflows','2026-11-23 04:37:45.453069+00:00');
INSERT INTO "_sqlite_migrations" VALUES(4,'gpusched','0004_gpu_clearances','2026-11-23 04:37:45.455102+00:00');
INSERT INTO "_sqlite_migrations" VALUES(5,'gpusched','0005_operation','2026-11-23 04:37:45.459386+00:00');
INSERT INTO "_sqlite_migrations" VALUES(6,'gpusched','0006_fences','2026-11-23 04:37:45.462570+00:00');
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
CREATE TABLE drains (
    target   TEXT NOT NULL PRIMARY KEY,
    message  TEXT NOT NULL
) STRICT;
INSERT INTO "drains" VALUES('GPU-2','the fan is loud');
INSERT INTO "drains" VALUES('n9','');
CREATE TABLE estimates (
    job_id    INTEGER NOT NULL PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    made_at   REAL NOT NULL,
    low_at    REAL NOT NULL,
    high_at   REAL,
    start_at  REAL
) STRICT;
CREATE TABLE fences (
    job_id   INTEGER NOT NULL PRIMARY KEY,
    fence_at REAL NOT NULL
) STRICT;
CREATE TABLE gpu_clearances (
    uuid       TEXT NOT NULL PRIMARY KEY CHECK (length(uuid) > 0),
    at         REAL NOT NULL,
    ecc_errors INTEGER CHECK (ecc_errors >= 0)
) STRICT, WITHOUT ROWID;
CREATE TABLE gpus (
    uuid            TEXT    NOT NULL PRIMARY KEY,
    node            TEXT    NOT NULL REFERENCES nodes (name),
    "index"         INTEGER NOT NULL,
    name            TEXT    NOT NULL,
    vram_total_mib  INTEGER,
    first_seen_at   REAL    NOT NULL,
    last_seen_at    REAL    NOT NULL
) STRICT;
INSERT INTO "gpus" VALUES('GPU-1','n1',0,'NVIDIA A100',40960,1790000000.0,1790000000.0);
CREATE TABLE job_events (
    id      INTEGER PRIMARY KEY,
    job_id  INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    at      REAL    NOT NULL,
    kind    TEXT    NOT NULL CHECK (length(kind) > 0),
    text    TEXT    NOT NULL,
    run     INTEGER CHECK (run > 0)
) STRICT;
INSERT INTO "job_events" VALUES(1,1,1790000000.0,'submitted','submitted by ann',NULL);
INSERT INTO "job_events" VALUES(2,1,1790000002.0,'ended','COMPLETED: exit code 0',2);
INSERT INTO "job_events" VALUES(3,4,1790000004.0,'stopping','cancelled by zoë',1);
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
    cancel_at     REAL, qos TEXT NOT NULL DEFAULT '', deadline_at REAL, reservation TEXT, preempt_at REAL, is_front INTEGER NOT NULL DEFAULT 0 CHECK (is_front = 0 OR is_front = 1), suspended_at REAL, suspended_by TEXT CHECK (suspended_by = 'user' OR suspended_by = 'policy'), extras TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(extras)), key TEXT, pipeline TEXT, array_id INTEGER, task INTEGER CHECK (task >= 0), tasks_left TEXT, fallback_id INTEGER,
    CONSTRAINT end_at_is_set_exactly_when_the_state_is_final CHECK (
        CASE WHEN end_at IS NULL
        THEN state = 'PENDING' OR state = 'RUNNING' OR state = 'COMPLETING' OR state = 'SUSPENDED'
        ELSE state = 'COMPLETED' OR state = 'FAILED' OR state = 'CANCELLED' OR state = 'TIMEOUT'
          OR state = 'OUT_OF_MEMORY' OR state = 'NODE_FAIL' OR state = 'PREEMPTED' OR state = 'DEADLINE' END)
) STRICT;
INSERT INTO "jobs" VALUES(1,1000,'ann',1790000000.0,'train','default','ann',0,NULL,NULL,NULL,0,'{"gpus":0,"gpu_fraction":null,"gpu_type":null,"vram_mib":null,"min_vram_mib":null,"cpus":1.0,"mem_mib":0,"nodes":1,"tail_gpus":0,"is_linked":false,"resources":[],"licenses":[],"nodelist":[],"exclude":[],"constraint":null,"prefer":null,"is_exclusive":false}','{"argv":["python","train.py"],"script_sha":null,"script_name":null,"env_sha":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee","work_dir":"/home/ann","umask":18,"stdout":null,"stderr":null,"open_mode":null,"notice":null,"stop_signal":null,"grace_s":null,"gpu_ids":null,"submit_dir":null,"log_max_mib":null,"log_keep":3}','{"retries":0,"backoff_s":10.0,"backoff_factor":2.0,"backoff_max_s":600.0,"retry_on":["exit","signal","oom","node_fail"],"requeue":true}','COMPLETED',1790000000.0,1790000000.0,1790000001.0,1790000002.0,NULL,2,1,0,0,NULL,'None','exit code 0',NULL,'',NULL,NULL,NULL,0,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(2,1000,'ann',1790000000.0,'train','default','ann',0,NULL,NULL,NULL,0,'{"gpus":0,"gpu_fraction":null,"gpu_type":null,"vram_mib":null,"min_vram_mib":null,"cpus":1.0,"mem_mib":0,"nodes":1,"tail_gpus":0,"is_linked":false,"resources":[],"licenses":[],"nodelist":[],"exclude":[],"constraint":null,"prefer":null,"is_exclusive":false}','{"argv":["python","train.py"],"script_sha":null,"script_name":null,"env_sha":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee","work_dir":"/home/ann","umask":18,"stdout":null,"stderr":null,"open_mode":null,"notice":null,"stop_signal":null,"grace_s":null,"gpu_ids":null,"submit_dir":null,"log_max_mib":null,"log_keep":3}','{"retries":0,"backoff_s":10.0,"backoff_factor":2.0,"backoff_max_s":600.0,"retry_on":["exit","signal","oom","node_fail"],"requeue":true}','PENDING',1790000000.0,1790000000.0,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,NULL,'',NULL,NULL,NULL,0,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(3,1001,'zoë',1790000000.0,'"\"quoted\" and \udcff undecodable"','night','vision',-5,3600,1790000005.0,'afterok:1',1,'{"gpus":1,"gpu_fraction":null,"gpu_type":"a100","vram_mib":8192,"min_vram_mib":16384,"cpus":2.5,"mem_mib":4096,"nodes":1,"tail_gpus":0,"is_linked":false,"resources":[],"licenses":[],"nodelist":[],"exclude":[],"constraint":null,"prefer":null,"is_exclusive":false}','{"argv":["\udcff","--name","zo\u00eb"],"script_sha":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","script_name":"train.sh","env_sha":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee","work_dir":"/home/zo\u00eb","umask":63,"stdout":"%j.out","stderr":"%j.err","open_mode":"append","notice":{"signal":10,"before_s":60,"main_only":true},"stop_signal":2,"grace_s":1.5,"gpu_ids":"uuid","submit_dir":null,"log_max_mib":null,"log_keep":3}','{"retries":3,"backoff_s":0.5,"backoff_factor":3.0,"backoff_max_s":60.0,"retry_on":["3","10-20","SIGSEGV"],"requeue":false}','PENDING',1790000005.0,1790000005.0,NULL,NULL,'user',0,0,0,NULL,NULL,NULL,NULL,NULL,'',NULL,NULL,NULL,0,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(4,1001,'zoë',1790000000.0,'"\"quoted\" and \udcff undecodable"','night','vision',-5,3600,1790000005.0,'afterok:1',1,'{"gpus":1,"gpu_fraction":null,"gpu_type":"a100","vram_mib":8192,"min_vram_mib":16384,"cpus":2.5,"mem_mib":4096,"nodes":1,"tail_gpus":0,"is_linked":false,"resources":[],"licenses":[],"nodelist":[],"exclude":[],"constraint":null,"prefer":null,"is_exclusive":false}','{"argv":["\udcff","--name","zo\u00eb"],"script_sha":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","script_name":"train.sh","env_sha":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee","work_dir":"/home/zo\u00eb","umask":63,"stdout":"%j.out","stderr":"%j.err","open_mode":"append","notice":{"signal":10,"before_s":60,"main_only":true},"stop_signal":2,"grace_s":1.5,"gpu_ids":"uuid","submit_dir":null,"log_max_mib":null,"log_keep":3}','{"retries":3,"backoff_s":0.5,"backoff_factor":3.0,"backoff_max_s":60.0,"retry_on":["3","10-20","SIGSEGV"],"requeue":false}','COMPLETING',1790000000.0,1790000000.0,1790000003.0,NULL,NULL,1,0,1,NULL,NULL,'CancelledByUser','cancelled by zoë',1790000004.0,'',NULL,NULL,NULL,0,NULL,NULL,'{}',NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE kept_places (
    job_id INTEGER NOT NULL PRIMARY KEY,
    place  TEXT NOT NULL CHECK (json_valid(place))
) STRICT;
CREATE TABLE nodes (
    name            TEXT NOT NULL PRIMARY KEY,
    driver_version  TEXT,
    first_seen_at   REAL NOT NULL,
    last_seen_at    REAL NOT NULL
) STRICT;
INSERT INTO "nodes" VALUES('n1','550.54',1790000000.0,1790000000.0);
CREATE TABLE payloads (
    sha   TEXT NOT NULL PRIMARY KEY CHECK (length(sha) = 64),
    body  BLOB NOT NULL
) STRICT;
INSERT INTO "payloads" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',X'23212F62696E2F73680A74727565FF0A');
INSERT INTO "payloads" VALUES('eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',X'504154483D2F62696E00');
CREATE TABLE pipelines (
    number    INTEGER PRIMARY KEY AUTOINCREMENT CHECK (number > 0),
    uid       INTEGER NOT NULL CHECK (uid >= 0),
    user      TEXT    NOT NULL,
    name      TEXT    NOT NULL CHECK (length(name) BETWEEN 1 AND 2500),
    submit_at REAL    NOT NULL,
    source    TEXT    NOT NULL
) STRICT;
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
, message TEXT NOT NULL DEFAULT '') STRICT;
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
    stderr_path             TEXT, suspended_s REAL NOT NULL DEFAULT 0 CHECK (suspended_s >= 0), idle_at REAL, idle_step INTEGER NOT NULL DEFAULT 0 CHECK (idle_step >= 0),
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
INSERT INTO "runs" VALUES(1,1,'ENDED','n1','boot',1790000000.0,'[]',0.0,0,1790000000.0,1790000001.0,9,77,10,NULL,9,'FAILED','RaisedSignal','ended by signal 9',0.5,9.5,NULL,NULL,NULL,'/home/ann/gpusched-1.out',NULL,0.0,NULL,0);
INSERT INTO "runs" VALUES(1,2,'ENDED','n1','boot',1790000001.0,'[]',0.0,0,1790000001.0,1790000002.0,NULL,NULL,NULL,0,NULL,'COMPLETED','None','exit code 0',NULL,NULL,NULL,NULL,NULL,NULL,NULL,0.0,NULL,0);
INSERT INTO "runs" VALUES(4,1,'RUNNING','n1','boot',1790000003.0,'[{"uuid":"GPU-1","index":0,"vram_mib":8192,"fraction":null,"limit":null}]',2.5,4096,1790000003.0,NULL,11,78,12,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0.0,NULL,0);
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
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE INDEX jobs_by_end ON jobs (end_at);
CREATE INDEX jobs_by_uid ON jobs (uid);
CREATE INDEX runs_open ON runs (job_id, number) WHERE end_at IS NULL;
CREATE INDEX job_events_by_job ON job_events (job_id);
CREATE TRIGGER job_events_are_append_only BEFORE UPDATE ON job_events
BEGIN
    SELECT RAISE(ABORT, 'the story of a job is only added to');
END;
CREATE INDEX jobs_by_key ON jobs (uid, key) WHERE key IS NOT NULL;
CREATE INDEX jobs_by_pipeline ON jobs (pipeline) WHERE pipeline IS NOT NULL;
CREATE INDEX jobs_that_are_arrays ON jobs (id) WHERE tasks_left IS NOT NULL;
CREATE INDEX jobs_by_array ON jobs (array_id, state) WHERE array_id IS NOT NULL;
CREATE INDEX alerts_by_job ON alerts (job_id) WHERE job_id IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',9);
COMMIT;
PRAGMA user_version = 6;
