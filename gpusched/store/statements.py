"""The SQL of the job table. Column lists are in `rows`, so that a row and its statement agree."""

from __future__ import annotations

from gpusched.ports.tables import BATCHES, STEPS
from gpusched.store.rows import EVENTS, IDENTITY_COLUMNS, JOB_COLUMNS, RUNS, STATE_COLUMNS
from gpusched.store.tables import STORED, insert, upsert

RUN_COLUMNS = RUNS.names
EVENT_COLUMNS = EVENTS.names

PUT_JOB = upsert("jobs", JOB_COLUMNS, IDENTITY_COLUMNS[:1])
MOVE_JOB = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in STATE_COLUMNS)} WHERE id = ?"
"""The state of a job and nothing of its spec: documents are neither encoded nor checked again."""
PUT_RUN = upsert("runs", RUN_COLUMNS, RUN_COLUMNS[:2])
TELL = insert("job_events", EVENT_COLUMNS)
PUT_PAYLOAD = "INSERT INTO payloads (sha, body) VALUES (?, ?) ON CONFLICT (sha) DO NOTHING"
ACTIVE_JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE end_at IS NULL ORDER BY id"
OPEN_RUNS = f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE end_at IS NULL ORDER BY job_id, number"
JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs"
ENDED_SINCE_OF_FEW = "(end_at IS NULL OR end_at >= :since)"
# The same by the index on ends: with OR and an order by id, SQLite reads the whole table.
ENDED_SINCE = "id IN (SELECT id FROM jobs WHERE end_at IS NULL UNION ALL SELECT id FROM jobs WHERE end_at >= :since)"
ONLY_ENDED_SINCE = "id IN (SELECT id FROM jobs WHERE end_at >= :since)"
# A list arrives as one JSON document: there may be more ids than SQLite takes parameters.
ONE_OF = "{0} IN (SELECT value FROM json_each(:{0}))"
# The tasks of a sweep have names of their own, and are found by that of their array, too.
NAMED = (
    f"({ONE_OF.format('name')} OR array_id IN "
    f"(SELECT id FROM jobs WHERE tasks_left IS NOT NULL AND {ONE_OF.format('name')}))"
)
RUNS_OF_JOBS = (
    f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE job_id IN (SELECT value FROM json_each(?)) "
    "ORDER BY job_id, number"
)
STEPS_OF_JOBS = f"{STORED[STEPS].select} WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY job_id, run, number"
NEXT_STEP = "SELECT coalesce(max(number), -1) + 1 FROM steps WHERE job_id = ? AND run = ?"
EVENTS_OF_JOB = f"SELECT {', '.join(EVENT_COLUMNS)} FROM job_events WHERE job_id = ? ORDER BY id"
KNOWN_PAYLOADS = "SELECT sha FROM payloads WHERE sha IN (SELECT value FROM json_each(?))"
PAYLOAD_BYTES_OF_USER = """
    SELECT total(length(body)) FROM payloads WHERE sha IN (
        SELECT json_extract(launch, '$.script_sha') FROM jobs WHERE uid = :uid
        UNION SELECT json_extract(launch, '$.env_sha') FROM jobs WHERE uid = :uid)
"""
PAYLOAD = "SELECT body FROM payloads WHERE sha = ?"
TASK_TALLIES = """
    SELECT array_id, state, count(*), max(exit_code) FROM jobs
    WHERE array_id IN (SELECT value FROM json_each(?)) AND end_at IS NOT NULL GROUP BY array_id, state
"""
ARRAY_BEFORE = (
    f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE id < ? AND tasks_left IS NOT NULL ORDER BY id DESC LIMIT 1"
)
USE_IDS_UP = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'jobs'"
LAST_JOB_OF_USER = "SELECT max(id) FROM jobs WHERE uid = ?"
JOB_OF_KEY = (
    f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE uid = ? AND key = ? AND array_id IS NULL ORDER BY id DESC LIMIT 1"
)
ENDED_JOBS = f"{JOBS} WHERE end_at < ? AND (end_at, id) > (?, ?) ORDER BY end_at, id LIMIT ?"
BATCH_OF_KEY = f"{STORED[BATCHES].select} WHERE uid = ? AND key = ? ORDER BY first_id DESC LIMIT 1"
STATES_OF_BATCH = "SELECT DISTINCT state FROM jobs WHERE id BETWEEN ? AND ?"
PRUNE_BATCHES = """
    DELETE FROM batches WHERE made = jobs
        AND NOT EXISTS (SELECT 1 FROM jobs WHERE id BETWEEN first_id AND first_id + batches.jobs - 1)
"""
PIPELINE_ENDS = "SELECT id, end_at FROM jobs WHERE pipeline = ? ORDER BY id"
PRUNE_JOBS = "DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
PRUNE_PIPELINES = "DELETE FROM pipelines WHERE number IN (SELECT value FROM json_each(?))"
USED_PAYLOADS = """
    SELECT id, json_extract(launch, '$.script_sha'), json_extract(launch, '$.env_sha')
    FROM jobs WHERE id > ? ORDER BY id LIMIT ?
"""
PAYLOAD_SHAS = "SELECT sha FROM payloads WHERE sha > ? ORDER BY sha LIMIT ?"
DROP_PAYLOADS = """
    DELETE FROM payloads WHERE sha IN (SELECT value FROM json_each(?))
        AND sha NOT IN (SELECT lines_sha FROM batches WHERE made < jobs)
"""
LARGEST_ID_EVER = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"
LAST_PIPELINE = "SELECT seq FROM sqlite_sequence WHERE name = 'pipelines'"

CARD_SIZES = "SELECT uuid, vram_total_mib FROM gpus WHERE vram_total_mib IS NOT NULL"
# Only jobs that had not ended before are looked at, by their index; runs are grouped by what they hold of GPUs, of
# which there are few kinds, so that no list of cards is read twice. Rows without one count the jobs of a name. Of jobs
# that never ran, a long queue, only the index is read.
USAGE_SUMS = """
    WITH picked AS MATERIALIZED (
        SELECT id, {by} AS name, queued_at, suspended_at FROM jobs
        WHERE {where} AND EXISTS (
            SELECT 1 FROM runs WHERE job_id = id AND start_at < :now AND (runs.end_at IS NULL OR runs.end_at >= :since))
    ), held AS (
        SELECT name, number, gpus, cpus, mem_mib, start_at, queued_at, energy_j,
            json_extract(measured, '$.cost') AS cost, json_extract(measured, '$.grams') AS grams,
            max(0.0, min(coalesce(end_at, :now), :now) - max(start_at, :since)) AS inside_s,
            coalesce(end_at, :now) - start_at AS whole_s,
            suspended_s + iif(end_at IS NULL, max(0.0, :now - coalesce(suspended_at, :now)), 0.0) AS still_s
        FROM picked CROSS JOIN runs ON job_id = id
        WHERE start_at < :now AND (end_at IS NULL OR end_at >= :since)
    ), moved AS (
        SELECT *, iif(whole_s > 0, inside_s * max(0.0, 1.0 - still_s / whole_s), 0.0) AS seconds,
            iif(whole_s > 0, inside_s / whole_s, NULL) AS part,
            iif(number = 1 AND start_at >= :since, max(0.0, start_at - queued_at), NULL) AS wait_s
        FROM held
    )
    SELECT name, gpus, count(*), total(seconds), total(seconds * cpus), total(seconds * mem_mib),
        total(wait_s), count(wait_s), sum(energy_j * part), sum(cost * part), sum(grams * part)
    FROM moved GROUP BY name, gpus
    UNION ALL SELECT name, NULL, count(*), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM picked GROUP BY name
"""
CARD_MODELS = "SELECT uuid, name, vram_total_mib FROM gpus"
_INSIDE = """
    start_at < :until AND (runs.end_at IS NULL OR runs.end_at > :since OR start_at >= :since)
"""
ACCOUNT_USES = f"""
    WITH picked AS MATERIALIZED (
        SELECT id, account, user, suspended_at FROM jobs
        WHERE (end_at IS NULL OR end_at >= :since) AND (:user IS NULL OR user = :user)
    ), held AS (
        SELECT account, user, gpus, cpus, cpu_s, energy_j, mean_utilisation, runs.end_at IS NULL AS is_open,
            json_extract(measured, '$.cost') AS cost, json_extract(measured, '$.grams') AS grams,
            native IS NOT NULL OR is_filler OR coalesce(outcome, '') = 'NODE_FAIL'
                OR coalesce(reason, '') = 'Preempted' AS is_free, is_filler,
            max(0.0, min(coalesce(runs.end_at, :now), :until) - max(start_at, :since)) AS inside_s,
            coalesce(runs.end_at, :now) - start_at AS whole_s,
            suspended_s + iif(runs.end_at IS NULL, max(0.0, :now - coalesce(suspended_at, :now)), 0.0) AS still_s
        FROM picked CROSS JOIN runs ON job_id = id WHERE {_INSIDE}
    ), moved AS (
        SELECT *, iif(whole_s > 0, inside_s / whole_s, 0.0) AS part,
            iif(whole_s > 0, inside_s / whole_s * max(0.0, whole_s - still_s), 0.0) AS seconds
        FROM held
    )
    SELECT account, user, gpus, is_free, is_filler, count(*), sum(is_open), total(seconds),
        sum(seconds * mean_utilisation), total(seconds * cpus), sum(cpu_s * part), sum(energy_j * part),
        sum(cost * part), sum(grams * part)
    FROM moved GROUP BY account, user, gpus, is_free, is_filler
"""
ACCOUNT_JOBS = f"""
    SELECT account, user, count(*) FROM jobs
    WHERE (end_at IS NULL OR end_at >= :since) AND (:user IS NULL OR user = :user)
        AND EXISTS (SELECT 1 FROM runs WHERE job_id = id AND {_INSIDE})
    GROUP BY account, user
"""
BUDGET_SUMS = """
    WITH picked AS MATERIALIZED (
        SELECT id, account, user FROM jobs WHERE end_at IS NULL OR end_at >= :since
    ), held AS (
        SELECT account, user, gpus, max(0.0, min(runs.end_at, :now) - max(runs.start_at, :since)) AS inside_s,
            runs.end_at - runs.start_at AS whole_s, suspended_s
        FROM picked CROSS JOIN runs ON job_id = id
        WHERE runs.end_at >= :since AND runs.start_at IS NOT NULL AND native IS NULL AND NOT is_filler
            AND coalesce(outcome, '') != 'NODE_FAIL' AND coalesce(reason, '') != 'Preempted'
    )
    SELECT account, user, gpus,
        total(iif(whole_s > 0, inside_s * max(0.0, 1.0 - suspended_s / whole_s), 0.0))
    FROM held GROUP BY account, user, gpus
"""
LAST_GPUS = """
    SELECT uuid, "index", gpus.name, vram_total_mib FROM gpus JOIN nodes ON node = nodes.name
    WHERE gpus.last_seen_at = nodes.last_seen_at AND nodes.last_seen_at = (SELECT max(last_seen_at) FROM nodes)
    ORDER BY "index"
"""
SEE_NODE = """
    INSERT INTO nodes (name, driver_version, first_seen_at, last_seen_at) VALUES (:name, :driver, :at, :at)
    ON CONFLICT (name) DO UPDATE SET driver_version = excluded.driver_version, last_seen_at = excluded.last_seen_at
"""
SEE_GPU = """
    INSERT INTO gpus (uuid, node, "index", name, vram_total_mib, first_seen_at, last_seen_at)
    VALUES (:uuid, :node, :index, :name, :vram_total_mib, :at, :at)
    ON CONFLICT (uuid) DO UPDATE SET
        node = excluded.node, "index" = excluded."index", name = excluded.name,
        vram_total_mib = coalesce(excluded.vram_total_mib, vram_total_mib), last_seen_at = excluded.last_seen_at
"""
